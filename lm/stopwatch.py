"""Where a run's wall time goes, by kind."""

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

    def split(self) -> Dict[str, float]:
        """Seconds by kind, "other" included; "total" is their sum, the time since the start."""
        total = self.clock() - self.began
        return {**self.seconds, "other": total - sum(self.seconds.values()), "total": total}
