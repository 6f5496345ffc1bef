"""The scaling law: a planted one comes back, too few runs have none, and the best size is the best one."""

from __future__ import annotations

from typing import List, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.scaling import Law, fit

SIZES = [(n, d) for n in (1e6, 3e6, 1e7, 3e7) for d in (1e7, 1e8, 1e9)]
LAWS = st.builds(
    Law,
    floor=st.floats(0.5, 2.0),
    a=st.floats(50, 2000),
    alpha=st.floats(0.2, 0.5),
    b=st.floats(50, 2000),
    beta=st.floats(0.2, 0.5),
    runs=st.just(12),
    worst=st.just(0.0),
)


def points(law: Law, sizes: List[Tuple[float, float]]) -> List[Tuple[float, float, float]]:
    return [(n, d, law.loss(n, d)) for n, d in sizes]


@settings(max_examples=25, deadline=None)
@given(law=LAWS)
def test_a_planted_law_comes_back(law: Law) -> None:
    """Without noise its predictions are the planted law's to a thousandth, at ten times the largest sizes too."""
    found = fit(points(law, SIZES))
    assert found is not None
    assert found.worst < 1e-3
    for n, d in [*SIZES, (3e8, 1e10)]:
        assert found.loss(n, d) == pytest.approx(law.loss(n, d), rel=1e-3)


@pytest.mark.parametrize("sizes", [SIZES[:5], [(n, 1e8) for n, _ in SIZES], [(1e6, d) for _, d in SIZES]])
def test_too_few_or_too_alike_runs_have_no_law(sizes: List[Tuple[float, float]]) -> None:
    assert fit(points(Law(1.7, 400, 0.34, 410, 0.28, 0, 0), sizes)) is None


def test_no_other_size_of_the_budget_is_better() -> None:
    law = Law(1.69, 406.4, 0.34, 410.7, 0.28, 0, 0.0)  # Hoffmann et al. 2022, equation 10
    flops = 5.76e23
    best = law.best_parameters(flops)
    losses = [law.loss(n, flops / 6 / n) for n in (best * 0.9, best, best * 1.1)]
    assert min(losses) == losses[1]
    assert "for ten times" in law.of_ten_times(flops)
