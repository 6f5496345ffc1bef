"""Runs a job in processes of its own; more than one are under horovodrun's engine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any, List, Sequence, Tuple

import psutil
from hydra.core.utils import JobReturn

from lm import job
from lm.causes import Causes
from lm.config import load
from lm.plan import make_plan
from lm.schema import Config

GRACE_SECONDS = 120  # for a save after SIGTERM; SageMaker's spot instances grant as much
PREFIX = re.compile(r"^\[(?P<rank>\d+)\]<(?P<stream>stdout|stderr)>:?(?P<text>.*)$")
LAUNCH_ID = "LM_LAUNCH_ID"
PR_SET_PDEATHSIG = 1


def launch(launcher: Any, job_overrides: Sequence[Sequence[str]], first_index: int) -> List[JobReturn]:
    """Runs one job here and now, and ends the process with its status; of a sweep, every job that is not done yet."""
    from hydra_plugins.lm_launchers import _here, _points, _sweep

    if not _points.is_sweep(launcher):
        composed = _points.compose_job(launcher, job_overrides[0], first_index)
        status = job.status_of(lambda: run_job(load(composed)))
        if status:
            sys.exit(status)
        return []
    points = _points.points_of(launcher, job_overrides, lambda config: None)
    first = _points.first_config(launcher, points)
    sweep = _sweep.sweep_in(_points.folder_of(launcher), first)
    launcher.jobs = sweep.run(points, _here.Here(first.sweep.jobs_at_once, sweep.ledger.folder), launcher.judge)
    return _points.returns_of(job_overrides, launcher.jobs)


def run_job(config: Config) -> int:
    """One job. Returns its exit status. Raises ConfigError."""
    run, done = job.begin(config, make_plan(config))
    if done:
        return 0
    run.write_config(config)
    run.summary.unlink(missing_ok=True)  # what it says is to be of these processes
    status, received = _run_processes(config, run.config)
    ended = run.read_summary()
    if ended.get("status") == "finished":
        return 0
    if ended.get("status") == "stopped":
        return 128 + (received or ended["signal"] or signal.SIGTERM)
    if received and not ended:  # before the first step: there was nothing to save
        return 128 + received
    return status or job.FAILED


def _run_processes(config: Config, config_file: Path) -> Tuple[int, int]:
    """Starts the processes, passes their output and signals on, and leaves none behind.

    Returns 2 where they refused, 1 where they failed, else 0; and the signal that was passed on, or 0.
    """
    command = [sys.executable, "-u", "-m", "lm.worker", str(config_file)]
    processes, kills = config.cluster.processes, _kills_for_memory()
    if processes > 1:
        command = [sys.executable, "-u", "-m", "hydra_plugins.lm_launchers._gloo", str(processes), *command]
    launch_id = uuid.uuid4().hex
    received: List[int] = []
    overdue = threading.Timer(GRACE_SECONDS, end_marked, [LAUNCH_ID, launch_id])
    overdue.daemon = True

    def pass_on(number: int, _frame: object) -> None:
        if received:
            return
        received.append(number)
        if _signal_workers(launch_id, number):
            overdue.start()
        else:  # none has started yet, so none has anything to save
            end_marked(LAUNCH_ID, launch_id)

    # Before there is a process, or a signal that comes in between would be nobody's.
    earlier = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        child = subprocess.Popen(
            command,
            env={**os.environ, LAUNCH_ID: launch_id, "PYTHONPATH": python_path()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C reaches us alone, and we pass it on in order
            preexec_fn=end_with_the_launcher,
        )
        if received:
            end_marked(LAUNCH_ID, launch_id)
        told = _relay(child, processes)
        status = child.wait()
    finally:
        overdue.cancel()
        end_marked(LAUNCH_ID, launch_id)
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if received or not status:
        return (job.FAILED if status else 0), (received[0] if received else 0)
    cause = told.first()
    if processes > 1 and cause:
        print(f"\nfirst cause:\n{cause}", file=sys.stderr)
    if status < 0:  # nobody could say a word
        memory = ", as the kernel did for want of memory" if _kills_for_memory() > kills else ""
        print(f"failed: the training process was ended by signal {-status}{memory}", file=sys.stderr)
    return (job.REFUSED if told.refused else job.FAILED), 0


def end_with_the_launcher() -> None:
    """In the child, before it runs: the kernel kills it when the launcher is gone, even by kill -9 (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kills_for_memory() -> int:
    """How many processes Linux has ended so far because memory ran out (proc(5), /proc/vmstat)."""
    counters = Path("/proc/vmstat")
    lines = counters.read_text().splitlines() if counters.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def python_path() -> str:
    """Where the processes find lm and this package, whatever folder they are started from."""
    places = [Path(job.__file__).parents[1], Path(__file__).parents[2]]
    return os.pathsep.join([*(str(place.resolve()) for place in places), os.environ.get("PYTHONPATH", "")])


def _relay(child: subprocess.Popen[str], processes: int) -> Causes:
    """Prints the processes' lines, prefixed by rank where there are several."""
    assert child.stdout is not None
    told = Causes()
    for line in child.stdout:
        match = PREFIX.match(line.rstrip("\n"))
        rank, text = (match["rank"], match["text"]) if match else ("", line.rstrip("\n"))
        print(f"[{rank}] {text}" if match and processes > 1 else text, flush=True)
        told.hear(rank, text)
    return told


def _signal_workers(launch_id: str, number: int) -> int:
    """Signals the training processes and not horovodrun's engine; returns how many there were."""
    count = 0
    for process in _marked(LAUNCH_ID, launch_id):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[1:4] == ["-u", "-m", "lm.worker"]:
                process.send_signal(number)
                count += 1
    return count


def end_marked(variable: str, value: str) -> List[psutil.Process]:
    """Kills whatever carries a mark in its environment; returns it, as some of it may be ending still."""
    found = _marked(variable, value)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return found


def _marked(variable: str, value: str) -> List[psutil.Process]:
    """Every process of a launch, wherever horovodrun's shells have put it: they all carry its mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(variable) == value:
                found.append(process)
    return found
