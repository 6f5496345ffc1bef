"""What every strategy is held to: the numbers of parallel=single, in half precision and through a kill too."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
from conftest import SMALL, dataset_overrides, on_hosts, only_run, run_here, start, train_lines, train_py, wait_until

pytestmark = pytest.mark.processes
# Microbatches of two sequences everywhere, whose dropout masks therefore agree; gradients that are clipped.
COMMON = [*SMALL, "train.eval_every_steps=7", "model.dropout=0.1", "optimizer.clip_norm=0.5"]
HALF = ["train.precision=float16", "train.steps=8", "train.eval_every_steps=8"]


@pytest.fixture(scope="module")
def single(corpus: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Dict[str, Any]:
    """parallel=single: what it was given, and its lines and summary in float32 and in float16."""
    overrides = [*COMMON, *dataset_overrides(corpus, prepared)]
    found: Dict[str, Any] = {"overrides": overrides}
    for name, more in (("float32", []), ("float16", HALF)):
        folder = tmp_path_factory.mktemp(name)
        summary = run_here([*overrides, *more, "train.microbatch_sequences=2", f"run.directory={folder}"])
        found[name] = (train_lines(folder), summary)
    return found


class Conformance:
    """The suite. A subclass says how its strategy is chosen, and which library the log is to name."""

    chosen: Tuple[str, ...]
    library: str

    @pytest.fixture
    def overrides(self, single: Dict[str, Any]) -> List[str]:
        return [*single["overrides"], *self.chosen]

    def test_losses_norms_and_evaluations_are_singles(self, single: Dict[str, Any], overrides: List[str]) -> None:
        """20 steps in float32 to 1e-5: only the order of sums differs. Accumulated, clipped, with dropout."""
        done = train_py(*overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f": {self.library}\n" in done.stdout
        expected, reference = single["float32"]
        found = train_lines(only_run())
        assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=1e-5)
        norms = [line["grad_norm"] for line in expected]
        assert min(norms) > 0.5  # so every step was clipped
        assert [line["grad_norm"] for line in found] == pytest.approx(norms, rel=1e-4)  # sums of squares
        summary = json.loads((only_run() / "summary.json").read_text())
        assert summary["val_loss"] == pytest.approx(reference["val_loss"], abs=1e-5)
        assert summary["traces"] == 1
        assert (only_run() / "sample.txt").exists()

    def test_half_precision_with_its_loss_scale(self, single: Dict[str, Any], overrides: List[str]) -> None:
        """float16 to 5e-3: products round to 2^-11, and which sums are rounded follows the division of the batch."""
        done = train_py(*overrides, *HALF)
        assert done.returncode == 0, done.stdout + done.stderr
        expected, _ = single["float16"]
        found = train_lines(only_run())
        for key in ("skipped", "loss_scale"):
            assert [line[key] for line in found] == [line[key] for line in expected]
        assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=5e-3)

    def test_a_killed_run_goes_on(self, single: Dict[str, Any], overrides: List[str]) -> None:
        process = start(*overrides)
        wait_until(lambda: any(Path("outputs/default").glob("*/checkpoints/step-*")), process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        done = train_py(*overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "resumed at step" in done.stdout
        expected, _ = single["float32"]
        found = train_lines(only_run())
        assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=1e-5)


class TestHorovod(Conformance):
    chosen = ("parallel=horovod", "cluster=local2", "train.microbatch_sequences=2")
    library = "horovod.tensorflow"


class TestSdp(Conformance):
    chosen = ("parallel=sdp", "cluster=local2", "train.microbatch_sequences=2")
    library = "lm.smdistributed_local.dataparallel"


class TestTwoStages(Conformance):
    """Blocks recomputed in the backward pass besides."""

    chosen = ("parallel=smp", "model.recompute=block")
    library = "lm.smdistributed_local.modelparallel"


class TestTwoStagesByHand(Conformance):
    chosen = ("parallel=smp", "parallel.auto_partition=false", "parallel.pipeline=simple")
    library = "lm.smdistributed_local.modelparallel"


class TestTwoReplicasOfTwoStages(Conformance):
    chosen = ("parallel=smp", "parallel.microbatches=2", "parallel.horovod=true", "cluster=local2")
    library = "lm.smdistributed_local.modelparallel"


class TestTwoHosts(Conformance):
    library = "lm.smdistributed_local.modelparallel"

    @pytest.fixture
    def overrides(self, single: Dict[str, Any], two_hosts: List[int]) -> List[str]:
        return [*single["overrides"], *on_hosts(two_hosts)]
