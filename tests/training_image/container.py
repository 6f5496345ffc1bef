"""The shipped bundle under the real toolkit in the training image's environment: finished, killed, resumed, refused.

IMAGE_PYTHON=... uv run pytest tests/training_image/container.py, which `tests/training_image/run` does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import *  # noqa: F403 - its fixtures are wanted by name
from conftest import SMALL, _workspace, run_here, train_lines  # noqa: F401 - a fixture that every test has

from lm.compose import compose
from lm.plan import make_plan
from lm.sagemaker.bundle import make_bundle
from lm.sagemaker.follow import MPI_PREFIX
from lm.sagemaker.metrics import read_line
from lm.sagemaker.request import ENTRYPOINT, distribution

HERE = Path(__file__).resolve().parent
IMAGE_PYTHON = os.environ["IMAGE_PYTHON"]
ONE = ["cluster=sagemaker", "cluster.instance_type=ml.m5.xlarge", "tracking.uri=null"]
TWO = [*ONE, "cluster.instance_count=2", "parallel=horovod"]
LONG = ["train.steps=600", "checkpoint.every_steps=600", "train.eval_every_steps=600"]


class Job:
    """An /opt/ml-like tree and the toolkit upon it."""

    def __init__(self, base: Path, overrides: list[str], data: Path, processes: int = 1) -> None:
        self.base = base
        config = compose([*overrides, f"dataset.output={data}"])
        make_bundle(config, base / "bundle")
        for folder in ("input/config", "input/data", "model", "output/data", "checkpoints"):
            (base / folder).mkdir(parents=True)
        (base / "input/data/data").symlink_to(data)
        host = socket.gethostname()
        parameters: dict[str, Any] = {
            "config": "config.yaml",
            "run": "default/x",
            "sagemaker_program": "entry.py",
            "sagemaker_submit_directory": str(base / "bundle"),
            "sagemaker_region": "us-east-1",
            "sagemaker_job_name": "lm-test",
            "sagemaker_container_log_level": 20,
        }
        if processes > 1:
            parameters.update(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=processes)
            parameters["sagemaker_mpi_custom_mpi_options"] = "--oversubscribe"
        if config.parallel.name == "smp":
            parameters["mp_parameters"] = distribution(config, None)["smdistributed"]["modelparallel"]["parameters"]
        self._configure("hyperparameters", {key: json.dumps(value) for key, value in parameters.items()})
        self._configure("inputdataconfig", {"data": {"TrainingInputMode": "File"}})
        self._configure(
            "resourceconfig", {"current_host": host, "hosts": [host], "network_interface_name": "lo"}
        )
        train = base / "bin/train"
        train.parent.mkdir()
        train.write_text(f"#!/bin/sh\nexec {IMAGE_PYTHON} {HERE / 'toolkit.py'}\n")
        train.chmod(0o755)

    def _configure(self, name: str, content: dict[str, Any]) -> None:
        (self.base / f"input/config/{name}.json").write_text(json.dumps(content))

    def start(self) -> subprocess.Popen[str]:
        """What SageMaker starts as the container's first process."""
        shutil.rmtree(self.base / "code", ignore_errors=True)  # a new container has none of the last one's
        for left in ("stop", "output/success", "output/failure"):
            (self.base / left).unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment.update(SAGEMAKER_BASE_DIR=str(self.base), PATH=f"{self.base}/bin:{os.environ['PATH']}")
        return subprocess.Popen(
            ENTRYPOINT, cwd=self.base, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self) -> tuple[int, str]:
        process = self.start()
        shown = process.communicate(timeout=240)[0]
        return process.returncode, shown

    def stop_at(self, step: int) -> tuple[int, str]:
        """Starts it and, once it has logged a step, asks it to stop as SageMaker does."""
        process = self.start()
        metrics = self.base / "checkpoints/metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        shown = process.communicate(timeout=120)[0]
        return process.returncode, shown

    def losses(self) -> list[float]:
        return [line["loss"] for line in train_lines(self.base / "checkpoints")]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.base / "checkpoints/summary.json").read_text())


@pytest.fixture
def overrides(corpus: Path) -> list[str]:
    text = ["dataset=text", f"dataset.source={corpus}", "dataset.validation_fraction=0.1"]
    return [*SMALL, *text, "dataset.vocabulary_size=300"]


def here(overrides: list[str], data: Path, experiment: str) -> list[float]:
    """The losses of the same run on the workstation."""
    run_here([*overrides, f"dataset.output={data}", f"run.experiment={experiment}", "tracking.uri=null"])
    (run,) = Path("outputs", experiment).iterdir()
    return [line["loss"] for line in train_lines(run)]


CLOSE = 1e-4  # two versions of TensorFlow round differently, over these steps by less, as agree.py beside this has it


