"""The run folder: where it is, the names of its files, and how they are written so that a kill cannot spoil them."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, Optional, Tuple

from lm.config import to_yaml
from lm.schema import Config

OUTPUTS = Path("outputs")
STATE = "checkpoint.json"  # of a checkpoint, written last


class RunFailed(Exception):
    """A run that cannot go on, for a reason that one message tells. Exit status 1."""


class RunFolder:
    """outputs/<experiment>/<name>-<hash>/ and what is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.attempts = path / "attempts.jsonl"
        self.summary = path / "summary.json"
        self.log = path / "log.txt"
        self.checkpoints = path / "checkpoints"
        self.tracking = path / "mlflow.json"
        self.sample = path / "sample.txt"
        self.profiler = path / "profiler-output"
        self._lock: Optional[IO[str]] = None

    def lock(self) -> None:
        """Makes this process the run's only writer. Raises RunFailed where another one is at work."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / "lock", "w")  # noqa: SIM115 - held until the process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"another process is training in {self.path}; run.name=NAME starts a run beside it"
            raise RunFailed(text) from None

    def unlock(self) -> None:
        """Lets another process write to the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def set_aside(self) -> None:
        """Renames an earlier run out of the way; nothing is deleted. Raises RunFailed where it is being trained."""
        if self.path.exists():
            self.lock()
            number = 1
            while (aside := self.path.with_name(f"{self.path.name}.old{number}")).exists():
                number += 1
            os.rename(self.path, aside)

    def write_config(self, config: Config) -> None:
        """Writes the resolved configuration: what a worker reads, and what a reader repeats the run with."""
        write_whole(self.config, to_yaml(config))

    def whole_checkpoints(self) -> List[Tuple[int, Path]]:
        """Step and folder of each checkpoint that was written to its end, newest first; checksums are not read."""
        return whole_checkpoints(self.checkpoints)

    def read_summary(self) -> Dict[str, Any]:
        """summary.json, or nothing where the run has not ended yet."""
        return json.loads(self.summary.read_text()) if self.summary.exists() else {}

    def metric_lines(self, start: int = 0) -> Iterator[Tuple[Dict[str, Any], int]]:
        """The whole lines of metrics.jsonl from a byte on, and the byte where each ends."""
        return _whole_lines(self.metrics, start)

    def begin_attempt(self, began: float, saved_at: Optional[float]) -> float:
        """Notes an attempt; returns how long those before went on after what they saved last: it is done again.

        As far as metrics tell, so before `forget_metrics_after`. began: by the clock. saved_at: None where nothing was.
        """
        work = [line["time"] for line, _ in self.metric_lines() if kind_of(line) != "goodput"]
        before = [attempt for attempt, _ in _whole_lines(self.attempts)]
        lost = 0.0
        if before and before[-1]["began"] > (saved_at or 0.0):  # the last one saved nothing either
            lost, since = before[-1]["lost_seconds"], before[-1]["began"]
        else:
            since = saved_at or min(work, default=began)
        lost += max(0.0, max(work, default=since) - since)
        attempts = [*before, {"began": began, "lost_seconds": lost}]
        write_whole(self.attempts, "".join(json.dumps(attempt) + "\n" for attempt in attempts))
        return lost

    def began(self) -> Optional[float]:
        """When the first attempt did, by the clock; None where none has been noted."""
        return next((attempt["began"] for attempt, _ in _whole_lines(self.attempts)), None)

    def forget_metrics_after(self, step: int) -> List[Dict[str, Any]]:
        """Drops the lines of steps that will be done again; returns those that stay."""
        kept = [line for line, _ in self.metric_lines() if line["step"] <= step]
        write_whole(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        return kept

    def append_metrics(self, values: Dict[str, Any]) -> None:
        """Adds a line. A number that is not finite is null there, and named under "nonfinite"."""
        with open(self.metrics, "a") as file:
            file.write(json.dumps(_finite(values)) + "\n")

    def write_summary(self, values: Dict[str, Any]) -> None:
        """Writes summary.json, numbers that are not finite as above."""
        write_whole(self.summary, json.dumps(_finite(values), indent=1) + "\n")


def kind_of(line: Dict[str, Any]) -> str:
    """What a line of metrics.jsonl is of: steps ("train"), an evaluation ("val"), an attempt's end ("goodput")."""
    return "val" if "val_loss" in line else "goodput" if "goodput/other" in line else "train"


def _whole_lines(path: Path, start: int = 0) -> Iterator[Tuple[Dict[str, Any], int]]:
    """The lines of a .jsonl file from a byte on, and the byte where each ends; one that a kill cut is left out."""
    if path.exists():
        with open(path, "rb") as file:
            file.seek(start)
            for line in file:
                start += len(line)
                if line.endswith(b"\n"):
                    yield json.loads(line), start


def whole_checkpoints(folder: Path) -> List[Tuple[int, Path]]:
    """As RunFolder's, of a folder of checkpoints."""
    named = ((re.fullmatch(r"step-(\d{8,})", path.parent.name), path.parent) for path in folder.glob(f"*/{STATE}"))
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def run_folder(config: Config) -> RunFolder:
    """The folder of a configuration: run.directory, or the one that its hash names."""
    run = config.run
    if run.directory is not None:
        return RunFolder(Path(run.directory))
    return RunFolder(OUTPUTS / run_name(config))


def run_name(config: Config) -> str:
    """EXPERIMENT/NAME-HASH: the same settings have the same name wherever they run."""
    return f"{config.run.experiment}/{config.run.name}-{config.hash()}"


def _finite(values: Dict[str, Any]) -> Dict[str, Any]:
    bad = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    kept = {key: None if key in bad else value for key, value in values.items()}
    return {**kept, "nonfinite": bad} if bad else kept


def write_whole(path: Path, text: str) -> None:
    """Replaces a file at once: written aside, synced, renamed."""
    aside = path.with_name(path.name + ".partial")
    with open(aside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a rename in this folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
