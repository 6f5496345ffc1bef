"""A composed configuration, typed and checked: everything that is wrong with it is told at once."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Tuple

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm.schema import KINDS, SECTIONS, Config


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    keys: the settings that it is about, most telling first ("model.heads").
    text: what is wrong, with both numbers.
    fix: what to type instead.
    """

    keys: Tuple[str, ...]
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.text}\n     -> {self.fix}" if self.fix else self.text


class ConfigError(Exception):
    """A request that is refused before anything slow happens. Exit status 2.

    problems: every problem that was found, not only the first.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        super().__init__("\n".join([f"refused: {head} in this configuration; nothing was started", *lines]))


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest valid name, or all of them."""
    valid = sorted(valid)
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"valid: {', '.join(valid)}"


def defaults() -> Dict[str, Any]:
    """Every setting that has one schema, with its default: the first layer that Hydra composes upon.

    Plain values without types, so that composing never stops at the first wrong type: `load` names them all.
    """
    known = {name: schema for name, schema in SECTIONS.items() if schema is not None}
    return {
        name: {f.name: _default(f) for f in dataclasses.fields(schema)} for name, schema in known.items()
    }


def _default(setting_field: Any) -> Any:
    if setting_field.default is not dataclasses.MISSING:
        return setting_field.default
    return setting_field.default_factory()


def load(composed: DictConfig) -> Config:
    """Types a composed configuration and checks every setting by itself and against the others.

    Raises ConfigError with every problem.
    """
    problems: List[Problem] = []
    absent = [name for name in SECTIONS if not isinstance(composed.get(name), DictConfig) or not composed[name]]
    absent += [name for name in ("model", "dataset") if OmegaConf.is_missing(composed.get(name) or {}, "name")]
    if absent:
        raise ConfigError([Problem((name,), f"{name} is left out", f"{name}=OPTION") for name in absent])
    try:
        OmegaConf.resolve(composed)
    except OmegaConfBaseException as error:
        raise ConfigError([Problem((), f"an interpolation has no value: {str(error).splitlines()[0]}")]) from None
    for name in map(str, composed):
        if name not in SECTIONS:
            problems.append(Problem((name,), f"{name} is not a section", did_you_mean(name, SECTIONS)))
    sections = {name: _section(name, composed[name], problems) for name in SECTIONS}
    config = Config(**sections)
    bad = {key for problem in problems for key in problem.keys}
    problems += [problem for problem in _disagreements(config) if not bad.intersection(problem.keys)]
    if problems:
        raise ConfigError(problems)
    return config


def _section(name: str, values: DictConfig, problems: List[Problem]) -> Any:
    """One section as its dataclass; a value that does not fit adds a problem and is left at a stand-in."""
    schema = SECTIONS[name]
    if schema is None:
        kinds = KINDS[name]
        kind = values.get("name")
        if kind not in kinds:
            problems.append(
                Problem((f"{name}.name",), f"{name}.name={kind} is not known", did_you_mean(str(kind), kinds))
            )
            kind = next(iter(kinds))
        schema = kinds[kind]
    typed = OmegaConf.structured(schema)
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for key, value in values.items():
        key = str(key)
        full = f"{name}.{key}"
        if key not in fields:
            problems.append(Problem((full,), f"{full} is not a setting", did_you_mean(key, fields)))
            continue
        if OmegaConf.is_missing(values, key):
            continue
        try:
            typed[key] = value
        except OmegaConfBaseException:
            wanted = str(fields[key].type).replace("Optional[", "").rstrip("]")
            article = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
            shown = "null" if value is None else repr(value)
            whole = wanted == "int" and isinstance(value, float) and value.is_integer()
            fix = f"{full}={int(value)}" if whole else ""
            problems.append(
                Problem((full,), f"{full}={shown} is not {article.get(wanted, wanted)} (type {wanted})", fix)
            )
    for key, f in fields.items():
        full = f"{name}.{key}"
        if OmegaConf.is_missing(typed, key):
            if not any(full in problem.keys for problem in problems):
                problems.append(Problem((full,), f"{full} has no value", f"{full}=..."))
            typed[key] = _stand_in(f)
        elif typed[key] is not None:
            broken = _limits(full, typed[key], f.metadata)
            problems += broken
            if broken:
                typed[key] = [] if "List" in str(f.type) else _stand_in(f)
    return OmegaConf.to_object(typed)


