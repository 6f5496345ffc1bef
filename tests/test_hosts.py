"""cluster=tf_hosts: partitions on TensorFlow servers of other processes, which may be silent, too few, or go."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest
from conftest import (
    ROOT,
    free_port,
    on_hosts,
    only_run,
    run_here,
    start,
    start_worker,
    train_lines,
    train_py,
    wait_until,
)

from lm.hosts import refuse_silent, silent
from lm.refusal import ConfigError

pytestmark = pytest.mark.processes


def test_a_host_that_is_killed_is_told_and_the_run_goes_on(small: List[str], two_hosts: List[int]) -> None:
    """Losses of single to 1e-5 in the end, through a kill -9 of the second stage and a new server in its place."""
    overrides = [*small, "train.steps=300", "train.eval_every_steps=300", "checkpoint.every_steps=20"]
    process = start(*overrides, *on_hosts(two_hosts), "run.experiment=hosts")
    wait_until(lambda: any(Path("outputs/hosts").glob("*/checkpoints/step-00000040")), process)
    subprocess.run(["pkill", "-9", "-f", f"lm.cli worker {two_hosts[1]}$"], check=True)
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 1
    assert f"failed: cluster.hosts: 127.0.0.1:{two_hosts[1]} has gone; start lm worker there again" in output
    again = start_worker(two_hosts[1])
    try:
        done = train_py(*overrides, *on_hosts(two_hosts), "run.experiment=hosts")
        status = Path(f"/proc/{again.pid}/status").read_text()
    finally:
        again.terminate()
        assert again.wait(10) == 0  # SIGTERM is how it ends
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step" in done.stdout
    assert "peak a stage" in done.stdout
    summary = json.loads((only_run("hosts") / "summary.json").read_text())
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024  # of the second stage's process, a little later
    assert 0.9 * peak < summary["stage_peak_memory_bytes"][1] <= peak
    run_here([*overrides, "run.experiment=one"])
    curves = [[line["loss"] for line in train_lines(only_run(name))] for name in ("hosts", "one")]
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


def test_fewer_hosts_than_partitions_are_refused(small: List[str], two_hosts: List[int]) -> None:
    done = train_py(*small, *on_hosts(two_hosts[:1]))
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"2 partitions want a device each: 2 are 127.0.0.1:{two_hosts[0]}'s share, which has 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_host_without_a_partition_is_refused(small: List[str], two_hosts: List[int]) -> None:
    done = train_py(*small, *on_hosts(two_hosts), "parallel.partitions=1")
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"2 hosts and 1 partitions: 127.0.0.1:{two_hosts[1]} would have none" in done.stderr


def test_silent_hosts_are_all_named_before_anything_starts() -> None:
    first, second = free_port(), free_port()
    with pytest.raises(ConfigError) as refused:
        refuse_silent([f"127.0.0.1:{first}", f"127.0.0.1:{second}"])
    assert [problem.fix for problem in refused.value.problems] == [
        f"on 127.0.0.1: lm worker {port}" for port in (first, second)
    ]
    assert set(silent(["10.0.0..4:4100", "127.0.0.1:70000"])) == {"10.0.0..4:4100", "127.0.0.1:70000"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert silent([f"127.0.0.1:{listener.getsockname()[1]}"]) == {}


def test_a_port_that_is_taken_is_a_failure_with_one_line() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        command = [sys.executable, "-m", "lm.cli", "worker", str(listener.getsockname()[1])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "failed: [Errno 98] Address already in use\n"


def test_ctrl_c_ends_a_worker() -> None:
    process = start_worker(free_port())
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
