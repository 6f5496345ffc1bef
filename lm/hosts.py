"""Hosts that hold partitions for a run elsewhere: the server that `lm worker` is, and whether hosts answer."""

from __future__ import annotations

import signal
import socket
import threading
from typing import Dict, List

from lm.refusal import ConfigError, Problem

ANSWER_SECONDS = 5.0


def refuse_silent(hosts: List[str]) -> None:
    """Raises ConfigError for hosts that do not answer: TensorFlow would wait for them without a word."""
    problems = []
    for address, error in silent(hosts).items():
        host, _, port = address.rpartition(":")
        text = f"cluster.hosts: nothing answers at {address} ({error})"
        problems.append(Problem(("cluster.hosts",), text, f"on {host}: lm worker {port}"))
    if problems:
        raise ConfigError(problems)


def silent(hosts: List[str]) -> Dict[str, str]:
    """The hosts that do not answer, and why."""
    why = {}
    for address in hosts:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
        except (OSError, ValueError, OverflowError) as error:  # no such name, or no name or port at all
            why[address] = str(error)
    return why


def serve(port: int) -> int:
    """Serves this host's devices to whoever connects, until SIGINT or SIGTERM. Returns 0.

    Raises OSError where the port is taken. TensorFlow's servers ask nobody who they are: a private network alone.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    from lm.start import import_tensorflow

    import_tensorflow()
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    server = tf.distribute.Server({"partition": [f"localhost:{port}"]}, job_name="partition", task_index=0)
    address = server.target[len("grpc://") :]
    print(f"{address}: this host's devices are here for cluster=tf_hosts; Ctrl-C ends it", flush=True)
    while not ended.wait(0.2):  # a signal that another thread receives does not wake this one
        pass
    return 0
