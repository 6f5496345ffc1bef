"""A sweep as people see it: a table of its jobs, and the comparison of its runs as a page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import List, Optional

from rich.table import Table

from lm.compare import HIGHER_IS_BETTER, ordered, read_runs
from lm.comparison import comparison_page
from lm.run import write_whole
from lm.sweep.ledger import LEDGER, STATES, Job, Ledger

PAGE = "compare.html"


def sweep_table(ledger: Ledger) -> Table:
    """A row a job, in the order of their numbers; the best value of the objective has a star."""
    jobs, best = ledger.all(), best_job(ledger)
    grid = Table(title=f"{ledger.folder}: {in_words(ledger)}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("job", "status", ledger.objective, "tries", "time"):
        grid.add_column(name, no_wrap=True)
    grid.add_column("overrides", overflow="fold")
    if any(job.reason for job in jobs):
        grid.add_column("reason", overflow="fold")
    for job in jobs:
        status = f"failed: {job.kind}" if job.status == "failed" else job.status
        value = "" if job.value is None else f"{job.value:.5g}{' *' if job is best else ''}"
        row = [str(job.number), status, value, str(job.tries), _spent(job), job.shown, job.reason]
        grid.add_row(*row[: len(grid.columns)])
    return grid


def in_words(ledger: Ledger) -> str:
    """How many jobs are in which state."""
    return ", ".join(f"{ledger.count(state)} {state}" for state in STATES if ledger.count(state)) or "no job yet"


def best_job(ledger: Ledger) -> Optional[Job]:
    """The finished job with the best value of the objective."""
    ended = [(job.value, job) for job in ledger.all() if job.status == "done" and job.value is not None]
    if not ended:
        return None
    pick = max if ledger.objective in HIGHER_IS_BETTER else min
    return pick(ended, key=lambda pair: pair[0])[1]


def run_folders(folder: Path) -> List[Path]:
    """The run folders of a sweep's jobs that there are; of any other folder, itself."""
    if not (folder / LEDGER).exists():
        return [folder]
    ledger = Ledger(folder)
    known = [Path(job.folder) for job in ledger.all() if job.folder]
    there = [path if path.exists() else Path(ledger.typed_in) / path for path in known]  # as it was typed, if it can be
    return [path for path in there if (path / "config.yaml").exists()]


def write_page(ledger: Ledger) -> Optional[Path]:
    """The comparison of the runs as a page in the sweep's folder; None where there is no run yet."""
    runs = read_runs(run_folders(ledger.folder))
    if not runs:
        return None
    path = ledger.folder / PAGE
    write_whole(path, comparison_page(f"{len(runs)} runs of {ledger.folder}", ordered(runs, ledger.objective)))
    return path


def _spent(job: Job) -> str:
    if job.began is None:
        return ""
    seconds = (job.ended or time.time()) - job.began
    return f"{int(seconds) // 3600:d}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
