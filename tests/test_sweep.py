"""Sweeps of real processes: killed, resumed, refused, retried, halted; the ledger, the table, MLflow."""

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

import psutil
import pytest
from conftest import start, train_lines, train_py, wait_until

from lm.cli import main
from lm.failure import failure_of
from lm.points import ALONE, some_points, sweep_folder, swept_keys
from lm.run import RunFailed
from lm.sweep.ledger import Job, Ledger

pytestmark = pytest.mark.tracked
RATES = "optimizer.learning_rate"


def sweep_of(experiment: str = "default") -> Path:
    (ledger,) = Path("outputs", experiment).glob("sweep-*/ledger.json")
    return ledger.parent


def jobs_of(experiment: str = "default") -> List[Job]:
    return Ledger(sweep_of(experiment)).all()


def running_workers(run: str = "") -> List[psutil.Process]:
    """This test's training processes, of a run whose folder has a text in its name."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if "lm.worker" in words and run in words[-1] and process.cwd() == os.getcwd():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes: a run named boom raises at its second step, one named exit ends by os._exit(3)."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "words = ' '.join(getattr(sys, 'orig_argv', []))\n"
        "if 'lm.worker' in words and ('/boom' in words or '/exit' in words):\n"
        "    import lm.checkpoint\n"
        "    count = lm.checkpoint.Progress.count\n"
        "    def fail(self, line, sequences):\n"
        "        count(self, line, sequences)\n"
        "        if self.step == 2 and '/exit' in words:\n"
        "            os._exit(3)\n"
        "        if self.step == 2:\n"
        "            raise ZeroDivisionError('planted')\n"
        "    lm.checkpoint.Progress.count = fail\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


def mlflow_runs(experiment: str = "default") -> Any:
    """The parent run, and the children by their job's number."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{Path('outputs/mlflow.db').resolve()}")
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    (parent,) = [run for run in runs if "lm.sweep_folder" in run.data.tags]
    children = {
        int(run.data.tags["lm.sweep.job"]): run
        for run in runs
        if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    }
    assert len(children) == len(runs) - 1
    return parent, children


# --- the ledger ----------------------------------------------------------------------------------------


def test_a_ledger_remembers_what_it_was_told_and_has_one_process(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "sweep")
    assert ledger.begin(["-m", "a=1,2"], "val_loss") == 0
    first, second = ledger.add("one", ["a=1"], "runs/one"), ledger.add("two", ["a=2"], "runs/two")
    assert ledger.add("one", ["a=1"], "runs/one") is first
    ledger.start(first)
    ledger.end(first, "failed", failure_of("Traceback (most recent call last)\n  File\nKeyError: 'x'\n", ""))
    ledger.start(second)
    again = Ledger(tmp_path / "sweep")
    assert [(job.key, job.status, job.kind, job.reason) for job in again.all()] == [
        ("one", "failed", "code", "KeyError: 'x'"),
        ("two", "running", None, ""),
    ]
    assert again.is_at_work()
    with pytest.raises(RunFailed, match="another process works on this sweep"):
        again.begin([], "val_loss")
    del ledger
    assert again.begin(["-m", "a=1,2"], "val_loss") == 1  # what ran was interrupted
    assert again.all()[1].status == "pending"


