"""`lm reproduce`: the one command that repeats a run, checked by composing it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, Dict, List

from lm.compose import CONF, compose
from lm.config import load_file
from lm.refusal import ConfigError
from lm.run import RunFailed
from lm.schema import Config

SPECIAL, ESCAPED = re.compile(r"[\\()\[\]{}:=, ]"), r"\\\g<0>"  # in a name, which cannot be quoted there
PLAIN = re.compile(r"[A-Za-z0-9_./%@+-]+( [A-Za-z0-9_./%@+-]+)*")  # a string that Hydra's grammar reads as it stands
OF_THE_PLACE = ("run.directory", "run.resume")  # where the first one was, and how it was begun


def command(folder: Path) -> str:
    """What to type for a run like the one in a folder: its groups, and every setting that they do not give.

    Raises RunFailed where no command line composes to the same hash, and ConfigError for settings that do not load.
    """
    config = load_file(folder / "config.yaml")
    wanted = config.as_dict()
    usual = compose([]).as_dict()
    groups = [
        f"{name}={section['name']}"
        for name, section in wanted.items()
        if _is_option(name, section) and section["name"] != usual[name]["name"]
    ]
    overrides = [*groups, *_settings(wanted, compose(groups, workable=False).as_dict())]
    typed = shlex.join(["python", "train.py", *overrides])
    try:
        again = compose(overrides, workable=False)
    except ConfigError as error:
        raise RunFailed(f"{folder}: {typed} does not compose: {error}") from error
    if again.hash() != config.hash():
        why = f"has the hash {again.hash()}, and the run {config.hash()}: {_other(config, again)}"
        raise RunFailed(f"{folder}: {typed} {why}")
    return typed


def _is_option(group: str, section: Dict[str, Any]) -> bool:
    return (CONF / group / f"{section.get('name')}.yaml").exists()


def _settings(wanted: Dict[str, Any], given: Dict[str, Any]) -> List[str]:
    """An override for each setting that differs, those of the place left out."""
    found = []
    for section, settings in wanted.items():
        if section == "sweep":  # of the command that the run was a job of
            continue
        for key, value in settings.items():
            name = f"{section}.{key}"
            if name not in OF_THE_PLACE and value != given[section].get(key):
                found.append(f"{name}={_as_typed(value)}")
    return found


def _as_typed(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(_as_typed, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{SPECIAL.sub(ESCAPED, key)}:{_as_typed(one)}" for key, one in value.items()) + "}"
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


def _other(one: Config, another: Config) -> str:
    """The settings of the result that two configurations have otherwise."""
    left, right = one.result_settings(), another.result_settings()
    return ", ".join(key for key in left if left[key] != right.get(key)) or "lr_scaling"
