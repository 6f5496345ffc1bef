"""Real processes: one and two under Horovod, killed, stopped, resumed, swept; and what they leave behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import psutil
import pytest
from conftest import ROOT, on_hosts, only_run, run_here, start, train_lines, train_py, wait_until
from safetensors.numpy import load_file

pytestmark = pytest.mark.processes
TWO = ["parallel=horovod", "cluster=local2"]


def curve(experiment: str) -> List[float]:
    return [line["loss"] for line in train_lines(only_run(experiment))]


def weights(experiment: str, step: int) -> Dict[str, Any]:
    folder = only_run(experiment) / f"checkpoints/step-{step:08d}"
    return {**load_file(str(folder / "weights.safetensors")), **load_file(str(folder / "optimizer.safetensors"))}


def wait_for_step(experiment: str, step: int, process: subprocess.Popen[str]) -> None:
    """Returns once metrics.jsonl has a step; fails where the process ends before."""

    def logged() -> bool:
        runs = list(Path("outputs", experiment).glob("*/metrics.jsonl"))
        return bool(runs) and f'"step": {step},' in runs[0].read_text()

    wait_until(logged, process)


def workers() -> List[psutil.Process]:
    """Training processes of this test, by their folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if "lm.worker" in process.cmdline() and process.cwd() == os.getcwd():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def python_workers() -> List[psutil.Process]:
    return [process for process in workers() if process.cmdline()[1:4] == ["-u", "-m", "lm.worker"]]


def nobody_is_left() -> bool:
    deadline = time.monotonic() + 10
    while workers() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not workers()


# --- several processes are one run --------------------------------------------------------------------


@pytest.mark.tracked
def test_two_processes_make_one_run(small: List[str]) -> None:
    """One folder, one set of checkpoints, one MLflow run; tests/test_conformance.py has the losses."""
    two = train_py(*small, *TWO, "run.experiment=two")
    assert two.returncode == 0, two.stdout + two.stderr
    assert json.loads((only_run("two") / "summary.json").read_text())["world"] == 2
    assert "[0] step 20/20" in two.stdout
    assert "[1] step" not in two.stdout
    assert "subset of ranks" not in two.stdout + two.stderr  # no stall warning
    mlflow_runs = list(Path("outputs/mlflow-artifacts/two").iterdir())
    assert len(mlflow_runs) == 1
    assert nobody_is_left()


def test_a_checkpoint_goes_round_all_strategies(small: List[str], two_hosts: List[int]) -> None:
    """Five steps under each, one run folder, and the losses of as many under single."""
    rounds = [
        ["parallel=single"],
        ["parallel=smp", "parallel.partitions=2"],
        ["parallel=sdp", "cluster=local2"],
        on_hosts(two_hosts),
        ["parallel=horovod", "cluster=local2"],
        ["parallel=smp", "parallel.microbatches=2", "parallel.horovod=true", "cluster=local2"],
    ]
    common = [*small, "schedule=constant", "schedule.warmup_steps=3"]
    for number, overrides in enumerate(rounds, 1):
        steps = [f"train.steps={5 * number}", "run.directory=outputs/round/run"]
        done = train_py(*common, *overrides, *steps)
        assert done.returncode == 0, done.stdout + done.stderr
        assert number == 1 or f"resumed at step {5 * number - 5}" in done.stdout
    run_here([*common, "train.steps=30", "run.experiment=one"])
    losses = [line["loss"] for line in train_lines(Path("outputs/round/run"))]
    assert losses == pytest.approx(curve("one"), abs=1e-5)


def test_uneven_data_gives_every_rank_the_same_steps(small: List[str], tmp_path: Path) -> None:
    """H01: five sequences, two ranks, a batch of one each, twice round the data."""
    source = tmp_path / "five.txt"
    source.write_text("".join(f"line {i} of a very small text\n" for i in range(100)))
    data = [f"dataset.source={source}", f"dataset.output={tmp_path / 'five'}", "dataset.vocabulary_size=257"]
    prepared = train_py(*small, *data, "model.context=100000", *TWO)
    tokens = int(prepared.stderr.split("than the dataset text: ")[1].split()[0])
    overrides = [f"model.context={(tokens - 1) // 5}", "train.global_batch_sequences=2", "train.steps=5"]
    done = train_py(*small, *data, *overrides, "schedule.warmup_steps=0", *TWO, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in train_lines(only_run())] == [1, 2, 3, 4, 5]
    assert "subset of ranks" not in done.stdout + done.stderr


