"""A sweep's jobs on this machine: each a process of its own, which starts the job's training processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Dict

import psutil
from hydra_plugins.lm_launchers._local import GRACE_SECONDS, end_marked, python_path
from hydra_plugins.lm_launchers._sweep import Outcome

from lm.config import to_yaml
from lm.failure import Failure, failure_of
from lm.run import write_whole
from lm.schema import Config
from lm.sweep.ledger import Job

SWEEP = "LM_SWEEP"  # in the environment of whatever a sweep has started


class Here:
    """So many jobs at once, which share the cores.

    folder: the sweep's, which nobody else works on; what is left of its processes after a kill is ended.
    """

    def __init__(self, at_once: int, folder: Path) -> None:
        self.at_once, self.mark = at_once, str(folder.resolve())
        psutil.wait_procs(end_marked(SWEEP, self.mark), timeout=GRACE_SECONDS)
        self.children: Dict[str, subprocess.Popen[bytes]] = {}  # by the jobs' keys
        self.received = 0

    def run(self, job: Job, config: Config, log: Path, slot: int) -> Outcome:
        file = log.with_suffix(".yaml")
        write_whole(file, to_yaml(config))
        words = [str(file), str(slot), str(self.at_once), str(os.getpid())]
        command = [sys.executable, "-u", "-m", "hydra_plugins.lm_launchers._job", *words]
        with open(log, "ab") as output:
            began = output.tell()
            child = subprocess.Popen(
                command,
                env={**os.environ, SWEEP: self.mark, "PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches the sweep alone
            )
        self.children[job.key] = child
        if self.received:  # while it was being started
            child.send_signal(self.received)
        status = child.wait()
        del self.children[job.key]
        status = 128 - status if status < 0 else status
        return Outcome(status, _failure(status, log.read_bytes()[began:].decode(errors="replace")))

    def end_early(self, job: Job, config: Config) -> None:
        child = self.children.get(job.key)
        if child is not None:
            child.send_signal(signal.SIGTERM)

    def interrupted(self, number: int) -> None:
        self.received = number
        for child in list(self.children.values()):
            child.send_signal(number)


def _failure(status: int, output: str) -> Failure:
    ended = f"the job's process was ended by signal {status - 128}" if status > 128 else f"exit status {status}"
    return failure_of(output, ended)
