"""Where a run's wall time goes, by kind; with those of its earlier attempts, whatever ended them."""

from __future__ import annotations

import contextlib
import time
from typing import Callable, Dict, Iterator


class Stopwatch:
    """Seconds and spans by kind; time under no kind is "other". Spans do not nest."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.began = clock()
        self.seconds: Dict[str, float] = {}
        self.spans: Dict[str, int] = {}
        self._lap: Dict[str, float] = {}
        self._earlier: Dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        """with stopwatch("evaluation"): ..."""
        entered = self.clock()
        try:
            yield
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + self.clock() - entered
            self.spans[kind] = self.spans.get(kind, 0) + 1

    def totals(self) -> Dict[str, float]:
        """Seconds by kind, and how many spans they were as "<kind>_spans"."""
        return {**self.seconds, **{f"{kind}_spans": float(count) for kind, count in self.spans.items()}}

    def lap(self) -> Dict[str, float]:
        """The totals since the last lap."""
        now = self.totals()
        lap = {kind: value - self._lap.get(kind, 0.0) for kind, value in now.items()}
        self._lap = now
        return lap

    def go_on_from(self, earlier: Dict[str, float], lost_seconds: float) -> None:
        """Counts earlier attempts too. lost_seconds: of them, worked but not saved: "restarts"."""
        self._earlier = dict(earlier)
        if lost_seconds:
            self._earlier["restarts"] = self._earlier.get("restarts", 0.0) + lost_seconds

    def split(self) -> Dict[str, float]:
        """Seconds by kind, "other" and earlier attempts included; "total" is their sum."""
        here = {**self.seconds, "other": self.clock() - self.began - sum(self.seconds.values())}
        kinds = [*here, *(kind for kind in self._earlier if kind not in here)]
        both = {kind: here.get(kind, 0.0) + self._earlier.get(kind, 0.0) for kind in kinds}
        return {**both, "total": sum(both.values())}


def shares(split: Dict[str, float]) -> Dict[str, float]:
    """The share of each kind of a split, by the names that metrics have."""
    return {f"goodput/{kind}": seconds / split["total"] for kind, seconds in split.items() if kind != "total"}