def test_a_terminal_gets_a_bar_instead_of_lines(small: List[str]) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, str(ROOT / "train.py"), *small]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side has closed
            break
        shown += part
    assert process.wait(timeout=150) == 0
    assert "━" in shown.decode()
    assert "step 10/20" not in shown.decode()
    assert "finished at step 20 of 20" in shown.decode()
    assert "step 10/20" in (only_run() / "log.txt").read_text()


# --- sweeps ------------------------------------------------------------------------------------------


@pytest.mark.tracked
def test_a_sweep_of_two_processes_makes_two_runs_and_leaves_nobody(small: List[str]) -> None:
    """L01: two folders with one configuration each, one MLflow run a job, ports free for the second job."""
    rates = "optimizer.learning_rate=1e-3,1e-4"
    done = train_py("-m", rates, *small, *TWO, "train.steps=5", "schedule.warmup_steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted(Path("outputs/default").glob("tiny-*"))
    assert len(runs) == 2
    found = set()
    for run in runs:
        text = (run / "config.yaml").read_text()
        found.add(text.split("learning_rate: ")[1].split()[0])
        assert json.loads((run / "summary.json").read_text())["status"] == "finished"
        assert (run / "checkpoints/step-00000005").is_dir()
    assert found == {"0.001", "0.0001"}
    assert len(list(Path("outputs/mlflow-artifacts/default").iterdir())) == 3  # and the sweep's own
    assert nobody_is_left()


def test_a_bad_point_of_a_sweep_is_told_and_the_others_run(small: List[str]) -> None:
    done = train_py("-m", *small, "train.steps=2", "schedule.warmup_steps=0", "model.heads=2,3")
    assert done.returncode == 1
    assert "model.heads=3 does not divide model.width=32" in done.stderr
    assert "1 of 2 jobs did not finish" in done.stderr
    assert "job 1 failed (configuration)" in done.stderr
    (run,) = Path("outputs/default").glob("tiny-*")
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


def test_values_with_an_equals_sign_reach_every_worker(small: List[str], corpus: Path, tmp_path: Path) -> None:
    """C01: quoted, the value arrives as it is, in both workers and in the run's own configuration."""
    folder = tmp_path / "year=2020" / "month=1"
    folder.mkdir(parents=True)
    (folder / "corpus.jsonl").write_bytes(corpus.read_bytes())
    overrides = [f'dataset.source="{folder / "corpus.jsonl"}"', f'dataset.output="{folder / "set=1"}"']
    done = train_py(*small, *overrides, *TWO, "train.steps=2", "schedule.warmup_steps=0")
    assert done.returncode == 0, done.stdout + done.stderr
    text = (only_run() / "config.yaml").read_text()
    assert f"source: {folder}/corpus.jsonl" in text
    assert not any("=" in str(path) for path in Path("outputs").rglob("*"))


# --- kill, stop, resume ------------------------------------------------------------------------------

LONG = ["train.steps=40", "train.eval_every_steps=40", "checkpoint.every_steps=3", "model.dropout=0.1"]


@pytest.fixture
def straight(small: List[str]) -> List[str]:
    """A run that nothing interrupts, to compare with; returns the overrides of both."""
    overrides = [*small, *LONG, "train.microbatch_sequences=4"]
    run_here([*overrides, "run.experiment=straight"])
    return overrides


def test_a_killed_run_goes_on_to_the_bit(straight: List[str]) -> None:
    """Killed three times at random with kill -9, also inside a save: weights, losses, rates and data are the same.

    Bitwise, for the same binaries on the same CPU with the same number of threads (K01, K03).
    """
    generator = random.Random(int(time.time()))
    killed_at = 0
    for _ in range(3):
        process = start(*straight, "run.experiment=killed")
        killed_at = min(killed_at + generator.randint(3, 10), 36)
        wait_for_step("killed", killed_at, process)
        time.sleep(generator.random() * 0.05)
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
    done = train_py(*straight, "run.experiment=killed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step" in done.stdout, output
    lines = [train_lines(only_run(name)) for name in ("straight", "killed")]
    for one, other in zip(*lines):
        for key in ("step", "tokens", "loss", "learning_rate", "grad_norm"):
            assert one[key] == other[key], (one, other)
    assert [line["step"] for line in lines[1]] == list(range(1, 41))
    one, other = weights("straight", 40), weights("killed", 40)
    assert set(one) == set(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    whole, broken = (json.loads((only_run(name) / "summary.json").read_text()) for name in ("straight", "killed"))
    split = broken["goodput_seconds"]
    assert "restarts" not in whole["goodput_seconds"]
    assert split["restarts"] > 0  # the steps after the last save before each kill, and what came before the first
    assert sum(seconds for kind, seconds in split.items() if kind != "total") == pytest.approx(split["total"])
    assert 0 < broken["goodput"] < 1


@pytest.mark.parametrize(("first", "then"), [(TWO, []), ([], TWO)], ids=["2 to 1", "1 to 2"])
def test_the_number_of_processes_may_change(small: List[str], first: List[str], then: List[str]) -> None:
    """K05: the same data in the same batches; losses to 1e-5, the order of the sums being another."""
    overrides = [*small, "train.eval_every_steps=20"]
    run_here([*overrides, "run.experiment=straight"])
    process = start(*overrides, "run.experiment=changed", *first)
    wait_for_step("changed", 8, process)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=150)
    assert process.returncode == 128 + signal.SIGTERM
    done = train_py(*overrides, "run.experiment=changed", *then)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step" in done.stdout
    assert curve("changed") == pytest.approx(curve("straight"), abs=1e-5)
    assert [line["tokens"] for line in train_lines(only_run("changed"))] == [256 * step for step in range(1, 21)]


@pytest.mark.tracked
@pytest.mark.parametrize("where", [[], TWO], ids=["single", "two"])
def test_sigterm_saves_and_has_its_own_status(small: List[str], where: List[str]) -> None:
    overrides = [*small, *where, "train.steps=100000", "checkpoint.every_steps=100000", "train.eval_every_steps=100000"]
    process = start(*overrides)
    wait_for_step("default", 5, process)
    os.kill(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    summary = json.loads((only_run() / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["checkpoint_step"] == summary["step"] >= 5
    assert (only_run() / f"checkpoints/step-{summary['step']:08d}/checkpoint.json").exists()
    assert mlflow_status() == "KILLED"
    assert nobody_is_left()


def mlflow_status() -> str:
    import sqlite3

    with sqlite3.connect("outputs/mlflow.db") as database:
        (status,) = database.execute("select status from runs").fetchone()
    return status


def test_nobody_survives_a_kill_of_the_launcher(small: List[str]) -> None:
    """And the run is free for the same command: no orphan writes to its folder."""
    process = start(*small, *TWO, "train.steps=100000")
    wait_for_step("default", 5, process)
    process.kill()
    process.communicate(timeout=150)
    assert nobody_is_left()
    again = start(*small, *TWO, "train.steps=100000")
    wait_for_step("default", 12, again)
    os.killpg(again.pid, signal.SIGTERM)
    output = again.communicate(timeout=150)[0]
    assert again.returncode == 128 + signal.SIGTERM, output
    assert "resumed at step" in output


def test_a_signal_before_the_workers_have_begun_ends_the_job_at_once(small: List[str]) -> None:
    process = start(*small, *TWO)
    while process.poll() is None and not workers():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=150)
    assert process.returncode == 128 + signal.SIGINT
    assert nobody_is_left()


def test_a_worker_that_dies_takes_the_others_along(small: List[str]) -> None:
    process = start(*small, *TWO, "train.steps=100000")
    wait_for_step("default", 5, process)
    victim = next(p for p in python_workers() if p.environ().get("HOROVOD_RANK") == "1")
    victim.kill()
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 1, output
    assert "Process 1 exit with status code" in output.split("first cause:")[1]
    assert nobody_is_left()


def test_the_first_real_traceback_is_shown_and_not_its_consequences(small: List[str]) -> None:
    """Rank 1 alone meets a shard that has vanished; rank 0 only sees that rank 1 is gone."""
    process = start(*small, *TWO, "train.steps=100000", *BREAK)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    cause = output.split("first cause:")[1]
    assert "planted in rank 1" in cause
    assert "HorovodInternalError" not in cause
    assert nobody_is_left()


BREAK = ["run.name=rank1-breaks"]


@pytest.fixture(autouse=True)
def _planted_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A sitecustomize.py that makes rank 1 of one test raise in the middle of its steps."""
    if "first_real_traceback" in request.node.name:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(
            "import os, sys, threading, time\n"
            "if os.environ.get('HOROVOD_RANK') == '1' and 'lm.worker' in ' '.join(sys.orig_argv):\n"
            "    import lm.checkpoint\n"
            "    def count(self, line, sequences):\n"
            "        raise ZeroDivisionError('planted in rank 1')\n"
            "    lm.checkpoint.Progress.count = count\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
