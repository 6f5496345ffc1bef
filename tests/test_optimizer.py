"""Optimizers against torch's, schedules against their formulas, clipping and loss scaling against their rules."""

from __future__ import annotations

import math
from typing import Any, Dict, List

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from lm.compose import compose
from lm.optimizer import LOSS_SCALE_GROWTH_STEPS, Optimizer, learning_rate, make_optimizer
from lm.plan import make_plan

GOLDEN = load_file(str(ROOT / "tests/golden/optimizers.safetensors"))
CONSTANT = ["schedule=constant", "schedule.warmup_steps=0", "optimizer.clip_norm=null", "optimizer.learning_rate=1e-2"]


def optimizer_of(overrides: List[str], values: Dict[str, Any]) -> Optimizer:
    config = compose(overrides)
    variables = {name: tf.Variable(value) for name, value in values.items()}
    return make_optimizer(config, make_plan(config), variables)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("adamw", ["optimizer.weight_decay=0.1"]),
        ("adafactor", ["optimizer.weight_decay=0.1"]),
        ("sgd", ["optimizer.weight_decay=0"]),
    ],
)
def test_five_steps_are_torchs(kind: str, overrides: List[str]) -> None:
    start = {name: GOLDEN[f"start.{name}"] for name in ("matrix", "vector")}
    optimizer = optimizer_of([f"optimizer={kind}", "optimizer.no_decay=[]", *CONSTANT, *overrides], start)
    for step in range(5):
        optimizer.apply([tf.constant(GOLDEN[f"gradient.{step}.{name}"]) for name in start])
        for name, variable in optimizer.variables.items():
            # float32 on both sides: a few roundings of values near 0.1
            np.testing.assert_allclose(variable, GOLDEN[f"{kind}.{step}.{name}"], rtol=2e-5, atol=1e-6)
    assert int(optimizer.step) == 5


def test_decay_spares_norms_biases_and_embeddings_as_configured() -> None:
    names = ["embedding.tokens", "blocks.0.norm_1.scale", "blocks.0.attention.qkv.kernel", "head.bias", "head.kernel"]
    optimizer = optimizer_of([], {name: np.ones((2, 2), np.float32) for name in names})
    assert [name for name in names if optimizer.decays(name)] == ["blocks.0.attention.qkv.kernel", "head.kernel"]
    optimizer.apply([tf.zeros((2, 2)) for _ in names])
    moved = {name: float(v[0, 0]) for name, v in optimizer.variables.items()}
    assert moved["embedding.tokens"] == 1.0
    assert moved["head.kernel"] < 1.0
    all_decay = optimizer_of(["optimizer.no_decay=[]"], {name: np.ones((2, 2), np.float32) for name in names})
    assert all(all_decay.decays(name) for name in names)


def test_clipping_is_of_the_global_norm_and_the_norm_is_told_before() -> None:
    def moved(clip: str, scale: float) -> Any:
        overrides = ["optimizer=sgd", *CONSTANT, f"optimizer.clip_norm={clip}", "optimizer.momentum=0"]
        optimizer = optimizer_of(overrides, {"a": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)})
        update = optimizer.apply([scale * tf.constant([3.0, 0.0]), scale * tf.constant([4.0])])
        return float(update.grad_norm), optimizer.variables["a"].numpy()[0], optimizer.variables["b"].numpy()[0]

    np.testing.assert_allclose(moved("1.0", 1.0), [5.0, -0.01 * 0.6, -0.01 * 0.8], rtol=1e-6)
    np.testing.assert_allclose(moved("1.0", 0.1), [0.5, -0.01 * 0.3, -0.01 * 0.4], rtol=1e-6)
    np.testing.assert_allclose(moved("null", 1.0), [5.0, -0.01 * 3.0, -0.01 * 4.0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "sgd"])
def test_bfloat16_moments_stay_near_float32_ones(kind: str) -> None:
    start = {name: GOLDEN[f"start.{name}"] for name in ("matrix", "vector")}
    finals = []
    for dtype in ("float32", "bfloat16"):
        optimizer = optimizer_of([f"optimizer={kind}", *CONSTANT, f"optimizer.moments_dtype={dtype}"], start)
        moments = [v for name, v in optimizer.state.items() if not name.startswith("optimizer.")]
        assert {v.dtype.name for v in moments} == {dtype}
        for step in range(5):
            optimizer.apply([tf.constant(GOLDEN[f"gradient.{step}.{name}"]) for name in start])
        finals.append(optimizer.variables["matrix"].numpy() - start["matrix"])
    # bfloat16 keeps 8 bits of a moment: each of five updates is off by at most some 2^-8 of itself
    np.testing.assert_allclose(finals[1], finals[0], rtol=0.05, atol=5e-4)


