"""cluster=slurm by submitit's local executor: the job that Slurm would start, started here."""

from __future__ import annotations

import json

import pytest
from conftest import only_run, run_here, train_lines, train_py

pytestmark = pytest.mark.processes


def test_a_slurm_job_of_two_processes_trains_and_a_failing_one_is_told(small: list[str]) -> None:
    slurm = ["cluster=slurm", "hydra/launcher=submitit_local", "parallel=horovod", "cluster.processes=2"]
    done = train_py(*small, *slurm, "run.experiment=slurm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((only_run("slurm") / "summary.json").read_text())["world"] == 2
    run_here([*small, "run.experiment=here"])
    there, here = ([line["loss"] for line in train_lines(only_run(name))] for name in ("slurm", "here"))
    assert there == pytest.approx(here, abs=1e-5)  # as between one process and two anywhere
    broken = ["optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "run.experiment=broken"]
    failed = train_py(*small, *slurm[:2], *broken)
    assert failed.returncode == 1
    assert "failed: step" in failed.stderr
