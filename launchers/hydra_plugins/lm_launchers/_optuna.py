"""A search by Optuna: what is asked, what is told, and how a study goes on after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from hydra.utils import instantiate
from hydra_plugins.lm_launchers._points import compose_job
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import Trial, TrialState

from lm.compare import HIGHER_IS_BETTER
from lm.refusal import ConfigError, Problem


def search(sweeper: Any, arguments: List[str]) -> None:
    """Runs trials until the study has sweeper.trials that ended, however they did.

    Trials that a kill left running are gone on with first: the same point is the same run folder, and its checkpoint.
    Raises ConfigError for a search space that makes no sense, and for jobs whose end nobody here waits for.
    """
    _refuse_unobserved(sweeper)
    words = [*(f"{key}={value}" for key, value in sweeper.params.items()), *arguments]
    fixed, space = _space(sweeper, words)
    folder = Path(sweeper.config.hydra.sweep.dir)
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    objective = sweeper.config.sweep.objective
    study = optuna.create_study(
        storage=sweeper.storage or f"sqlite:///{(folder / 'study.db').resolve()}",
        study_name=sweeper.study or folder.name,
        direction="maximize" if objective in HIGHER_IS_BETTER else "minimize",
        load_if_exists=True,
        pruner=instantiate(sweeper.pruner),
    )
    study.sampler = _sampler(sweeper.sampler, len(study.trials))
    at_once = sweeper.config.cluster.get("max_parallel_jobs") or sweeper.config.sweep.jobs_at_once
    while True:
        known = study.get_trials(deepcopy=False)
        interrupted = [trial.number for trial in known if trial.state == TrialState.RUNNING]
        room = sweeper.trials - sum(trial.state.is_finished() for trial in known)
        if room <= 0:
            break
        trials = [Trial(study, known[number]._trial_id) for number in interrupted[: min(room, at_once)]]
        for trial in trials:
            for name, distribution in space.items():
                trial._suggest(name, distribution)  # as `ask` does: what is stored already stays as it is
        while len(trials) < min(room, at_once):
            trials.append(study.ask(space))
        _run(sweeper.launcher, study, trials, fixed, len(known) - len(interrupted))
        if any(job.status == "pending" for job in sweeper.launcher.jobs):  # the sweep has ended itself (sweep.alike)
            break
    ended = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    if ended:
        chosen = " ".join(f"{key}={_typed(value)}" for key, value in study.best_params.items())
        print(f"best of {len(ended)} finished trials: {objective} {study.best_value:.5g} with {chosen}")


def _refuse_unobserved(sweeper: Any) -> None:
    if not hasattr(sweeper.launcher, "judge"):
        text = "hydra/sweeper=optuna wants to see its jobs end, and this cluster's launcher is not ours"
        raise ConfigError([Problem(("hydra.sweeper",), text, "cluster=local, or one of SageMaker's")])
    for setting in ("dry_run", "detach"):
        if sweeper.config.cluster.get(setting):
            text = f"hydra/sweeper=optuna waits for what its jobs reach, and cluster.{setting}=true does not"
            raise ConfigError([Problem((f"cluster.{setting}",), text, f"cluster.{setting}=false")])


def _run(launcher: Any, study: optuna.Study, trials: Sequence[Trial], fixed: List[str], first_index: int) -> None:
    """One batch, and its results into the study."""

    def judge(at: int, step: int, value: float) -> bool:
        trial = trials[at]
        reported = study.trials[trial.number].intermediate_values
        if step in reported:  # by the attempt before
            return False
        trial.report(value, step)
        return trial.should_prune()

    launcher.judge = judge
    points = [[*fixed, *(f"{key}={_typed(value)}" for key, value in trial.params.items())] for trial in trials]
    launcher.launch(points, initial_job_idx=first_index)
    for trial, job in zip(trials, launcher.jobs):
        if job.status == "done" and job.value is not None:
            study.tell(trial, job.value)
        elif job.status == "failed" or job.status == "done":
            study.tell(trial, state=TrialState.FAIL)
        elif job.status == "pruned":
            study.tell(trial, state=TrialState.PRUNED)


def _sampler(node: Any, trials: int) -> optuna.samplers.BaseSampler:
    """A seeded sampler that goes on from some trials does not begin with the same draws again."""
    seed = node.get("seed")
    return instantiate(node, **({} if seed is None else {"seed": seed + trials}))


def _space(sweeper: Any, words: Sequence[str]) -> Tuple[List[str], Dict[str, BaseDistribution]]:
    """The overrides that are the same for all trials, and a distribution for each of the others. Raises ConfigError."""
    parser = OverridesParser.create()
    fixed: List[str] = []
    space: Dict[str, BaseDistribution] = {}
    problems: List[Problem] = []
    firsts: List[str] = []
    for text in words:
        key = text.partition("=")[0]
        try:
            override = parser.parse_override(text)
            fixed = [word for word in fixed if word.partition("=")[0] != key]  # a later word counts
            space.pop(key, None)
            if not override.is_sweep_override():
                fixed.append(text)
                continue
            space[key] = _distribution(override)
        except (HydraException, ValueError) as error:
            problems.append(Problem((key,), f"{text}: {str(error).splitlines()[0]}", f"{key}=interval(1e-4,1e-2)"))
            continue
    for key, found in space.items():
        first = found.choices[0] if isinstance(found, CategoricalDistribution) else found.low  # type: ignore[attr-defined]
        firsts.append(f"{key}={_typed(first)}")
    for text in firsts:
        try:
            compose_job(sweeper.launcher, [*fixed, text], 0)
        except HydraException as error:
            problems.append(Problem((text,), f"{text}: {str(error).splitlines()[0]}", "a setting of --cfg job"))
    if problems:
        raise ConfigError(problems)
    if not space:
        text = "hydra/sweeper=optuna has no setting to search over"
        fix = "'optimizer.learning_rate=tag(log,interval(1e-4,1e-2))'"
        raise ConfigError([Problem(("hydra.sweeper.params",), text, fix)])
    return fixed, space


def _distribution(override: Override) -> BaseDistribution:
    """Optuna's for a sweep in Hydra's grammar; tag(log, ...) draws evenly by magnitude. Raises ValueError."""
    value = override.value()
    logarithmic = "log" in getattr(value, "tags", ())
    if isinstance(value, IntervalSweep):  # of floats, unless it says int(interval(1, 8))
        low, high = value.start, value.end
        if low is None or high is None:
            raise ValueError("an interval needs its start and its end")
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=logarithmic)
        return FloatDistribution(float(low), float(high), log=logarithmic)
    if isinstance(value, RangeSweep):
        low, high, step = value.start, value.stop, value.step
        if low is None or high is None or step is None:
            raise ValueError("a range needs its start and its end")
        if isinstance(low, int) and isinstance(high, int) and isinstance(step, int):
            return IntDistribution(low, high - 1, step=step)
        return FloatDistribution(float(low), float(high), step=float(step))
    if isinstance(value, ChoiceSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    raise ValueError("Optuna draws from interval, range and choice")


def _typed(value: Any) -> str:
    """As a person would type it: four digits of a number that was drawn."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