def test_adafactor_keeps_rows_and_columns_only() -> None:
    optimizer = optimizer_of(["optimizer=adafactor"], {"matrix": np.zeros((6, 4), np.float32)})
    shapes = {name: tuple(v.shape) for name, v in optimizer.state.items() if name.endswith("matrix")}
    assert shapes == {"row_moment.matrix": (6,), "column_moment.matrix": (4,)}


# --- schedules ---------------------------------------------------------------------------------------


def rates(overrides: List[str], steps: int) -> List[float]:
    config = compose([*overrides, f"train.steps={steps}"])
    return [
        float(learning_rate(config.schedule, 1.0, steps, tf.constant(step, tf.int64))) for step in range(steps)
    ]


def test_cosine_warms_up_and_ends_at_its_final_fraction() -> None:
    found = rates(["schedule.warmup_steps=4", "schedule.final_fraction=0.1"], 24)
    expected = [(t + 1) / 4 for t in range(4)]
    expected += [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t - 4) / 19)) for t in range(4, 24)]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found[-1] == pytest.approx(0.1)


def test_wsd_warms_up_holds_and_decays() -> None:
    found = rates(["schedule=wsd", "schedule.warmup_steps=2", "schedule.decay_steps=4"], 12)
    np.testing.assert_allclose(found, [0.5] + [1.0] * 7 + [0.75, 0.5, 0.25, 0.0], atol=1e-6)


def test_constant_holds() -> None:
    np.testing.assert_allclose(rates(["schedule=constant", "schedule.warmup_steps=2"], 5), [0.5, 1, 1, 1, 1])


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["constant", "cosine", "wsd"]),
    steps=st.integers(1, 40),
    warmup=st.integers(0, 39),
    data=st.data(),
)
def test_every_step_of_every_schedule_has_a_finite_rate(kind: str, steps: int, warmup: int, data: Any) -> None:
    warmup = min(warmup, steps - 1)
    overrides = [f"schedule={kind}", f"schedule.warmup_steps={warmup}"]
    if kind == "wsd":
        overrides.append(f"schedule.decay_steps={data.draw(st.integers(0, steps - 1 - warmup))}")
    found = rates(overrides, steps)
    assert all(0.0 <= rate <= 1.0 for rate in found)
    assert found[0] > 0 or steps == 1
    assert max(found) > 0 or steps == 1


# --- loss scaling (M01) ------------------------------------------------------------------------------

HALF = [*CONSTANT, "optimizer=sgd", "optimizer.momentum=0", "train.precision=float16"]


def test_gradients_are_unscaled_before_they_are_measured_and_clipped() -> None:
    overrides = [*HALF, "optimizer.clip_norm=1.0", "train.initial_loss_scale=1024"]
    optimizer = optimizer_of(overrides, {"a": np.zeros(1, np.float32)})
    update = optimizer.apply([1024 * tf.constant([0.5])])
    assert float(update.grad_norm) == 0.5
    assert float(update.loss_scale) == 1024
    np.testing.assert_allclose(optimizer.variables["a"], [-0.01 * 0.5], rtol=1e-6)


def test_an_overflow_is_skipped_halves_the_scale_and_is_no_step() -> None:
    optimizer = optimizer_of([*HALF, "train.initial_loss_scale=4"], {"a": np.ones(1, np.float32)})
    update = optimizer.apply([tf.constant([math.inf])])
    assert bool(update.skipped)
    assert int(optimizer.step) == 0  # so that the schedule does not move either
    assert float(optimizer.loss_scale) == 2
    np.testing.assert_array_equal(optimizer.variables["a"], [1.0])
    for _ in range(3):
        optimizer.apply([tf.constant([math.nan])])
    assert float(optimizer.loss_scale) == 1  # never below
    assert not bool(optimizer.apply([tf.constant([1.0])]).skipped)
    assert int(optimizer.step) == 1


def test_the_scale_doubles_after_enough_finite_steps() -> None:
    optimizer = optimizer_of([*HALF, "train.initial_loss_scale=4"], {"a": np.ones(1, np.float32)})
    optimizer.finite_steps.assign(LOSS_SCALE_GROWTH_STEPS - 1)
    optimizer.apply([tf.constant([1.0])])
    assert float(optimizer.loss_scale) == 8


def test_float32_and_bfloat16_skip_too_and_scale_nothing() -> None:
    for precision in ("float32", "bfloat16"):
        optimizer = optimizer_of([f"train.precision={precision}"], {"a": np.ones(1, np.float32)})
        update = optimizer.apply([tf.constant([math.nan])])
        assert bool(update.skipped)
        assert float(optimizer.loss_scale) == 1
        np.testing.assert_array_equal(optimizer.variables["a"], [1.0])