def _stand_in(f: Any) -> Any:
    """A value of the right type for a setting that has none, so that the other checks can go on."""
    kind = str(f.type)
    return "x" if "str" in kind else max(1, int(f.metadata["minimum"] or 1)) if "int" in kind else 0.5


def _limits(full: str, value: Any, limits: Any) -> List[Problem]:
    """What a setting's own limits say against its value."""
    problems = []

    def refuse(rule: str, fix: str) -> None:
        problems.append(Problem((full,), f"{full}={value} must be {rule}", fix))

    if isinstance(value, float) and not math.isfinite(value):
        refuse("finite", f"a number for {full}")
    elif limits["minimum"] is not None and value < limits["minimum"]:
        refuse(f"at least {limits['minimum']}", f"{full}={limits['minimum']}")
    elif limits["above"] is not None and value <= limits["above"]:
        refuse(f"above {limits['above']}", f"a positive {full}" if limits["above"] == 0 else "")
    elif limits["maximum"] is not None and value > limits["maximum"]:
        refuse(f"at most {limits['maximum']}", f"{full}={limits['maximum']}")
    elif limits["below"] is not None and value >= limits["below"]:
        refuse(f"below {limits['below']}", f"{full}={limits['below'] * 0.1:g}" if limits["below"] > 0 else "")
    chosen = list(value) if isinstance(value, ListConfig) else [value]
    for one in chosen if limits["choices"] else []:
        if one not in limits["choices"]:
            some = "of" if isinstance(value, ListConfig) else "one of"
            refuse(f"{some} {', '.join(limits['choices'])}", did_you_mean(str(one), limits["choices"]))
    if limits["pattern"] and not re.fullmatch(limits["pattern"], value):
        refuse("letters, digits, dots, dashes and underscores only", "a name without = , or spaces")
    return problems


