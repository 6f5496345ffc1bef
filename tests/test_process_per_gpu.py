"""parallel=smp where each GPU has a process, as on SageMaker: a stand-in for the library watches the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest
from conftest import ROOT, run_here, train_lines

from lm.compose import compose
from lm.data.prepare import prepare
from lm.report import make_console
from lm.run import run_folder

pytestmark = pytest.mark.processes
STAND_IN = ROOT / "tests/process_per_gpu"


def four_processes(overrides: List[str], placement: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two replicas of two partitions. The launcher gives the job its parameters, as SageMaker's does."""
    parameters = {"partitions": 2, "microbatches": 2, "horovod": True, "placement_strategy": placement}
    config = compose([*overrides, "parallel=smp", "parallel.microbatches=2", "parallel.horovod=true", "cluster=local2"])
    prepare(config.dataset, config.prepare, make_console())
    run = run_folder(config)
    run.path.mkdir(parents=True)
    run.write_config(config)
    worker = [sys.executable, "-u", "-m", "lm.worker", str(run.config)]
    return subprocess.run(
        [sys.executable, "-m", "hydra_plugins.lm_launchers._gloo", "4", *worker],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(STAND_IN), str(ROOT), str(ROOT / "launchers")]),
            "SM_HP_MP_PARAMETERS": json.dumps(parameters),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("placement", ["cluster", "spread"])
def test_the_ranks_of_a_replica_read_the_same_and_rank_0s_weights_are_everyones(
    small: List[str], placement: str
) -> None:
    overrides = [*small, "train.steps=8", "run.directory=outputs/four"]
    done = four_processes(overrides, placement)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parallel=smp: smdistributed.modelparallel.tensorflow" in done.stdout
    for rank in range(4):
        assert done.stdout.count(f"rank {rank}: broadcast of ") == 2  # weights, then the optimizer's state
    run_here([*overrides[:-1], "run.directory=outputs/one"])
    found, expected = ([line["loss"] for line in train_lines(Path("outputs", name))] for name in ("four", "one"))
    assert found == pytest.approx(expected, abs=1e-5)
    assert json.loads(Path("outputs/four/summary.json").read_text())["world"] == 4
    assert len(list(Path("outputs/four/checkpoints").glob("step-*"))) == 2


def test_data_divided_by_rank_are_noticed(small: List[str]) -> None:
    """So the test above could fail: the stand-in sees it where a rank is used for a replica's number."""
    done = four_processes([*small, "train.steps=8"], "cluster", PROCESS_PER_GPU_WRONG_RANK="1")
    assert done.returncode != 0
    assert "the ranks of one replica read different data" in done.stdout + done.stderr
