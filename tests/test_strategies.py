"""Accumulation and the single strategy: one step is the same whatever its passes, and is traced once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import tensorflow as tf
from conftest import SMALL

from lm import strategies
from lm.compose import compose
from lm.model import Decoder, named_variables
from lm.optimizer import make_optimizer
from lm.plan import make_plan
from lm.strategies import Step

TOKENS = np.random.RandomState(0).randint(0, 300, (8, 33)).astype(np.int32)


def steps(overrides: List[str], count: int = 3) -> Tuple[List[Step], Dict[str, Any], int]:
    """A few steps on the same batch: their reports, the weights after them, the number of traces."""
    config = compose([*SMALL, "dataset.vocabulary_size=300", *overrides])
    plan = make_plan(config)
    strategy = strategies.load(config)
    model = strategy.model(lambda: Decoder(config.model, 300, 0, config.train.precision))
    model(tf.zeros([1, 2], tf.int32))
    optimizer = make_optimizer(config, plan, named_variables(model))
    step = strategy.train_step(model, optimizer, plan)
    reports = [step(tf.constant(TOKENS), tf.constant([0, 8 * i], tf.int64)) for i in range(count)]
    return reports, {name: v.numpy() for name, v in named_variables(model).items()}, strategy.traces


@pytest.mark.parametrize("microbatch", [1, 2, 4])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_accumulated_microbatches_are_the_large_batch(microbatch: int, precision: str) -> None:
    """Loss and gradient norm to 1e-5 in float32; float16 keeps 11 bits, so its passes differ by some 2^-11."""
    tolerance = 1e-5 if precision == "float32" else 2e-3
    whole, weights, _ = steps([f"train.precision={precision}"])
    parts, weights_too, traces = steps([f"train.precision={precision}", f"train.microbatch_sequences={microbatch}"])
    for one, other in zip(whole, parts):
        assert float(other.loss) == pytest.approx(float(one.loss), rel=tolerance)
        assert float(other.grad_norm) == pytest.approx(float(one.grad_norm), rel=tolerance)
    if precision == "float32":
        for name in weights:
            np.testing.assert_allclose(weights_too[name], weights[name], atol=2e-5, err_msg=name)
    assert traces == 1


def test_the_loss_falls_and_the_step_is_traced_once() -> None:
    reports, _, traces = steps([], count=10)
    losses = [float(report.loss) for report in reports]
    assert losses[-1] < losses[0] - 0.5
    assert traces == 1


def test_dropout_changes_with_the_position_and_repeats_with_it() -> None:
    dropping = ["model.dropout=0.5", "optimizer.learning_rate=1e-9"]
    first, _, _ = steps(dropping)
    again, _, _ = steps(dropping)
    assert [float(report.loss) for report in first] == [float(report.loss) for report in again]
    assert len({round(float(report.loss), 4) for report in first}) == 3


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(KeyError, match="hovorod"):
        strategies.load(SimpleNamespace(parallel=SimpleNamespace(name="hovorod")))
