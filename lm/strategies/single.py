"""parallel=single: one process, and the reference that every other strategy must agree with."""

from __future__ import annotations

from typing import Any, Tuple

import tensorflow as tf

from lm.model import named_variables
from lm.optimizer import Optimizer
from lm.plan import Plan
from lm.strategies import EvalStep, Step, Strategy, Topology, TrainStep, devices
from lm.strategies.passes import accumulated_loss, dense, summed_loss


class Single(Strategy):
    """One process, one replica."""

    library = "one process"

    def __init__(self, _: Any) -> None:
        self.topology = Topology()
        self.traces = 0
        devices.take(local_rank=0, local_size=1)

    def train_step(self, model: Any, optimizer: Optimizer, plan: Plan) -> TrainStep:
        weights = list(named_variables(model).values())

        @tf.function(autograph=False)  # plain graph code: converting it would take longer than tracing it
        def step(tokens_BS: tf.Tensor, seed: tf.Tensor) -> Step:
            self.traces += 1  # Python runs only while TensorFlow traces
            with tf.GradientTape() as tape:
                loss = accumulated_loss(model, plan, tokens_BS, seed, optimizer.loss_scale)
            unscaled = loss / optimizer.loss_scale  # read before the update may change the scale
            update = optimizer.apply(dense(tape.gradient(loss, weights), weights))
            return Step(unscaled, *update)

        return step

    def eval_step(self, model: Any) -> EvalStep:
        @tf.function(autograph=False)  # plain graph code: converting it would take longer than tracing it
        def step(tokens_BS: tf.Tensor, weights_BT: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
            return summed_loss(model, tokens_BS, weights_BT)

        return step

    def mean(self, value: float) -> float:
        return value

    def barrier(self) -> None:
        return