@pytest.mark.parametrize(
    ("output", "ended", "kind", "word"),
    [
        ("refused: 1 problem\n  1. a=1 must be 2\n     -> a=2\n", "", "configuration", "a=1 must be 2"),
        ("failed: step 3: loss nan: not finite for 3 steps in a row", "", "non_finite_loss", "step 3: loss nan"),
        ("failed: shard 3 of data: DatasetError\n", "", "data", "shard 3"),
        ("failed: the training process was ended by signal 9\n", "", "lost_worker", "ended by signal 9"),
        ("failed: it was ended by signal 9, as the kernel did for want of memory", "", "out_of_memory", ""),
        ("Traceback (most recent call last)\n  a\nMemoryError: no\n", "", "out_of_memory", "MemoryError: no"),
        ("[1] Traceback (most recent call last)\n[1]   a\n[1] ValueError: b\n", "", "code", "ValueError: b"),
        ("[0] step 3\nProcess 1 exit with status code 137.\n", "", "lost_worker", "Process 1"),
        ("Traceback (most recent call last)\n x\nKeyError: 1\nstep\n", "", "code", "KeyError: 1"),
        ("step 1/20\n", "exit status 3", "code", "exit status 3"),
        ("step 1/20\n", "the job's process was ended by signal 9", "lost_worker", "ended by signal 9"),
    ],
)  # fmt: skip
def test_failures_have_a_class_and_one_line(output: str, ended: str, kind: str, word: str) -> None:
    failure = failure_of(output, ended)
    assert failure.key == kind
    assert word in failure.word
    assert "\n" not in failure.word


def test_the_same_command_names_the_same_folder_whatever_it_says_of_retries() -> None:
    words = [f"{RATES}=1e-3,3e-3", "model.width=64"]
    folder = sweep_folder("e", words, {})
    assert folder.startswith("outputs/e/sweep-")
    assert folder == sweep_folder("e", [*reversed(words), "sweep.retry.code=2", "sweep.jobs_at_once=2"], {})
    assert folder != sweep_folder("e", [words[0], "model.width=128"], {})
    assert sweep_folder("e", ["model.width=64"], {}) == ALONE
    assert sweep_folder("e", ["model.width=64"], {RATES: "interval(1,2)"}) != ALONE
    words = [f"{RATES}=interval(1e-4,1e-2)", "a=1", "b=range(1,3)"]
    assert swept_keys(words, {"c": "choice(1,2)"}) == {RATES, "b", "c"}
    points = some_points(["model=tiny,10m", f"{RATES}=interval(1e-4,1e-2)"], {"model": {"tiny", "10m"}})
    assert points == [["model=tiny", f"{RATES}=0.0001"], ["model=10m", f"{RATES}=0.0001"]]


