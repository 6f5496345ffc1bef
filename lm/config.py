"""A composed configuration, typed and checked: everything that is wrong with it is told at once."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, Dict, List

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm.disagreements import disagreements
from lm.refusal import ConfigError, Problem, did_you_mean
from lm.schema import KINDS, SECTIONS, Config


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
    problems += [problem for problem in disagreements(config) if not bad.intersection(problem.keys)]
    if problems:
        raise ConfigError(problems)
    return config


def load_file(path: Path) -> Config:
    """A resolved configuration that was written to a file, as `to_yaml` has it. Raises ConfigError as `load` does."""
    composed = OmegaConf.load(path)
    assert isinstance(composed, DictConfig)
    for name, section in defaults().items():
        composed.setdefault(name, section)  # which came after the file was written
    return load(composed)


def to_yaml(config: Config) -> str:
    """A configuration as a file has it."""
    return OmegaConf.to_yaml(OmegaConf.create(config.as_dict()))


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
            kind = str(fields[key].type)
            wanted = kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind
            article = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
            article["List[str]"] = "a list"
            shown = "null" if value is None else repr(value)
            whole = wanted == "int" and isinstance(value, float) and value.is_integer()
            fix = f"{full}={int(value)}" if whole else f"{full}=[{value}]" if wanted == "List[str]" else ""
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
    for one in chosen if limits["pattern"] else []:
        if not re.fullmatch(limits["pattern"], one, re.DOTALL):
            if limits["like"]:
                refuse(f"like {limits['like']}" + (f", which {one} is not" if one is not value else ""), "")
            else:
                refuse("letters, digits, dots, dashes and underscores only", "a name without = , or spaces")
    return problems