def _disagreements(config: Config) -> List[Problem]:
    """What settings say against each other."""
    problems = _batch_disagreements(config)
    problems += _mixture_disagreements(config)
    model, schedule, train = config.model, config.schedule, config.train
    if model.head_width is None and model.width % model.heads:
        problems.append(
            Problem(
                ("model.heads", "model.width"),
                f"model.heads={model.heads} does not divide model.width={model.width}",
                f"model.heads={_largest_divisor(model.width, model.heads)}, or model.head_width=... to set it freely",
            )
        )
    elif model.positions == "rotary" and (model.head_width or model.width // model.heads) % 2:
        head_width = model.head_width or model.width // model.heads
        problems.append(
            Problem(
                ("model.head_width", "model.positions", "model.width", "model.heads"),
                f"model.positions=rotary turns pairs, and the head width {head_width} is odd",
                f"model.head_width={head_width + 1}",
            )
        )
    decay_steps = getattr(schedule, "decay_steps", 0)
    if schedule.warmup_steps + decay_steps >= train.steps:
        both = f" + schedule.decay_steps={decay_steps}" if decay_steps else ""
        problems.append(
            Problem(
                ("schedule.warmup_steps", "schedule.decay_steps", "train.steps"),
                f"schedule.warmup_steps={schedule.warmup_steps}{both} is not below train.steps={train.steps}",
                f"train.steps={schedule.warmup_steps + decay_steps + 1} or more, or a shorter warm-up",
            )
        )
    return problems


def _largest_divisor(of: int, at_most: int) -> int:
    return max(n for n in range(1, at_most + 1) if of % n == 0)


def _pipeline_disagreements(config: Config, per_replica: int) -> List[Problem]:
    """What partitions, microbatches and processes say against each other."""
    parallel, train, processes = config.parallel, config.train, config.cluster.processes
    problems = []
    if processes > 1 and not parallel.horovod:
        text = f"cluster.processes={processes} are as many replicas, and parallel.horovod=false has one"
        fix = "parallel.horovod=true, or cluster=local"
        problems.append(Problem(("parallel.horovod", "cluster.processes"), text, fix))
    if parallel.partitions > config.model.layers:
        text = f"parallel.partitions={parallel.partitions} is more than model.layers={config.model.layers}"
        problems.append(Problem(("parallel.partitions", "model.layers"), text, f"{config.model.layers} or fewer"))
    if train.microbatch_sequences is not None:
        text = "train.microbatch_sequences is given, and under parallel=smp parallel.microbatches cuts the batch"
        problems.append(Problem(("train.microbatch_sequences",), text, "train.microbatch_sequences=null"))
    if per_replica % parallel.microbatches:
        text = f"parallel.microbatches={parallel.microbatches} does not divide a replica's {per_replica} sequences"
        fix = f"parallel.microbatches={_largest_divisor(per_replica, parallel.microbatches)}"
        problems.append(Problem(("parallel.microbatches", "train.global_batch_sequences"), text, fix))
    return problems


def _mixture_disagreements(config: Config) -> List[Problem]:
    """What a mixture's weights, epochs and sets say against each other; which sources there are the data says."""
    mixture = config.mixture
    problems = []
    if mixture.weights and mixture.epochs:
        text = "mixture.weights and mixture.epochs are both given, and each decides the shares alone"
        problems.append(Problem(("mixture.weights", "mixture.epochs"), text, "one of them"))
    for kind, shares in (("weights", mixture.weights), ("epochs", mixture.epochs)):
        for name, share in shares.items():
            if not (math.isfinite(share) and share > 0):
                text = f"mixture.{kind} has {share} for {name}, and a share is above 0"
                problems.append(Problem((f"mixture.{kind}",), text, "a positive number, or leave the name out"))
    named = [*mixture.weights, *mixture.epochs]
    for name in mixture.sets:
        if "/" in name or name == config.dataset.name:
            text = f"mixture.sets.{name} is a name that stands for something else"
            problems.append(Problem(("mixture.sets",), text, "a name of its own, without /"))
        elif named and not any(one == name or one.startswith(f"{name}/") for one in named):
            text = f"mixture.sets.{name} has no share: the mixture names {', '.join(named)}"
            problems.append(Problem(("mixture.sets",), text, f"a share for {name} too, or no such set"))
    return problems


def _batch_disagreements(config: Config) -> List[Problem]:
    """What the batch, its microbatches and the processes say against each other."""
    train, replicas = config.train, config.cluster.processes
    problems = []
    if config.parallel.name == "single" and replicas > 1:
        problems.append(
            Problem(
                ("parallel", "cluster.processes"),
                f"parallel=single trains in 1 process and cluster.processes={replicas} starts {replicas}",
                "parallel=horovod, or cluster=local",
            )
        )
    per_replica = train.global_batch_sequences // replicas
    if config.parallel.name == "smp":
        problems += _pipeline_disagreements(config, per_replica)
    if train.global_batch_sequences % replicas:
        up = math.ceil(train.global_batch_sequences / replicas) * replicas
        problems.append(
            Problem(
                ("train.global_batch_sequences", "cluster.processes"),
                f"train.global_batch_sequences={train.global_batch_sequences} does not divide among "
                f"{replicas} replicas",
                f"train.global_batch_sequences={up}",
            )
        )
    microbatch = train.microbatch_sequences or max(per_replica, 1)
    if per_replica and per_replica % microbatch:
        problems.append(
            Problem(
                ("train.microbatch_sequences", "train.global_batch_sequences"),
                f"train.microbatch_sequences={microbatch} does not divide a replica's {per_replica} sequences "
                f"({train.global_batch_sequences} / {replicas})",
                f"train.microbatch_sequences={_largest_divisor(per_replica, microbatch)}",
            )
        )
    return problems
