"""How a model is trained in parallel: the protocol, the table of names, and loading one.

A strategy builds the step functions, because SageMaker's model parallelism leaves no other seam: inside its step
there is no tape, and a model may be called nowhere else.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Callable, Dict, NamedTuple, Optional, Protocol

import tensorflow as tf

from lm.optimizer import Optimizer
from lm.plan import Plan

STRATEGIES = {
    "single": "lm.strategies.single:Single",
    "horovod": "lm.strategies.allreduce:horovod",
    "sdp": "lm.strategies.allreduce:sdp",
    "smp": "lm.strategies.smp:ModelParallel",
}


@dataclass(frozen=True)
class Topology:
    """Where this process stands. A replica trains on its own sequences; ranks of one replica share them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    replica: int = 0
    replicas: int = 1


class Step(NamedTuple):
    """What a training step reports, each a scalar, equal on every rank."""

    loss: tf.Tensor  # mean nats a token over the global batch
    grad_norm: tf.Tensor
    learning_rate: tf.Tensor
    loss_scale: tf.Tensor
    skipped: tf.Tensor


# tokens_BS (S = T + 1), dropout seed (two int64) -> Step
TrainStep = Callable[[tf.Tensor, tf.Tensor], Step]
# tokens_BS, weights_BT -> loss sum in nats, number of tokens; of all replicas together
EvalStep = Callable[[tf.Tensor, tf.Tensor], "tuple[tf.Tensor, tf.Tensor]"]


class Strategy(Protocol):
    """One way to train in parallel."""

    topology: Topology
    library: str  # the module that processes talk through, or why there is none
    traces: int  # how often the training step was traced: once, or something is wrong

    def model(self, build: Callable[[], Any]) -> Any:
        """Builds the model where it belongs, every weight made."""

    def logits(self, model: Any) -> Optional[Any]:
        """The model as tokens in, logits out, for sampling; None where no process can call it alone."""

    def train_step(self, model: Any, optimizer: Optimizer, plan: Plan) -> TrainStep:
        """The compiled step on this replica's sequences."""

    def eval_step(self, model: Any) -> EvalStep:
        """The compiled evaluation of this replica's sequences, summed over the replicas."""

    def variables(self, model: Any, optimizer: Optimizer) -> Dict[str, tf.Variable]:
        """All that a checkpoint holds, by name: weights and the optimizer's state."""

    def mean(self, value: float) -> float:
        """The mean of a number over all ranks; every rank calls it."""

    def barrier(self) -> None:
        """Returns when every rank has come here."""


def load(parallel: Any) -> Strategy:
    """The strategy of a configuration's parallel section, its backend imported only now and initialised.

    Raises ModuleNotFoundError where the backend is not installed.
    """
    module, _, attribute = STRATEGIES[parallel.name].partition(":")
    return getattr(importlib.import_module(module), attribute)(parallel)
