"""Optuna: the space of a search, a study that a kill does not lose, trials that end early or fail."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Dict, List

import optuna
import pytest
from conftest import start, train_lines, train_py, wait_until
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra_plugins.lm_launchers._optuna import _distribution
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from lm.sweep.ledger import Ledger

RATE = "optimizer.learning_rate=tag(log,interval(1e-3,1e-2))"
SEARCH = ["hydra/sweeper=optuna"]


def study_of(experiment: str = "default") -> optuna.Study:
    (file,) = Path("outputs", experiment).glob("sweep-*/study.db")
    return optuna.load_study(study_name=file.parent.name, storage=f"sqlite:///{file.resolve()}")


def ledger_of(experiment: str = "default") -> Ledger:
    (file,) = Path("outputs", experiment).glob("sweep-*/ledger.json")
    return Ledger(file.parent)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("tag(log,interval(1e-4,1e-2))", FloatDistribution(1e-4, 1e-2, log=True)),
        ("interval(0,0.5)", FloatDistribution(0.0, 0.5)),
        ("int(interval(1,8))", IntDistribution(1, 8)),
        ("range(2,9,2)", IntDistribution(2, 8, step=2)),
        ("range(0.1,0.5,0.1)", FloatDistribution(0.1, 0.5, step=0.1)),
        ("64,96,128", CategoricalDistribution(["64", "96", "128"])),
        ("choice(gelu,swiglu)", CategoricalDistribution(["gelu", "swiglu"])),
    ],
)
def test_hydras_grammar_is_the_search_space(word: str, expected: Any) -> None:
    assert _distribution(OverridesParser.create().parse_override(f"a={word}")) == expected


def test_what_cannot_be_searched_is_refused(small: List[str]) -> None:
    for words, said in (
        ([], "hydra/sweeper=optuna has no setting to search over"),
        (["optimizer.learning_rate=interval(1e-2,1e-3)"], "optimizer.learning_rate=interval(1e-2,1e-3)"),
        (["optimizer.learning_rats=interval(1e-3,1e-2)"], "did you mean optimizer.learning_rate?"),
        (["optimizer.learning_rate=choice(1e-3,2e-3)", "cluster=g5x1", "cluster.dry_run=true"], "cluster.dry_run=true"),
        (["+hydra.sweeper.params={optimizer.rate: 'interval(1e-3,1e-2)'}"], "optimizer.rate"),
    ):
        done = train_py("-m", *SEARCH, *small, *words)
        assert done.returncode == 2, done.stdout + done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert not list(Path("outputs").rglob("ledger.json"))


def test_the_shipped_search_composes() -> None:
    done = train_py("experiment=tiny_search", "--cfg", "all")
    assert done.returncode == 0, done.stderr
    assert "optimizer.learning_rate: tag(log,interval(3e-4,3e-2))" in done.stdout
    assert "_target_: optuna.samplers.TPESampler" in done.stdout


@pytest.mark.processes
def test_a_search_that_is_killed_goes_on_and_ends_bad_trials_early(small: List[str]) -> None:
    """Four trials in all, each with a run of its own and no step twice; the ledger and the study agree."""
    words = ["-m", *SEARCH, *small, RATE, "hydra.sweeper.trials=4", "train.eval_every_steps=4", "sweep.jobs_at_once=2"]
    words += ["hydra.sweeper.pruner.n_startup_trials=2", "checkpoint.every_steps=2"]
    process = start(*words)
    wait_until(lambda: len(list(Path("outputs/default").glob("*/checkpoints/step-*"))) >= 2, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    states = [trial.state for trial in study_of().trials]
    assert TrialState.RUNNING in states
    time.sleep(0.5)
    done = train_py(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    trials, jobs = study_of().trials, ledger_of().all()
    assert len(trials) == len(jobs) == 4
    ended = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    by_rate: Dict[str, Any] = {f"{trial.params['optimizer.learning_rate']:.4g}": trial for trial in trials}
    for job in jobs:
        trial = by_rate[job.overrides[0].partition("=")[2]]
        assert trial.state == ended[job.status]
        run = Path(job.folder or "")
        steps = [line["step"] for line in train_lines(run)]
        assert steps == list(range(1, len(steps) + 1))
        summary = json.loads((run / "summary.json").read_text())
        if job.status == "done":
            assert trial.value == job.value == summary["val_loss"]
            assert len(steps) == 20
        else:
            assert summary["status"] == "stopped"  # and saved: a longer search may go on with it
    assert len(set(by_rate)) == 4  # no point twice
    again = train_py(*words)
    assert again.returncode == 0
    assert "starts" not in again.stdout
    assert "best of" in again.stdout


@pytest.mark.processes
def test_a_search_that_its_first_jobs_halt_ends_and_a_refused_trial_counts_as_failed(small: List[str]) -> None:
    Path("outputs").mkdir()
    Path("outputs/none").write_text("a file where the prepared set's folder should be")
    words = ["-m", *SEARCH, *small, "dataset.output=outputs/none", "sweep.alike=2"]
    done = train_py(*words, "optimizer.learning_rate=interval(1e-3,2e-3)")
    assert done.returncode == 1
    assert "the first 2 jobs failed alike" in done.stdout
    words = ["-m", *SEARCH, *small, "run.experiment=heads", "model.heads=choice(2,3)", "hydra.sweeper.trials=4"]
    done = train_py(*words, "train.steps=2", "schedule.warmup_steps=0")
    assert done.returncode == 1
    states = {trial.params["model.heads"]: trial.state for trial in study_of("heads").trials}
    assert states == {"2": TrialState.COMPLETE, "3": TrialState.FAIL}


@pytest.mark.processes
def test_a_trial_that_fails_is_told_to_optuna_and_the_others_count(small: List[str]) -> None:
    words = ["-m", *SEARCH, *small, "optimizer.learning_rate=choice(1e-3,1e6)", "hydra.sweeper.trials=3"]
    words += ["hydra.sweeper.sampler._target_=optuna.samplers.RandomSampler", "~hydra.sweeper.sampler.n_startup_trials"]
    done = train_py(*words, "train.steps=6", "schedule.warmup_steps=1")
    assert done.returncode == 1, done.stdout + done.stderr
    for trial in study_of().trials:
        expected = TrialState.FAIL if trial.params["optimizer.learning_rate"] == "1000000.0" else TrialState.COMPLETE
        assert trial.state == expected
    assert {trial.state for trial in study_of().trials} == {TrialState.FAIL, TrialState.COMPLETE}
