"""The split of wall time, with a clock that tests move; and what attempts that died did in vain."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.run import RunFolder
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


ATTEMPTS = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=5), st.integers(1, 1000)), min_size=1
)
FOLDERS = itertools.count()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attempts")


@given(attempts=ATTEMPTS)
def test_what_was_done_in_vain_is_counted_over_all_attempts_and_their_pauses_never(
    folders: Path, attempts: List[Tuple[List[Tuple[int, bool]], int]]
) -> None:
    """Of each attempt the steps, so many seconds apart and saved or not, and how long nothing ran after its death."""
    run = RunFolder(folders / str(next(FOLDERS)))
    run.path.mkdir()
    now, step, saved_step, saved_at, lost = 1000.0, 0, 0, None, 0.0
    for steps, pause in attempts:
        assert run.begin_attempt(now, saved_at) == lost
        run.forget_metrics_after(saved_step)
        step = saved_step
        for seconds, saves in steps:
            step, now, lost = step + 1, now + seconds, lost + seconds
            run.append_metrics({"step": step, "time": now})
            if saves:
                saved_step, saved_at, lost = step, now, 0.0
        now += pause


@pytest.mark.parametrize(("saved_at", "lost"), [(None, 30.0), (110.0, 20.0), (150.0, 0.0)])
def test_a_run_from_before_attempts_were_noted(tmp_path: Path, saved_at: Optional[float], lost: float) -> None:
    run = RunFolder(tmp_path)
    for step, time in enumerate((100.0, 110.0, 130.0)):
        run.append_metrics({"step": step, "time": time})
    run.append_metrics({"step": 2, "time": 140.0, "goodput/other": 1.0})  # after the last save, whatever it took
    assert run.begin_attempt(1000.0, saved_at) == lost
