"""From a command line to a composed configuration: Hydra does it; every override it refuses is told at once."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm.catalog import gpus_of, replicas, usual_precision
from lm.catalog.checks import refuse_unworkable
from lm.config import defaults, load
from lm.plan import make_plan
from lm.points import some_points, sweep_folder
from lm.refusal import ConfigError, Problem, did_you_mean
from lm.schema import KINDS, Config


def _launch_mode(cluster: str, processes: Any) -> Optional[str]:
    """Hydra reaches a launcher in MULTIRUN mode alone: for more than one process, or for a job elsewhere."""
    elsewhere = cluster in ("sagemaker", "slurm")
    return "MULTIRUN" if elsewhere or (isinstance(processes, int) and processes > 1) else None


def _multiple(at_least: int, *factors: Any) -> int:
    """The first multiple of all factors together that is at least a number; a factor that is no number counts as 1."""
    step = math.prod(factor for factor in factors if isinstance(factor, int) and factor > 0)
    return math.ceil(at_least / step) * step


def _replicas(hosts: Any, gpus_per_host: Any, strategy: str, partitions: Any) -> int:
    numbers = (hosts, gpus_per_host, partitions)  # of the wrong type: `load` says so
    return replicas(hosts, gpus_per_host, strategy, partitions) if all(isinstance(n, int) for n in numbers) else 1


# What the YAML files compute: conf/config.yaml, conf/cluster/sagemaker.yaml, conf/parallel/smp.yaml.
RESOLVERS: Dict[str, Callable[..., Any]] = {
    "launch_mode": _launch_mode,
    "multiple": _multiple,
    "gpus_of": gpus_of,
    "replicas": _replicas,
    "precision": usual_precision,
    "sweep_folder": lambda experiment, overrides, params: sweep_folder(
        experiment, list(overrides or []), dict(params or {})
    ),
    "several": lambda count: isinstance(count, int) and count > 1,
}
REFUSED = (HydraException, OmegaConfBaseException, ValueError)  # what Hydra raises for what it cannot compose
CONF = Path(__file__).resolve().parent.parent / "conf"


def register() -> None:
    """Tells Hydra the schema's defaults and the resolver that conf/config.yaml uses."""
    node = OmegaConf.create(defaults())
    for section in node.values():
        for key in section:
            if isinstance(section._get_node(key), DictConfig):  # names of the user's own, which Hydra would refuse
                section._get_node(key)._set_flag("struct", False)
    ConfigStore.instance().store(name="schema", node=node)
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def compose(overrides: Iterable[str], workable: bool = True) -> Config:
    """Composes, types and checks a configuration.

    overrides: as on the command line ("model=125m", "optimizer.learning_rate=1e-4"). workable: against the catalog too.
    Raises ConfigError with every problem of the overrides and of the values, or what the catalog has against them.
    """
    composed, problems = composed_with_problems(overrides)
    try:
        config = load(composed)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    if workable:
        refuse_unworkable(config)
    return config


