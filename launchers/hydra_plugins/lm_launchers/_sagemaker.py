"""Submits each job of a run or a sweep to SageMaker and follows it; of a sweep, several at once."""

from __future__ import annotations

import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, List, NamedTuple, Sequence

from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra_plugins.lm_launchers._local import compose_job, end_of_sweep
from omegaconf import DictConfig

from lm import job
from lm.catalog.checks import refuse_unworkable
from lm.config import load
from lm.refusal import ConfigError, Problem
from lm.sagemaker.launch import run_job
from lm.schema import SageMaker


class Point(NamedTuple):
    """One job of a sweep. status: 2 where it was refused before any was sent."""

    number: int
    overrides: List[str]
    composed: DictConfig
    status: int


def launch(launcher: Any, job_overrides: Sequence[Sequence[str]], first_index: int) -> List[JobReturn]:
    """Runs every job, at most cluster.max_parallel_jobs at once; all of them are checked before the first is sent.

    Ends the process with the job's own status if there is one job, and with 1 if one of several did not finish.
    """
    single = len(job_overrides) == 1 and first_index == 0
    points = []
    for index, overrides in enumerate(job_overrides, first_index):
        composed = compose_job(launcher.hydra_context, launcher.config, overrides, index)
        points.append(Point(index, list(overrides), composed, job.status_of(functools.partial(_check, composed))))

    def run(point: Point) -> int:
        said = "" if single else f"job {point.number}: "
        return point.status or job.status_of(lambda: run_job(load(point.composed), said))

    at_once = min((point.composed.cluster.max_parallel_jobs for point in points if not point.status), default=1)
    statuses = [run(points[0])] if single else _several(run, points, at_once)
    if single and statuses[0]:
        sys.exit(statuses[0])
    returns, unfinished = [], []
    for point, status in zip(points, statuses):
        if status:
            shown = " ".join(filter_overrides(point.overrides)) or "(no overrides)"
            unfinished.append((point.number, shown, status))
            continue
        done = JobReturn(overrides=point.overrides, cfg=point.composed, status=JobStatus.COMPLETED)
        done.return_value = 0
        returns.append(done)
    end_of_sweep(unfinished, len(points))
    return returns


def _several(run: Callable[[Point], int], points: List[Point], at_once: int) -> List[int]:
    """The exit statuses of jobs that run side by side. Ctrl-C ends this process at once, and no job."""
    pool = ThreadPoolExecutor(at_once)
    try:
        return list(pool.map(run, points))
    except KeyboardInterrupt:
        print("\nthe jobs that were submitted go on: lm jobs lists them", flush=True)
        os._exit(130)  # threads are in the middle of following, and the interpreter would wait for them


def _check(composed: DictConfig) -> int:
    """0 for a job that can be sent. Raises ConfigError for any other."""
    config = load(composed)
    if not isinstance(config.cluster, SageMaker):
        text = f"hydra/launcher=sagemaker with cluster={config.cluster.name}, which names no machines"
        raise ConfigError([Problem(("cluster",), text, "cluster=p3x1, or another of SageMaker's")])
    refuse_unworkable(config)
    return 0
