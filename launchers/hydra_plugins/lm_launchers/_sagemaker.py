"""Submits each job of a run or a sweep to SageMaker and follows it; of a sweep, several at once."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, List, Sequence, Tuple

from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra_plugins.lm_launchers._local import compose_job, end_of_sweep
from omegaconf import DictConfig

from lm import job
from lm.catalog.checks import refuse_unworkable
from lm.config import load
from lm.sagemaker.launch import run_job
from lm.schema import Config


def launch(launcher: Any, job_overrides: Sequence[Sequence[str]], first_index: int) -> List[JobReturn]:
    """Runs every job, at most cluster.max_parallel_jobs at once; all of them are checked before the first is sent.

    Ends the process with the job's own status if there is one job, and with 1 if one of several did not finish.
    """
    single = len(job_overrides) == 1 and first_index == 0
    jobs = [
        (index, list(overrides), compose_job(launcher.hydra_context, launcher.config, overrides, index))
        for index, overrides in enumerate(job_overrides, first_index)
    ]

    def run(which: Tuple[int, List[str], DictConfig]) -> int:
        index, _, composed = which
        return job.status_of(lambda: run_job(_checked(composed), "" if single else f"job {index}: "))

    at_once = 1 if single else int(launcher.config.cluster.max_parallel_jobs)
    with ThreadPoolExecutor(at_once) as pool:
        statuses = list(pool.map(run, jobs)) if not single else [run(jobs[0])]
    if single and statuses[0]:
        sys.exit(statuses[0])
    returns, unfinished = [], []
    for (index, overrides, composed), status in zip(jobs, statuses):
        if status:
            unfinished.append((index, " ".join(filter_overrides(overrides)) or "(no overrides)", status))
            continue
        done = JobReturn(overrides=overrides, cfg=composed, status=JobStatus.COMPLETED)
        done.return_value = 0
        returns.append(done)
    end_of_sweep(unfinished, len(jobs))
    return returns


def _checked(composed: DictConfig) -> Config:
    config = load(composed)
    refuse_unworkable(config)
    return config
