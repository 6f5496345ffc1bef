"""The split of wall time, with a clock that tests move."""

from __future__ import annotations

from typing import Dict, List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.stopwatch import Stopwatch

KINDS = st.sampled_from(["start_up", "step", "data_wait", "checkpoint"])
SECONDS = st.floats(0, 1e4)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    spans=st.lists(st.tuples(KINDS, SECONDS, SECONDS)),
    earlier=st.dictionaries(KINDS | st.just("other"), SECONDS),
    lost_seconds=SECONDS,
)
def test_the_kinds_add_up_to_all_attempts(
    spans: List[Tuple[str, float, float]], earlier: Dict[str, float], lost_seconds: float
) -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)
    stopwatch.go_on_from(earlier, lost_seconds)
    expected = dict(earlier)
    for kind, within, after in spans:
        with stopwatch(kind):
            clock.now += within
        clock.now += after
        expected[kind] = expected.get(kind, 0.0) + within
    split = stopwatch.split()
    total = split.pop("total")
    assert total == pytest.approx(sum(split.values()))
    assert total == pytest.approx(clock.now - 100.0 + sum(earlier.values()) + lost_seconds, abs=1e-6)
    assert split.get("restarts", 0.0) == lost_seconds
    for kind in ("start_up", "step", "data_wait", "checkpoint"):
        assert split.get(kind, 0.0) == pytest.approx(expected.get(kind, 0.0), abs=1e-6)


def test_rates_are_of_this_attempt_alone() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)
    stopwatch.go_on_from({"step": 1000.0}, 5.0)
    with stopwatch("step"):
        clock.now += 2.0
    assert stopwatch.totals() == {"step": 2.0, "step_spans": 1.0}
