"""What Hydra asks a launcher for: whether it is a sweep; each of its points composed and checked; what it gets."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, Callable, List, Sequence, TypeVar

from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.lm_launchers._sweep import Point
from omegaconf import DictConfig, open_dict

from lm.config import load
from lm.job import status_of
from lm.points import swept_keys
from lm.refusal import ConfigError, Problem
from lm.schema import Config
from lm.sweep.ledger import Job

T = TypeVar("T")


def compose_job(launcher: Any, overrides: Sequence[str], index: int) -> DictConfig:
    """The configuration of one job, without Hydra's own part."""
    composed = launcher.hydra_context.config_loader.load_sweep_config(launcher.config, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id = str(index)
        composed.hydra.job.num = index
        del composed["hydra"]
    return composed


def is_sweep(launcher: Any) -> bool:
    """Whether Hydra was asked for several values of something; else it is one job, which a launcher starts."""
    return bool(_swept(launcher))


def folder_of(launcher: Any) -> Path:
    """The sweep's folder; the same command has the same."""
    return Path(launcher.config.hydra.sweep.dir)


def points_of(launcher: Any, job_overrides: Sequence[Sequence[str]], check: Callable[[Config], None]) -> List[Point]:
    """Every job composed, typed and checked, before the first is started. check: raises ConfigError for more.

    Raises ConfigError where all of a sweep's points are refused: there is nothing to do, and nothing to remember.
    """
    points = [_point(launcher, overrides, index, check) for index, overrides in enumerate(job_overrides)]
    others_may_come = launcher.judge is not None or launcher.config.hydra.sweeper.get("max_batch_size") is not None
    if not any(point.config for point in points) and not others_may_come:
        problems = [problem for point in points if point.refusal for problem in point.refusal.problems]
        raise ConfigError(dict.fromkeys(problems))
    return points


def first_config(launcher: Any, points: Sequence[Point]) -> Config:
    """Of the first point that is not refused, else of the command without what is swept: the sweep's own settings.

    Raises ConfigError where that is refused too.
    """
    found = next((point.config for point in points if point.config is not None), None)
    return found or load(compose_job(launcher, [], 0))


def or_exit(work: Callable[[], T]) -> T:
    """What some work returns; what it refuses or fails with is told here, since Hydra would show a traceback."""
    returned: List[T] = []

    def keep() -> int:
        returned.append(work())
        return 0

    status = status_of(keep)
    if status:
        sys.exit(status)
    return returned[0]


def returns_of(job_overrides: Sequence[Sequence[str]], jobs: Sequence[Job]) -> List[JobReturn]:
    """What a sweeper of Hydra's reads: the objective of each job, not a number where it did not finish.

    No failure raises there, which would end the batches that follow: the ledger has it.
    """
    returns = []
    for overrides, one in zip(job_overrides, jobs):
        returned = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
        returned.return_value = one.value if one.status == "done" and one.value is not None else math.nan
        returns.append(returned)
    return returns


def _point(launcher: Any, overrides: Sequence[str], index: int, check: Callable[[Config], None]) -> Point:
    keys = _swept(launcher)
    chosen = [text for text in overrides if text.partition("=")[0] in keys]
    composed = compose_job(launcher, overrides, index)
    try:
        config = load(composed)
        if config.run.directory is not None:
            text = f"run.directory={config.run.directory} is one folder, and each job of a sweep has its own"
            raise ConfigError([Problem(("run.directory",), text, "run.experiment=NAME keeps a sweep's runs together")])
        check(config)
    except ConfigError as error:
        return Point(chosen, None, error)
    return Point(chosen, config)


def _swept(launcher: Any) -> List[str]:
    hydra = launcher.config.hydra
    return sorted(swept_keys(hydra.overrides.task, hydra.sweeper.get("params") or {}))
