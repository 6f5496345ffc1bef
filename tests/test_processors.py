"""A step's time from two speeds: its parts by hand, and what `lm plan` says without an earlier run."""

from __future__ import annotations

import pytest

from lm.cli import main
from lm.compose import compose
from lm.plan import make_plan
from lm.processors import expected_here, step_seconds


def seconds(overrides: list[str], product_flops: float = 1e300, copied_bytes: float = 1e300) -> float:
    config = compose(overrides)
    return step_seconds(config, make_plan(config), product_flops, copied_bytes)


def test_products_softmaxes_and_weights_by_hand() -> None:
    """model=tiny: 4 layers of 192, 6 heads, 8 sequences of 256, 4,096 ids."""
    plan = make_plan(compose([]))
    assert seconds([], product_flops=1e9) == pytest.approx(plan.flops_per_token * 2048 / 1e9)
    softmaxes = 2048 * (4 * 6 * 256 + 4096) * 96
    assert seconds([], copied_bytes=1e9) == pytest.approx((softmaxes + 39 * plan.parameters) / 1e9)
    accumulated = seconds(["train.microbatch_sequences=2"], copied_bytes=1e9)
    assert accumulated == pytest.approx((softmaxes + (39 + 3 * 12) * plan.parameters) / 1e9)


def test_blocks_that_are_computed_again_take_a_third_more() -> None:
    once, again = (seconds([f"model.recompute={how}"], product_flops=1e9) for how in ("none", "block"))
    assert again == pytest.approx(once * 4 / 3)


def test_without_an_earlier_run_two_speeds_are_measured_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=tiny"]) == 0
    assert "GB/s here, measured now" in " ".join(capsys.readouterr().out.split())
    for elsewhere in (["train.precision=bfloat16"], ["cluster=slurm"]):
        config = compose(elsewhere)
        assert expected_here(config, make_plan(config)) is None
