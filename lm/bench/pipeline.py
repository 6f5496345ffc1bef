"""The pipeline's rate beside the ideal of its slowest stage: in one process, and on two hosts' worth of servers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any, Dict, Iterator, List

from rich.console import Console
from rich.table import Table

from lm.hosts import silent
from lm.refusal import ConfigError, Problem

ARRANGEMENTS = (("one process", "interleaved"), ("one process", "simple"), ("a server a stage", "interleaved"))
START_SECONDS = 120.0
LAYERS = 8


def bench_pipeline(partitions: int, microbatches: int, console: Console) -> List[Dict[str, Any]]:
    """Measures, prints and returns each arrangement's times in seconds. Raises ConfigError for too few cores.

    The ideal of P stages and M microbatches is M + P - 1 times the slowest stage's microbatch (Huang et al. 2019,
    GPipe, section 2.3): M of work, and P - 1 of bubble in which it waits.
    """
    cores = sorted(os.sched_getaffinity(0))
    most = min(len(cores), LAYERS)
    if partitions > most:
        text = f"{partitions} stages want a core and a block each, and there are {len(cores)} and {LAYERS}"
        raise ConfigError([Problem(("partitions",), text, f"--partitions {most}")])
    found = []
    for where, pipeline in ARRANGEMENTS:
        console.print(f"measuring {where}, {pipeline}: about a minute")
        with _servers(cores[:partitions] if where != "one process" else []) as hosts:
            shape = dict(layers=LAYERS, partitions=partitions, microbatches=microbatches)
            measured = _measure(dict(**shape, pipeline=pipeline, hosts=hosts))
        slowest = max(measured["stages"])
        measured.update(where=where, order=pipeline, ideal=(microbatches + partitions - 1) * slowest)
        measured["share_of_ideal"] = measured["ideal"] / measured["pipeline"]
        measured["bubble"] = (partitions - 1) * slowest
        found.append(measured)
    table = Table(title=f"{partitions} stages, {microbatches} microbatches, a core a stage; ms")
    for heading in ("where", "order", "stages alone", "ideal", "of it bubble", "pipeline", "of the ideal", "crossing"):
        table.add_column(heading)
    for one in found:
        stages = " ".join(f"{1e3 * stage:.1f}" for stage in one["stages"])
        crossing = f"{1e3 * one['crossing']:.2f} for 2 x {one['crossing_bytes'] / 2**10:.0f} KiB"
        times = [f"{1e3 * one[name]:.0f}" for name in ("ideal", "bubble", "pipeline")]
        table.add_row(one["where"], one["order"], stages, *times, f"{one['share_of_ideal']:.1%}", crossing)
    console.print(table)
    console.print("stages alone and crossing (a microbatch's activations forward, their gradients back): a microbatch")
    return found


def _measure(settings: Dict[str, Any]) -> Dict[str, Any]:
    command = [sys.executable, "-m", "lm.bench.stages", json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ChildProcessError(f"the measurement of {settings} ended with status {done.returncode}")
    measured: Dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


@contextlib.contextmanager
def _servers(cores: List[int]) -> Iterator[List[str]]:
    """A `lm worker` on each core; their addresses."""
    ports = []
    for _ in cores:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "lm.cli", "worker", str(port)],
            preexec_fn=lambda core=core: os.sched_setaffinity(0, {core}),  # type: ignore[misc]
            stdout=subprocess.DEVNULL,
        )
        for core, port in zip(cores, ports)
    ]
    hosts = [f"127.0.0.1:{port}" for port in ports]
    try:
        deadline = time.monotonic() + START_SECONDS
        while silent(hosts):
            if any(server.poll() is not None for server in started) or time.monotonic() > deadline:
                raise ChildProcessError("a server of the benchmark did not start")
            time.sleep(0.2)
        yield hosts
    finally:
        for server in started:
            server.kill()
            server.wait()
