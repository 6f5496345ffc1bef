"""How a model is trained in parallel: what a strategy is, the table of names, and loading one.

A strategy builds the step functions, because SageMaker's model parallelism leaves no other seam: inside its step
there is no tape, and a model may be called nowhere else.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import tensorflow as tf

from lm.fused import use_xla
from lm.model import named_variables
from lm.optimizer import Optimizer
from lm.plan import Plan
from lm.schema import Config

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


class Strategy(ABC):
    """One way to train in parallel; what is the same wherever each process holds the whole model is here."""

    topology: Topology
    library: str  # the module that processes talk through, or why there is none
    traces: int  # how often the training step was traced: once, or something is wrong
    devices: Sequence[str] = ("",)  # of this process that compute side by side; "" is TensorFlow's own choice

    def model(self, build: Callable[[], Any]) -> Any:
        """Builds the model where it belongs, called once so that Keras has every weight of it."""
        model = build()
        model(tf.zeros([1, 2], tf.int32))
        return model

    def logits(self, model: Any) -> Optional[Any]:
        """The model as tokens in, logits out, for sampling; None where no process can call it alone."""
        return model

    def variables(self, model: Any, optimizer: Optimizer) -> Dict[str, tf.Variable]:
        """All that a checkpoint holds, by name: weights and the optimizer's state."""
        return {**named_variables(model), **optimizer.state}

    def stage_peak_bytes(self) -> List[int]:
        """The most memory that each stage's device had in use; empty where there are no stages, or one memory."""
        return []

    @abstractmethod
    def train_step(self, model: Any, optimizer: Optimizer, plan: Plan) -> TrainStep:
        """The compiled step on this replica's sequences."""

    @abstractmethod
    def eval_step(self, model: Any) -> EvalStep:
        """The compiled evaluation of this replica's sequences, summed over the replicas."""

    @abstractmethod
    def mean(self, value: float) -> float:
        """The mean of a number over all ranks; every rank calls it."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has come here."""


def load(config: Config) -> Strategy:
    """The strategy of a configuration, its backend imported only now and initialised.

    Raises ModuleNotFoundError where the backend is not installed.
    """
    module, _, attribute = STRATEGIES[config.parallel.name].partition(":")
    use_xla(config.train.xla)
    return getattr(importlib.import_module(module), attribute)(config)
