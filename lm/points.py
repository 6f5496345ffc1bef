"""The words of a sweep: which of them have several values, what names its folder, and a few of its points."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Dict, List, Mapping, Sequence, Set, Tuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

ALONE = "outputs/.hydra"  # where Hydra's own file of a launched job goes that is no sweep
# How a sweep is gone through, and not which one it is.
OF_THE_COMMAND = ("sweep.retry", "sweep.alike=", "sweep.jobs_at_once=", "run.resume=")


def swept_keys(overrides: Sequence[str], params: Mapping[str, Any]) -> Set[str]:
    """The settings and groups that have several values. params: hydra.sweeper.params."""
    found = {str(key) for key in params}
    return found | {text.partition("=")[0] for text in overrides if _is_sweep(text)}


def sweep_folder(experiment: str, overrides: Sequence[str], params: Dict[str, Any]) -> str:
    """The same command has the same folder, whatever it says of retries. overrides: without Hydra's own."""
    if not swept_keys(overrides, params):
        return ALONE
    words = sorted(word for word in overrides if not word.startswith(OF_THE_COMMAND))
    digest = hashlib.sha256(json.dumps([words, params], sort_keys=True).encode()).hexdigest()[:8]
    return f"outputs/{experiment}/sweep-{digest}"


def some_points(overrides: Sequence[str], groups: Mapping[str, Set[str]]) -> List[List[str]]:
    """Enough points to meet every option of a swept group, and the first value of a swept setting."""
    parser = OverridesParser.create()
    first: List[str] = []
    others: List[Tuple[int, str]] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            first.append(text)
            continue
        if override.is_sweep_override():
            values = [f"{override.get_key_element()}={value}" for value in _values(override)]
            if override.key_or_group in groups:
                others += [(len(first), value) for value in values[1:]]
            text = values[0]
        first.append(text)
    return [first, *([*first[:at], value, *first[at + 1 :]] for at, value in others)]


def _values(override: Override) -> List[str]:
    if override.is_discrete_sweep():
        return list(override.sweep_string_iterator())
    return [str(override.value().start)]  # type: ignore[union-attr]  # interval(start, end)


def _is_sweep(text: str) -> bool:
    try:
        return OverridesParser.create().parse_override(text).is_sweep_override()
    except HydraException:
        return False
