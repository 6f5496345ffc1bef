"""One setting of the schema: its default and its limits."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Optional, Tuple

from omegaconf import MISSING


def setting(
    default: Any = MISSING,
    *,
    minimum: Optional[float] = None,
    above: Optional[float] = None,
    below: Optional[float] = None,
    maximum: Optional[float] = None,
    choices: Tuple[str, ...] = (),
    pattern: str = "",
    like: str = "",
) -> Any:
    """A dataclass field with its limits: minimum and maximum are allowed values, above and below are not.

    like: an example of what fits the pattern, for whoever's value does not.
    """
    limits = dict(
        minimum=minimum, above=above, below=below, maximum=maximum, choices=choices, pattern=pattern, like=like
    )
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=limits)
    return field(default=default, metadata=limits)
