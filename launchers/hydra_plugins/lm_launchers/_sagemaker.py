"""Submits each job of a run or a sweep to SageMaker and follows it; of a sweep, several at once."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, List, Sequence

from hydra.core.utils import JobReturn
from hydra_plugins.lm_launchers import _points
from hydra_plugins.lm_launchers._sweep import Outcome, sweep_in

from lm import job as jobs
from lm.catalog.checks import refuse_unworkable
from lm.config import load
from lm.failure import JobFailed, classify
from lm.refusal import ConfigError, Problem
from lm.run import run_folder
from lm.sagemaker.jobs import stop_run
from lm.sagemaker.launch import run_job
from lm.schema import Config, SageMaker
from lm.sweep.ledger import Job


def launch(launcher: Any, job_overrides: Sequence[Sequence[str]], first_index: int) -> List[JobReturn]:
    """Runs one job and ends the process with its status; of a sweep, every job that is not done yet.

    Of a sweep at most cluster.max_parallel_jobs run at once, and all of them are checked before the first is sent.
    """
    if not _points.is_sweep(launcher):

        def work() -> int:
            config = load(_points.compose_job(launcher, job_overrides[0], first_index))
            _check(config)
            return run_job(config)

        status = jobs.status_of(work)
        if status:
            sys.exit(status)
        return []
    points = _points.points_of(launcher, job_overrides, _check)
    first = _points.first_config(launcher, points)
    dry = first.cluster.dry_run  # nothing is done, and nothing to remember
    folder = _aside() if dry else _points.folder_of(launcher)
    sweep = sweep_in(folder, first, tracked=not dry)
    launcher.jobs = sweep.run(points, There(first.cluster.max_parallel_jobs), launcher.judge)
    return _points.returns_of(job_overrides, launcher.jobs)


@functools.cache
def _aside() -> Path:
    """This process's folder for what is not to be remembered."""
    return Path(tempfile.mkdtemp())


class There:
    """So many SageMaker jobs at once, each followed by a thread."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once

    def run(self, job: Job, config: Config, log: Path, slot: int) -> Outcome:
        said: List[Exception] = []

        def work() -> int:
            try:
                return run_job(config, f"job {job.number}: ")
            except Exception as error:
                said.append(error)
                raise

        status = jobs.status_of(work)
        for error in said:
            with open(log, "a") as file:
                file.write(f"{error}\n")
        failure = said[0].failure if said and isinstance(said[0], JobFailed) else None
        if said and failure is None:
            failure = classify("", str(said[0]))
        finished = run_folder(config).read_summary().get("status") == "finished"
        goes_on = status == 0 and config.cluster.detach and not finished
        return Outcome(None if goes_on else status, failure)

    def end_early(self, job: Job, config: Config) -> None:
        stop_run(config)

    def interrupted(self, number: int) -> None:
        print("\nthe jobs that were submitted go on: lm jobs lists them", flush=True)
        os._exit(128 + number)  # threads are in the middle of following, and the interpreter would wait for them


def _check(config: Config) -> None:
    """Raises ConfigError for a job that cannot be sent."""
    if not isinstance(config.cluster, SageMaker):
        text = f"hydra/launcher=sagemaker with cluster={config.cluster.name}, which names no machines"
        raise ConfigError([Problem(("cluster",), text, "cluster=p3x1, or another of SageMaker's")])
    refuse_unworkable(config)
