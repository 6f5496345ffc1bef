"""A job of a sweep here, in a process of its own: python -m hydra_plugins.lm_launchers._job FILE SLOT AT_ONCE PID.

It starts the job's training processes as a plain command would, on its share of the cores; what any of them says goes
to the standard output, which is the job's log.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hydra_plugins.lm_launchers import _local

from lm import job
from lm.config import load_file


def main(file: str, slot: int, at_once: int, launcher: int) -> int:
    """Runs the job of a resolved configuration. launcher: the process that started this. Returns the exit status."""
    _local.end_with_the_launcher()
    if os.getppid() != launcher:  # it is gone already
        return job.FAILED
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[slot::at_once] or [cores[slot % len(cores)]])
    return job.status_of(lambda: _local.run_job(load_file(Path(file))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