# --- processes -----------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_sweep_that_is_killed_twice_ends_with_each_job_done_once(
    small: List[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 7's own: kill -9 at random places; four children, one table, one page, no step twice."""
    words = ["-m", *small, f"{RATES}=1e-3,3e-3", "model.width=32,64", "train.steps=40", "sweep.jobs_at_once=2"]
    generator = random.Random(int(time.time()))
    for _ in range(2):
        process = start(*words)
        wait_until(lambda: bool(running_workers()), process)
        time.sleep(generator.random() * 12)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        deadline = time.monotonic() + 20
        while running_workers():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    done = train_py(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("4 done") == 1
    assert [job.status for job in jobs_of()] == ["done"] * 4
    rates = set()
    for job in jobs_of():
        run = Path(job.folder or "")
        assert [line["step"] for line in train_lines(run)] == list(range(1, 41))
        assert job.value == json.loads((run / "summary.json").read_text())["val_loss"]
        rates.add((run / "config.yaml").read_text().split("learning_rate: ")[1].split()[0])
    assert rates == {"0.001", "0.003"}  # C02: numbers
    assert (sweep_of() / "compare.html").exists()
    parent, children = mlflow_runs()
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["jobs/done"] == 4
    assert {number: child.info.status for number, child in children.items()} == dict.fromkeys(range(4), "FINISHED")
    tries = [job.tries for job in jobs_of()]
    again = train_py(*words)
    assert again.returncode == 0
    assert again.stdout.count("is done already") == 4
    assert [job.tries for job in jobs_of()] == tries
    assert main(["sweep", "status", str(sweep_of())]) == 0
    assert "4 done" in capsys.readouterr().out
    assert main(["compare", str(sweep_of()), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4


@pytest.mark.processes
def test_each_failure_is_told_and_the_others_run(small: List[str]) -> None:
    """C05: an invalid, a non-finite and a killed job beside a good one: table, logs, MLflow, exit status."""
    words = [f"{RATES}=1e-3,-1,1e6,2e-3", *small, "sweep.retry.lost_worker=0", "sweep.jobs_at_once=2"]
    done = train_py("-m", *words, "model.heads=5")
    assert done.returncode == 2  # all of them: nothing was started
    assert done.stderr.count("model.heads=5 does not divide model.width=32") == 1
    process = start("-m", *words)
    wait_until(lambda: any(job.overrides == [f"{RATES}=0.002"] and job.status == "running" for job in _seen()), process)
    key = next(job.key for job in _seen() if job.overrides == [f"{RATES}=0.002"])
    wait_until(lambda: bool(running_workers(key.rpartition("/")[2])), process)
    running_workers(key.rpartition("/")[2])[0].kill()
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1, output
    jobs = {job.overrides[0].partition("=")[2]: job for job in jobs_of()}
    assert {rate: (job.status, job.kind) for rate, job in jobs.items()} == {
        "0.001": ("done", None),
        "-1": ("failed", "configuration"),
        "1000000.0": ("failed", "non_finite_loss"),
        "0.002": ("failed", "lost_worker"),
    }
    assert "3 of 4 jobs did not finish" in output
    assert "1 done, 3 failed" in output
    ledger = Ledger(sweep_of())
    assert "must be above 0" in ledger.log_of(jobs["-1"]).read_text()
    assert "not finite for 3 steps" in ledger.log_of(jobs["1000000.0"]).read_text()
    assert "ended by signal 9" in ledger.log_of(jobs["0.002"]).read_text()
    parent, children = mlflow_runs()
    assert parent.info.status == "FAILED"
    statuses = {rate: children[job.number].info.status for rate, job in jobs.items()}
    assert statuses == {"0.001": "FINISHED", "-1": "FAILED", "1000000.0": "FAILED", "0.002": "FAILED"}
    assert children[jobs["-1"].number].data.params[RATES] == "-1"
    assert children[jobs["0.002"].number].data.tags["lm.failure"] == "lost_worker"
    command = [sys.executable, "-m", "lm.cli", "sweep", "resume", str(sweep_of())]
    resumed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert resumed.returncode == 1
    assert "failed before (lost_worker), sweep.retry.lost_worker=1 tries it again" in resumed.stdout
    again = train_py("-m", *words, "sweep.retry.lost_worker=1")
    assert {job.overrides[0]: job.status for job in jobs_of()}[f"{RATES}=0.002"] == "done", again.stdout
    assert len(mlflow_runs()[1]) == 4


def _seen() -> List[Job]:
    return [job for folder in Path("outputs/default").glob("sweep-*") for job in Ledger(folder).all()]


@pytest.mark.processes
@pytest.mark.usefixtures("planted")
def test_bugs_have_their_traceback_in_the_jobs_own_log_and_the_batches_that_follow_run(small: List[str]) -> None:
    """In batches of one, of which the first fails; a process that vanishes by os._exit(3) is told by its status."""
    words = ["run.name=boom,exit,fine", *small, "hydra.sweeper.max_batch_size=1", "train.steps=6"]
    words += ["tracking.uri=null", "train.eval_every_steps=6", "schedule.warmup_steps=2"]
    done = train_py("-m", *words)
    assert done.returncode == 1
    jobs = {job.overrides[0].partition("=")[2]: job for job in jobs_of()}
    assert (jobs["boom"].status, jobs["boom"].kind) == ("failed", "code")
    assert jobs["boom"].reason == "ZeroDivisionError: planted"
    log = Ledger(sweep_of()).log_of(jobs["boom"]).read_text()
    assert "Traceback (most recent call last)" in log
    assert (jobs["exit"].status, jobs["exit"].tries) == ("failed", 1)
    assert "exit status" in jobs["exit"].reason
    assert jobs["fine"].status == "done"
    assert "2 of 3 jobs did not finish" in done.stderr


@pytest.mark.processes
def test_a_lost_worker_is_tried_again_and_goes_on_from_its_checkpoint(small: List[str]) -> None:
    words = [f"{RATES}=1e-3,2e-3", *small, "train.steps=60", "checkpoint.every_steps=2"]
    process = start("-m", *words)
    wait_until(lambda: len(list(Path("outputs/default").glob("*/checkpoints/step-00000010"))) == 1, process)
    (worker,) = running_workers()
    worker.kill()
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert sorted(job.tries for job in jobs_of()) == [1, 2]
    (again,) = [job for job in jobs_of() if job.tries == 2]
    assert "resumed at step" in Ledger(sweep_of()).log_of(again).read_text()
    assert [line["step"] for line in train_lines(Path(again.folder or ""))] == list(range(1, 61))


@pytest.mark.processes
def test_jobs_at_once_share_the_cores_and_a_signal_stops_them_all(small: List[str]) -> None:
    """Each has a core of its own; SIGTERM saves both; another process is refused meanwhile."""
    words = [f"{RATES}=1e-3,2e-3,2.0e-3,3e-3", *small, "train.steps=100000", "checkpoint.every_steps=100000"]
    words += ["sweep.jobs_at_once=2", "train.eval_every_steps=100000"]
    process = start("-m", *words)
    wait_until(lambda: len(list(Path("outputs/default").glob("*/metrics.jsonl"))) == 2, process)
    shares = [set(worker.cpu_affinity()) for worker in running_workers()]
    assert len(shares) == 2
    cores = len(os.sched_getaffinity(0))
    assert cores == 1 or not shares[0] & shares[1]
    refused = train_py("-m", *words)
    assert refused.returncode == 1
    assert "another process works on this sweep" in refused.stderr
    os.kill(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    assert not running_workers()
    jobs = jobs_of()
    assert [job.status for job in jobs] == ["pending"] * 3  # 2e-3 and 2.0e-3 are one
    summaries: List[Dict[str, Any]] = [
        json.loads((Path(job.folder or "") / "summary.json").read_text()) for job in jobs[:2]
    ]
    assert [summary["status"] for summary in summaries] == ["stopped", "stopped"]
    assert all(summary["checkpoint_step"] == summary["step"] for summary in summaries)


@pytest.mark.processes
def test_a_sweep_ends_where_its_first_jobs_fail_alike(small: List[str]) -> None:
    """Two of four meet the same broken file; no third is begun. Once it is mended, a retry does them all."""
    words = [f"{RATES}=1e-3,2e-3,3e-3,4e-3", *small, "sweep.alike=2", "tracking.uri=null", "train.steps=2"]
    words += ["schedule.warmup_steps=0", "dataset.output=outputs/none"]
    Path("outputs").mkdir()
    Path("outputs/none").write_text("a file where the prepared set's folder should be")
    done = train_py("-m", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [job.status for job in jobs_of()] == ["failed", "failed", "pending", "pending"]
    assert "the first 2 jobs failed alike, so no other was begun" in done.stdout
    kind = jobs_of()[0].kind
    Path("outputs/none").unlink()
    again = train_py("-m", *words, f"sweep.retry.{kind}=1", "sweep.jobs_at_once=2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert [job.status for job in jobs_of()] == ["done"] * 4


@pytest.mark.processes
def test_points_that_learn_the_same_are_told(small: List[str]) -> None:
    """How often a run logs does not change what it learns, so both would have one folder."""
    words = [*small, "train.log_every_steps=1,2", "tracking.uri=null", "train.steps=2", "schedule.warmup_steps=0"]
    done = train_py("-m", *words)
    assert done.returncode == 1
    assert "train.log_every_steps=2 learns just what job 0 does (train.log_every_steps=1)" in done.stderr
    assert [(job.status, job.kind) for job in jobs_of()] == [("done", None), ("failed", "configuration")]
    ledger = Ledger(sweep_of())
    ledger.begin([], "val_loss")
    ledger.drop(ledger.all()[1].key)
    assert [job.number for job in Ledger(sweep_of()).all()] == [0]
