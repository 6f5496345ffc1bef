"""How long a step takes on this machine's processors, from two speeds of theirs that are measured in a moment.

A step is its matrix products at their own speed, and two things at the memory's: the softmaxes, of attention and of the
loss, and the weights with their gradients. `lm bench plan` holds it against measured steps.
"""

from __future__ import annotations

import time
from typing import Callable, Optional

import numpy as np

from lm.history import DRIVER, Speed, reached
from lm.plan import Plan, repeated, step_flops
from lm.schema import Config

SOFTMAX_BYTES = 96  # a score or a logit, forward and backward: their traffic, and their exponential in the same unit
WEIGHT_BYTES = 39  # a weight's gradient, moments and update
ADDED_BYTES = 12  # a weight's gradient, added to those of the passes before
ROUNDS = 5


def step_seconds(config: Config, plan: Plan, product_flops: float, copied_bytes: float) -> float:
    """Of an optimizer step. product_flops: FLOP/s of a matrix product. copied_bytes: a second, read and written."""
    model = config.model
    scores = plan.tokens_per_step * model.layers * model.heads * model.context * repeated(config)
    logits = plan.tokens_per_step * config.dataset.vocabulary_size
    a_weight = WEIGHT_BYTES + ADDED_BYTES * (plan.accumulation - 1)
    moved = SOFTMAX_BYTES * (scores + logits) + a_weight * plan.parameters * plan.replicas
    return step_flops(config, plan) / product_flops + moved / copied_bytes


def expected_here(config: Config, plan: Plan) -> Optional[Speed]:
    """The speed of a run on this machine: what earlier ones reached, else by what is measured now.

    Without an earlier run None in half precision, because NumPy has no product to measure, with GPUs, on other hosts.
    """
    past = reached(config)
    here = config.cluster.name == "local" and not any(DRIVER.glob("*"))
    if past is not None or config.train.precision != "float32" or not here:
        return past
    product, copied = product_flops(), copied_bytes()
    seconds = step_seconds(config, plan, product, copied)
    because = f"by a product's {product / 1e9:,.0f} GFLOP/s and a copy's {copied / 1e9:.1f} GB/s here, measured now"
    return Speed(plan.flops_per_token * plan.tokens_per_step / seconds, because)


def product_flops() -> float:
    """FLOP/s of NumPy's product of square float32 matrices on all cores."""
    a = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
    return 2.0 * 1024**3 / _best_seconds(lambda: a @ a)


def copied_bytes() -> float:
    """Bytes a second, read and written, of a copy too large for the caches."""
    a = np.ones(2**24, np.float32)
    b = np.empty_like(a)
    return 2.0 * a.nbytes / _best_seconds(lambda: np.copyto(b, a))


def _best_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS + 1):  # the first wakes threads and touches pages
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
