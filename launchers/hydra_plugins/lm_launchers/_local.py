"""Runs jobs one after the other, each in processes of its own; more than one are under horovodrun's engine."""

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
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

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
    """Runs every job and reports each; one that is refused or fails does not keep the others from running.

    Ends the process with the job's own status if there is one job, and with 1 if one of several did not finish.
    """
    single = len(job_overrides) == 1 and first_index == 0
    returns, unfinished = [], []
    for index, overrides in enumerate(job_overrides, first_index):
        shown = " ".join(filter_overrides(overrides)) or "(no overrides)"
        if not single:
            print(f"\njob {index}: {shown}", flush=True)
        composed = compose_job(launcher.hydra_context, launcher.config, overrides, index)
        status = job.status_of(lambda composed=composed: run_job(composed))  # type: ignore[misc]
        if single and status:
            sys.exit(status)
        if status:
            unfinished.append((index, shown, status))
        if status > 128:  # stopped by a signal: so is the sweep
            break
        done = JobReturn(overrides=list(overrides), cfg=composed, status=JobStatus.COMPLETED)
        done.return_value = 0
        returns.append(done)
    end_of_sweep(unfinished, len(job_overrides))
    return returns


def end_of_sweep(unfinished: Sequence[Tuple[int, str, int]], jobs: int) -> None:
    """Tells of the jobs that did not finish (number, overrides, status) and ends the process where there are any."""
    if unfinished:
        meaning = {job.REFUSED: "refused", job.FAILED: "failed"}
        print(f"\n{len(unfinished)} of {jobs} jobs did not finish:", file=sys.stderr)
        for index, shown, status in unfinished:
            print(f"  job {index} {meaning.get(status, 'stopped')} (status {status}): {shown}", file=sys.stderr)
        last = unfinished[-1][2]
        sys.exit(last if last > 128 else job.FAILED)


def compose_job(context: HydraContext, config: DictConfig, overrides: Sequence[str], index: int) -> DictConfig:
    """The configuration of one job of a sweep, without Hydra's own part."""
    composed = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id = str(index)
        composed.hydra.job.num = index
        del composed["hydra"]
    return composed


def run_job(composed: DictConfig) -> int:
    """One job. Returns its exit status. Raises ConfigError."""
    config = load(composed)
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
    processes = config.cluster.processes
    if processes > 1:
        command = [sys.executable, "-u", "-m", "hydra_plugins.lm_launchers._gloo", str(processes), *command]
    launch_id = uuid.uuid4().hex
    received: List[int] = []
    overdue = threading.Timer(GRACE_SECONDS, _kill, [launch_id])
    overdue.daemon = True

    def pass_on(number: int, _frame: object) -> None:
        if received:
            return
        received.append(number)
        if _signal_workers(launch_id, number):
            overdue.start()
        else:  # none has started yet, so none has anything to save
            _kill(launch_id)

    # Before there is a process, or a signal that comes in between would be nobody's.
    earlier = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        child = subprocess.Popen(
            command,
            env={**os.environ, LAUNCH_ID: launch_id, "PYTHONPATH": _python_path()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C reaches us alone, and we pass it on in order
            preexec_fn=_end_with_the_launcher,
        )
        if received:
            _kill(launch_id)
        told = _relay(child, processes)
        status = child.wait()
    finally:
        overdue.cancel()
        _kill(launch_id)
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if received or not status:
        return (job.FAILED if status else 0), (received[0] if received else 0)
    cause = told.first()
    if processes > 1 and cause:
        print(f"\nfirst cause:\n{cause}", file=sys.stderr)
    return (job.REFUSED if told.refused else job.FAILED), 0


def _end_with_the_launcher() -> None:
    """In the child, before it runs: the kernel kills it when the launcher is gone, even by kill -9 (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _python_path() -> str:
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
    for process in _launched(launch_id):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[1:4] == ["-u", "-m", "lm.worker"]:
                process.send_signal(number)
                count += 1
    return count


def _kill(launch_id: str) -> None:
    for process in _launched(launch_id):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _launched(launch_id: str) -> List[psutil.Process]:
    """Every process of a launch, wherever horovodrun's shells have put it: they all carry its mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(LAUNCH_ID) == launch_id:
                found.append(process)
    return found