def test_one_process_trains_and_leaves_everything(tmp_path: Path, overrides: list[str], prepared: Path) -> None:
    """P01 besides: with Debugger's hook configured, and again in the same tree without, nothing stumbles over it."""
    job = Job(tmp_path / "ml", [*overrides, *ONE, "profiling=system", "cluster.region=us-east-1"], prepared)
    hook = {"LocalPath": str(job.base / "tensors"), "HookParameters": {}, "CollectionConfigurations": []}
    (job.base / "input/config/debughookconfig.json").write_text(json.dumps(hook))
    status, shown = job.run()
    assert status == 0, shown
    assert (job.base / "output/success").exists()
    assert not (job.base / "output/failure").exists()
    assert {path.name for path in (job.base / "model").iterdir()} == {
        "config.yaml",
        "summary.json",
        "tokenizer.json",
        "weights.safetensors",
    }
    assert (job.base / "output/data/metrics.jsonl").exists()
    assert list((job.base / "checkpoints/profiler-output/system/incremental").rglob("*.algo-1.json"))
    assert job.summary()["energy_kwh"] > 0
    assert job.summary()["co2e_kg"] > 0
    assert job.summary()["tokens_per_usd"] > 0
    assert (job.base / "checkpoints/checkpoints/step-00000020/checkpoint.json").exists()
    assert job.losses() == pytest.approx(here(overrides, prepared, "single"), abs=CLOSE)
    (job.base / "input/config/debughookconfig.json").unlink()
    before = job.losses()
    status, shown = job.run()  # it is done, so it leaves the model again and ends
    assert status == 0, shown
    assert job.losses() == before


def test_two_ranks_over_mpi_are_one_run(tmp_path: Path, overrides: list[str], prepared: Path) -> None:
    job = Job(tmp_path / "ml", [*overrides, *TWO], prepared, processes=2)
    status, shown = job.run()
    assert status == 0, shown
    assert "mpirun" in shown
    prefixed = [match for match in map(MPI_PREFIX.match, shown.splitlines()) if match]
    assert {match["rank"] for match in prefixed} == {"0"}  # the other one has nothing to say
    plan = make_plan(compose([*overrides, *TWO]))
    read = [read_line(match.string[match.end() :], plan, 0.0) for match in prefixed]
    assert [line["step"] for line in read if line and "loss" in line] == list(range(1, 21))
    assert job.summary()["world"] == 2
    assert job.losses() == pytest.approx(here(overrides, prepared, "two"), abs=CLOSE)


@pytest.mark.parametrize(("cluster", "processes"), [(ONE, 1), (TWO, 2)], ids=["single", "mpi"])
def test_a_stop_saves_and_the_next_start_goes_on(
    tmp_path: Path, overrides: list[str], prepared: Path, cluster: list[str], processes: int
) -> None:
    """S3's half-uploaded files are in the folder too; the losses are those of a run that nobody stopped."""
    job = Job(tmp_path / "ml", [*overrides, *LONG, *cluster], prepared, processes)
    status, shown = job.stop_at(20)
    assert status == 0, shown
    summary = job.summary()
    assert summary["status"] == "stopped"
    assert 20 <= summary["checkpoint_step"] < 600
    newest = job.base / f"checkpoints/checkpoints/step-{summary['checkpoint_step']:08d}"
    (newest / "weights.safetensors.sagemaker-uploading").touch()
    half = newest.with_name("step-00000599")  # SageMaker had uploaded no more of it
    half.mkdir()
    shutil.copy(newest / "weights.safetensors", half)
    (newest.parent / "step-00000598.sagemaker-uploading").touch()
    status, shown = job.run()
    assert status == 0, shown
    assert f"resumed at step {summary['checkpoint_step']}" in shown
    assert job.summary()["status"] == "finished"
    assert job.losses()[:60] == pytest.approx(here([*overrides, *LONG], prepared, "whole")[:60], abs=CLOSE)


def test_model_parallel_parameters_on_the_command_line_do_no_harm(
    tmp_path: Path, overrides: list[str], prepared: Path
) -> None:
    four = ["model.layers=4", "parallel=smp", "parallel.partitions=4", "parallel.microbatches=2"]
    cluster = ["cluster=sagemaker", "cluster.instance_type=ml.g4dn.12xlarge", "train.precision=float32"]
    # without MPI: one process has them all
    job = Job(tmp_path / "ml", [*overrides, *four, *cluster, "tracking.uri=null"], prepared)
    status, shown = job.run()
    assert status == 0, shown
    assert "--mp_parameters" in shown
    assert job.losses() == pytest.approx(here([*overrides, "model.layers=4"], prepared, "smp"), abs=CLOSE)


def test_a_failure_is_told_as_sagemaker_shows_it(tmp_path: Path, overrides: list[str], prepared: Path) -> None:
    job = Job(tmp_path / "ml", [*overrides, *ONE, "optimizer.learning_rate=1e30", "optimizer.clip_norm=null"], prepared)
    status, shown = job.run()
    assert status == 1
    assert (job.base / "output/failure").read_text().startswith("step ")
    assert "not finite for 3 steps" in (job.base / "output/failure").read_text()
    assert "\nfailed: step" in shown
    (job.base / "input/data/data").unlink()
    status, shown = job.run()
    assert status == 1
    assert "manifest.json" in (job.base / "output/failure").read_text()
