"""The ledger of a sweep: one file that says of each job whether it is pending, running, done, pruned or failed.

It is written whole, aside, and renamed at every change, so a kill leaves the last state or the one before; what it
says is running while nobody holds its lock was interrupted. The folder also has a log and a configuration a job.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Dict, List, Optional

from lm.failure import Failure
from lm.run import RunFailed, RunFolder, write_whole

LEDGER = "ledger.json"
ENDED = ("done", "pruned", "failed")
STATES = ("pending", "running", *ENDED)


@dataclass
class Job:
    """One job. key: EXPERIMENT/NAME-HASH, by its configuration's hash; refused-HASH for one that has none.

    overrides: those that the sweep chose. value: the objective. tries: how often it was started.
    """

    number: int
    key: str
    overrides: List[str]
    folder: Optional[str]
    status: str = "pending"
    kind: Optional[str] = None
    reason: str = ""
    value: Optional[float] = None
    tries: int = 0
    began: Optional[float] = None
    ended: Optional[float] = None

    @property
    def shown(self) -> str:
        return " ".join(self.overrides) or "(no overrides)"


class Ledger:
    """What became of each job of a sweep, by the job's key. Threads may share it; processes may not."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LEDGER
        self.command: List[str] = []  # the words after train.py, and the folder that they were typed in
        self.typed_in = ""
        self.objective = ""
        self.jobs: Dict[str, Job] = {}
        self._lock: Optional[IO[str]] = None
        self._writing = threading.Lock()
        self._read()

    def begin(self, command: List[str], objective: str) -> int:
        """Makes this process the sweep's only one. Returns how many jobs an earlier one left running: pending again.

        Raises RunFailed where another process is at work on it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / "lock", "a")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"another process works on this sweep: lm sweep status {self.folder}"
            raise RunFailed(text) from None
        self._read()  # again: another process may have written since
        interrupted = [job for job in self.jobs.values() if job.status == "running"]
        for job in interrupted:
            job.status = "pending"
        self.command, self.typed_in, self.objective = command, os.getcwd(), objective
        self._write()
        return len(interrupted)

    def _read(self) -> None:
        if self.path.exists():
            stored = json.loads(self.path.read_text())
            self.command, self.typed_in, self.objective = stored["command"], stored["typed_in"], stored["objective"]
            self.jobs = {key: Job(key=key, **job) for key, job in stored["jobs"].items()}

    def is_at_work(self) -> bool:
        """Whether some process works on the sweep now."""
        if not (self.folder / "lock").exists():
            return False
        with open(self.folder / "lock", "a") as probe:
            try:
                fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def add(self, key: str, overrides: List[str], folder: Optional[str]) -> Job:
        """The job of this key, pending where it is new."""
        with self._writing:
            if key not in self.jobs:
                number = max((job.number for job in self.jobs.values()), default=-1) + 1
                self.jobs[key] = Job(number, key, overrides, folder)
                self._write()
            return self.jobs[key]

    def drop(self, key: str) -> None:
        """Forgets a job that is not one any more."""
        with self._writing:
            if self.jobs.pop(key, None) is not None:
                self._write()

    def start(self, job: Job) -> None:
        with self._writing:
            job.status, job.kind, job.reason, job.value = "running", None, "", None
            job.tries, job.began, job.ended = job.tries + 1, time.time(), None
            self._write()

    def end(self, job: Job, status: str, failure: Optional[Failure] = None, value: Optional[float] = None) -> None:
        """status: one of ENDED, or pending for a job that was stopped and is to go on."""
        with self._writing:
            job.status, job.value, job.ended = status, value, time.time()
            if failure is not None:
                job.kind, job.reason = failure.key, failure.word
            self._write()

    def count(self, *states: str) -> int:
        return sum(job.status in states for job in self.jobs.values())

    def log_of(self, job: Job) -> Path:
        """What the job's processes said, of every try."""
        return self.folder / "logs" / f"{job.number}.txt"

    def run_of(self, job: Job) -> Optional[RunFolder]:
        """The job's run folder, from wherever this is asked; None where it has none."""
        return RunFolder(Path(self.typed_in) / job.folder) if job.folder else None

    def as_dict(self) -> Dict[str, Any]:
        jobs = {job.key: {name: value for name, value in asdict(job).items() if name != "key"} for job in self.all()}
        return {"command": self.command, "typed_in": self.typed_in, "objective": self.objective, "jobs": jobs}

    def all(self) -> List[Job]:
        return sorted(self.jobs.values(), key=lambda job: job.number)

    def _write(self) -> None:
        write_whole(self.path, json.dumps(self.as_dict(), indent=1) + "\n")
