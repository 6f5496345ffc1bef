"""A request that is refused before anything slow happens: every problem with it, and what to type instead."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Iterable, Tuple


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
