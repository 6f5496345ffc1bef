"""Runs jobs one after the other, each in processes of its own; more than one are under horovodrun's engine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any, Dict, List, Sequence

import psutil
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from lm import job
from lm.config import load
from lm.plan import make_plan
from lm.run import write_whole
from lm.schema import Config

GRACE_SECONDS = 120  # for a save after SIGTERM; SageMaker's spot instances grant as much
PREFIX = re.compile(r"^\[(?P<rank>\d+)\]<(?P<stream>stdout|stderr)>:?(?P<text>.*)$")
LAUNCH_ID = "LM_LAUNCH_ID"


def launch(launcher: Any, job_overrides: Sequence[Sequence[str]], first_index: int) -> List[JobReturn]:
    """Runs every job and reports each; one that is refused or fails does not keep the others from running.

    Ends the process with the job's own status if there is one job, and with 1 if one of several did not finish.
    """
    single = len(job_overrides) == 1 and first_index == 0
    returns, failures = [], []
    for index, overrides in enumerate(job_overrides, first_index):
        shown = " ".join(filter_overrides(overrides)) or "(no overrides)"
        if not single:
            print(f"\njob {index}: {shown}", flush=True)
        composed = _compose(launcher.hydra_context, launcher.config, overrides, index)
        status = job.status_of(lambda composed=composed: _run(composed))  # type: ignore[misc]
        if status:
            failures.append((index, shown, status))
        if single and status:
            sys.exit(status)
        if status > 128:  # stopped by a signal: so is the sweep
            break
        result = JobReturn(overrides=list(overrides), cfg=composed)
        result.status = JobStatus.FAILED if status else JobStatus.COMPLETED
        result.return_value = RuntimeError(f"job {index} ended with status {status}") if status else 0
        returns.append(result)
    if failures:
        meaning = {job.REFUSED: "refused", job.FAILED: "failed"}
        print(f"\n{len(failures)} of {len(job_overrides)} jobs did not finish:", file=sys.stderr)
        for index, shown, status in failures:
            print(f"  job {index} {meaning.get(status, 'stopped')} (status {status}): {shown}", file=sys.stderr)
        last = failures[-1][2]
        sys.exit(last if last > 128 else job.FAILED)
    return returns


def _compose(context: HydraContext, config: DictConfig, overrides: Sequence[str], index: int) -> DictConfig:
    composed = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id = str(index)
        composed.hydra.job.num = index
        del composed["hydra"]
    return composed


def _run(composed: DictConfig) -> int:
    """One job. Returns its exit status. Raises ConfigError."""
    config = load(composed)
    run, done = job.begin(config, make_plan(config))
    if done:
        return 0
    write_whole(run.config, OmegaConf.to_yaml(OmegaConf.create(config.as_dict())))
    return _run_processes(config, run.config)


def _run_processes(config: Config, config_file: Path) -> int:
    """Starts the processes, passes their output and signals on, and leaves none behind."""
    command = [sys.executable, "-u", "-m", "lm.worker", str(config_file)]
    processes = config.cluster.processes
    if processes > 1:
        command = [sys.executable, "-u", "-m", "hydra_plugins.lm_launchers._gloo", str(processes), *command]
    launch_id = uuid.uuid4().hex
    environment = {**os.environ, LAUNCH_ID: launch_id, "PYTHONPATH": _python_path()}
    child = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a terminal's Ctrl-C reaches us alone, and we pass it on in order
    )
    received: List[int] = []

    overdue = threading.Timer(GRACE_SECONDS, _kill, [launch_id])
    overdue.daemon = True

    def pass_on(number: int, _frame: object) -> None:
        if received:  # asked twice: not to wait any longer
            _kill(launch_id)
            return
        received.append(number)
        _signal_workers(launch_id, number)
        overdue.start()

    earlier = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        tracebacks = _relay(child, processes)
        status = child.wait()
    finally:
        overdue.cancel()
        _kill(launch_id)
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if received:
        return 128 + received[0]
    if status and processes > 1:
        first = next((text for text in tracebacks if "HorovodInternalError" not in text), None)
        if first:
            print(f"\nfirst cause:\n{first}", file=sys.stderr)
    return job.FAILED if status not in (0, job.REFUSED) else status


def _python_path() -> str:
    """Where the processes find lm and this package, whatever folder they are started from."""
    places = [Path(job.__file__).parents[1], Path(__file__).parents[2]]
    return os.pathsep.join([*(str(place.resolve()) for place in places), os.environ.get("PYTHONPATH", "")])


def _relay(child: subprocess.Popen[str], processes: int) -> List[str]:
    """Prints the processes' lines, prefixed by rank where there are several; returns their tracebacks as they came."""
    assert child.stdout is not None
    complete: List[str] = []
    pending: Dict[str, List[str]] = {}
    for line in child.stdout:
        match = PREFIX.match(line.rstrip("\n"))
        rank, text = (match["rank"], match["text"]) if match else ("", line.rstrip("\n"))
        print(f"[{rank}] {text}" if match and processes > 1 else text, flush=True)
        if text.startswith("Traceback (most recent call last)"):
            pending[rank] = [f"[{rank}] {text}"]
        elif text.startswith("failed: "):
            complete.append(f"[{rank}] {text}")
        elif rank in pending:
            pending[rank].append(text)
            if text and not text.startswith(" "):  # the exception itself ends a traceback
                complete.append("\n".join(pending.pop(rank)))
    return complete


def _signal_workers(launch_id: str, number: int) -> None:
    """Signals the training processes and not horovodrun, which would kill them before they have saved."""
    for process in _launched(launch_id):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[1:4] == ["-u", "-m", "lm.worker"]:
                process.send_signal(number)


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