def composed_with_problems(overrides: Iterable[str]) -> Tuple[DictConfig, List[Problem]]:
    """What Hydra composes of the overrides that it can take, and a problem for each that it cannot."""
    register()
    overrides = list(overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            return hydra_compose("config", overrides), []
        except REFUSED:
            good, problems = _sort_out(overrides)
            return hydra_compose("config", good), problems


def _sort_out(overrides: List[str]) -> Tuple[List[str], List[Problem]]:
    """The overrides that compose, and why each of the others does not."""
    parser = OverridesParser.create()
    groups = _groups()
    chosen: List[str] = []
    settings: List[Tuple[str, Override]] = []
    problems: List[Problem] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            problems.append(_unparsable(text))
            continue
        key = override.key_or_group
        if override.is_sweep_override():
            many = f"{key} has several values, and this is one run"
            problems.append(Problem((key,), many, f"-m {text} for a run of each"))
        elif key in groups:
            option = override.value()
            if (option in groups[key] and not override.is_delete()) or (key == "experiment" and option is None):
                chosen.append(text)
            else:
                wanted = did_you_mean(str(option), groups[key])
                problems.append(Problem((key,), f"{key}={option} is not an option of the group {key}", wanted))
        elif key.startswith("hydra"):
            if _breaks(text, []):
                problems.append(Problem((key,), f"Hydra does not take {text}"))
            else:
                chosen.append(text)
        else:
            settings.append((text, override))
    known = _leaves(hydra_compose("config", chosen))
    good = list(chosen)
    for text, override in settings:
        key = override.key_or_group
        if key in known and not override.is_add():
            good.append(text)
        else:
            section = key.split(".")[0]
            own = {name for name in known if name.startswith(section + ".")}
            fix = _option_with(key) or did_you_mean(key, own or known | set(groups))
            problems.append(Problem((key,), f"{key} is not a setting", fix))
    while True:  # what is left is rare (an append to a list that is none, say): ask Hydra itself
        try:
            hydra_compose("config", good)
            return good, problems
        except REFUSED as error:
            bad = next((text for text in good if _breaks(text, chosen)), good[-1])
            good.remove(bad)
            problems.append(Problem((bad.split("=")[0],), f"{bad}: {str(error).splitlines()[0]}"))


def _option_with(key: str) -> str:
    """What to type for a setting that another option of its group has: cluster=sagemaker for cluster.spot."""
    section, _, setting = key.partition(".")
    kinds = KINDS.get(section, {}).items()
    options = [kind for kind, schema in kinds if setting in {f.name for f in dataclasses.fields(schema)}]
    return f"{section}={options[0]} has it" if options else ""


def _breaks(override: str, chosen: List[str]) -> bool:
    """Whether this override does not compose with the chosen groups alone."""
    try:
        hydra_compose("config", [*(text for text in chosen if text != override), override])
    except REFUSED:
        return True
    return False


def _unparsable(text: str) -> Problem:
    key, separator, value = text.partition("=")
    if not separator:
        return Problem((key,), f"{text} is not an override", f"{key}=VALUE")
    if re.search(r"[=,:{}\[\]()\s]", value):
        reason = "has characters that are Hydra's own grammar"
        return Problem((key,), f"the value of {key}, {value}, {reason}: quote it", f"""'{key}="{value}"'""")
    return Problem((key,), f"{text} cannot be read as an override", f"""'{key}="{value}"'""")


def _groups() -> Dict[str, Set[str]]:
    """The configuration groups and their options, from the files."""
    folders = [folder for folder in CONF.iterdir() if folder.is_dir() and folder.name != "hydra"]
    return {folder.name: {file.stem for file in folder.glob("*.yaml")} for folder in folders}


def _leaves(node: Any, prefix: str = "") -> Set[str]:
    """The dotted names of all settings, and of the sections that hold them."""
    names: Set[str] = set()
    for key in node:
        name = f"{prefix}{key}"
        names.add(name)
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none():
            names |= _leaves(child, name + ".")
    return names


def check_command_line(arguments: List[str]) -> None:
    """Refuses a command line before Hydra sees it. Raises ConfigError with every problem.

    Of a sweep, what no point can compose: unknown settings and options. A point's values are checked when the
    launcher has composed it, so that one that is refused does not stop the others.
    """
    options = get_args_parser().parse_args(arguments)
    if options.help or options.hydra_help or options.info or options.shell_completion:
        return
    if options.config_path or options.config_dir or options.config_name or options.experimental_rerun:
        return  # another configuration than conf/: Hydra knows it, and `load` checks what it makes of it
    if not options.multirun:
        make_plan(compose(options.overrides))
        return
    problems: List[Problem] = []
    for point in some_points(options.overrides, _groups()):
        _, found = composed_with_problems(point)
        problems += [problem for problem in found if problem not in problems]
    if problems:
        raise ConfigError(problems)
