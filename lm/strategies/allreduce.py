"""parallel=horovod and parallel=sdp: replicas that average their gradients, whichever library does it.

The six steps of the article stand in this order and are numbered where they happen; docs/parallelism.md has them side
by side for both libraries.
"""

from __future__ import annotations

import importlib
from typing import Any, Callable, List, NamedTuple, Tuple

import tensorflow as tf

from lm.model import named_variables
from lm.optimizer import Optimizer
from lm.plan import Plan
from lm.strategies import EvalStep, Step, Strategy, Topology, TrainStep, devices
from lm.strategies.passes import accumulated_loss, dense, summed_loss


class Reductions(NamedTuple):
    """What the two libraries call differently. A name tells one reduction from another outside a compiled step."""

    average: Callable[[tf.Tensor, str], tf.Tensor]
    total: Callable[[tf.Tensor, str], tf.Tensor]
    tape: Callable[[tf.GradientTape], Any]


def horovod(_: Any) -> AllReduce:
    """The strategy on Horovod (github.com/horovod/horovod, docs/tensorflow.rst)."""
    hvd = importlib.import_module("horovod.tensorflow")
    return AllReduce(
        hvd,
        Reductions(
            average=lambda tensor, name: hvd.allreduce(tensor, name=name),
            total=lambda tensor, name: hvd.allreduce(tensor, name=name, op=hvd.Sum),
            tape=lambda tape: hvd.DistributedGradientTape(tape, sparse_as_dense=True),
        ),
    )


def sdp(_: Any) -> AllReduce:
    """The strategy on SageMaker's data parallel library: the real one in its training images, elsewhere ours."""
    library = smdistributed("dataparallel")
    return AllReduce(
        library,
        Reductions(
            average=lambda tensor, _: library.oob_allreduce(tensor),
            total=lambda tensor, _: library.oob_allreduce(tensor) * library.size(),  # it only averages
            tape=library.DistributedGradientTape,
        ),
    )


def smdistributed(name: str) -> Any:
    """SageMaker's library where it is installed, else this project's of the same interface."""
    try:
        return importlib.import_module(f"smdistributed.{name}.tensorflow")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("smdistributed"):
            raise
        return importlib.import_module(f"lm.smdistributed_local.{name}")


def broadcast_once(step: TrainStep, backend: Any, weights: List[tf.Variable], optimizer: Optimizer) -> TrainStep:
    """The step, and after its first time rank 0's weights and optimizer state for everyone."""
    started = False

    def step_and_broadcast_once(tokens_BS: tf.Tensor, seed: tf.Tensor) -> Step:
        nonlocal started
        report = step(tokens_BS, seed)
        if not started:
            backend.broadcast_variables(weights, root_rank=0)
            backend.broadcast_variables(list(optimizer.state.values()), root_rank=0)
            started = True
        return report

    return step_and_broadcast_once


class AllReduce(Strategy):
    """One replica a process; every process holds the whole model."""

    def __init__(self, backend: Any, reduce: Reductions) -> None:
        self.backend, self.reduce = backend, reduce
        self.library: str = backend.__name__
        self.traces = 0
        backend.init()  # 1: initialise
        self.topology = Topology(
            rank=backend.rank(),
            size=backend.size(),
            local_rank=backend.local_rank(),
            local_size=backend.local_size(),
            replica=backend.rank(),
            replicas=backend.size(),
        )
        devices.take(self.topology.local_rank, self.topology.local_size)  # 2: a device of its own, by local rank

    def train_step(self, model: Any, optimizer: Optimizer, plan: Plan) -> TrainStep:
        # 3: the learning rate, scaled by the number of replicas where parallel.lr_scaling asks, is the plan's
        # peak_learning_rate, which the optimizer follows.
        weights = list(named_variables(model).values())
        reduce = self.reduce

        @tf.function(autograph=False)  # plain graph code: converting it would take longer than tracing it
        def step(tokens_BS: tf.Tensor, seed: tf.Tensor) -> Step:
            self.traces += 1  # Python runs only while TensorFlow traces
            with tf.GradientTape() as tape:
                loss = accumulated_loss(model, plan, tokens_BS, seed, optimizer.loss_scale)
            unscaled = reduce.average(loss / optimizer.loss_scale, "loss")
            tape = reduce.tape(tape)  # 4: gradients averaged
            update = optimizer.apply(dense(tape.gradient(loss, weights), weights))
            return Step(unscaled, *update)

        # 5: rank 0's weights and optimizer state, once the first step has made them all
        # 6: checkpoints come from rank 0 alone: lm.loop saves where topology.rank is 0.
        return broadcast_once(step, self.backend, weights, optimizer)

    def eval_step(self, model: Any) -> EvalStep:
        reduce = self.reduce

        @tf.function(autograph=False)  # plain graph code: converting it would take longer than tracing it
        def step(tokens_BS: tf.Tensor, weights_BT: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
            both = tf.stack(summed_loss(model, tokens_BS, weights_BT))
            total = reduce.total(both, "evaluation")
            return total[0], total[1]

        return step

    def mean(self, value: float) -> float:
        return float(self.reduce.average(tf.constant(value, tf.float64), "mean"))

    def barrier(self) -> None:
        self.reduce.average(tf.constant(0.0), "barrier")
