"""parallel=smp: the layers of a model on several devices, microbatches pipelined through them; replicas by Horovod.

SageMaker's model parallel library in its training images, elsewhere ours of the same interface. Its six steps are
numbered where they happen; docs/parallelism.md has them beside the others'.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any, Callable, List, Optional, Tuple

import tensorflow as tf

from lm import fused
from lm.model import named_variables
from lm.optimizer import Optimizer
from lm.plan import Plan
from lm.schema import Config, Smp
from lm.smdistributed_local.modelparallel import state as double
from lm.smdistributed_local.modelparallel.devices import HOSTS, peak_bytes, with_hardware_of_their_own
from lm.smdistributed_local.modelparallel.parameters import VARIABLE
from lm.strategies import EvalStep, Step, Strategy, Topology, TrainStep, devices
from lm.strategies.allreduce import broadcast_once, smdistributed
from lm.strategies.passes import dense

PARAMETERS = ("partitions", "microbatches", "pipeline", "optimize", "placement_strategy", "auto_partition", "horovod")


class ModelParallel(Strategy):
    """Replicas whose layers lie on `partitions` devices each."""

    def __init__(self, config: Config) -> None:
        self.parallel: Smp = config.parallel
        parallel = self.parallel
        self.traces = 0
        self.smp = smdistributed("modelparallel")
        self.library: str = self.smp.__name__
        # On SageMaker each GPU has a process, and the launcher gives the job its parameters. Here one process drives
        # all partitions of its replica.
        self.ours = self.library.startswith("lm.")
        if self.ours:
            parameters = {name: getattr(parallel, name) for name in PARAMETERS}
            os.environ[VARIABLE] = json.dumps({**parameters, "default_partition": 0})
            os.environ[HOSTS] = ",".join(config.cluster.hosts)
            devices.share_cores(int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")))
        smp = self.smp
        smp.init()  # 1: initialise; Horovod too, in hybrid mode
        self.hvd = importlib.import_module("horovod.tensorflow") if parallel.horovod else None
        if self.ours:
            self.partition_devices = double.current().devices
            self.devices = with_hardware_of_their_own(self.partition_devices)
        else:
            fused.use_xla(False)  # SageMaker's library partitions a graph of operations, and is silent about XLA
            devices.take(smp.local_rank(), smp.local_size())  # 2: a device of its own, by local rank
        self.topology = Topology(
            rank=smp.dp_rank() if self.ours else smp.rank(),
            size=smp.dp_size() if self.ours else smp.size(),
            local_rank=smp.local_rank(),
            local_size=smp.local_size(),
            replica=smp.dp_rank(),  # the ranks of a replica read the same sequences
            replicas=smp.dp_size(),
        )

    def model(self, build: Callable[[], Any]) -> Any:
        model = _distributed(self.smp, build(), self.parallel)  # 3: the model is a DistributedModel
        # The first step partitions the model. It is one without consequences, so that the optimizer is made, and a
        # checkpoint restored, for the partitioned model.
        sequences = self.parallel.microbatches
        self.eval_step(model)(tf.zeros([sequences, 3], tf.int32), tf.zeros([sequences, 2]))
        return model

    def logits(self, model: Any) -> Optional[Any]:
        if not self.ours:  # every rank would have to call it
            return None

        @self.smp.step(non_split_inputs=["tokens_BT"])
        def logits_of(tokens_BT: tf.Tensor) -> tf.Tensor:
            return model(tokens_BT)

        return lambda tokens_BT: logits_of(tokens_BT).outputs[0]  # the microbatches are alike

    def stage_peak_bytes(self) -> List[int]:
        peaks = [peak_bytes(device) for device in self.partition_devices] if self.ours else []
        return [] if None in peaks else [peak for peak in peaks if peak is not None]

    def train_step(self, model: Any, optimizer: Optimizer, plan: Plan) -> TrainStep:
        weights = list(named_variables(model).values())

        @self.smp.step(non_split_inputs=["run_seed", "loss_scale"])  # 4: what runs once a microbatch
        def forward_and_backward(
            tokens_BS: tf.Tensor, sequences_B: tf.Tensor, run_seed: tf.Tensor, loss_scale: tf.Tensor
        ) -> Tuple[tf.Tensor, List[tf.Tensor]]:
            nats_BT = model(tokens_BS[:, :-1], tf.stack([run_seed, sequences_B[0]]), tokens_BS[:, 1:])
            loss = tf.reduce_mean(nats_BT) * loss_scale
            return loss, dense(self._gradients(loss, weights), weights)

        @tf.function(autograph=False)  # plain graph code: converting it would take longer than tracing it
        def step(tokens_BS: tf.Tensor, seed: tf.Tensor) -> Step:
            self.traces += 1  # Python runs only while TensorFlow traces
            sequences_B = seed[1] + tf.range(tokens_BS.shape[0], dtype=tf.int64)
            scale = tf.identity(optimizer.loss_scale)
            losses, gradients = forward_and_backward(tokens_BS, sequences_B, seed[0], scale)
            # 5: accumulation, averages over the replicas, clipping and the update come after the step
            loss = self._average(losses.reduce_mean() / scale, "loss")
            accumulated = [self._average(gradient.accumulate()) for gradient in gradients]
            return Step(loss, *optimizer.apply(accumulated))

        # 6: checkpoints come from one replica alone: lm.loop saves where topology.rank is 0.
        return step if self.hvd is None else broadcast_once(step, self.hvd, weights, optimizer)

    def eval_step(self, model: Any) -> EvalStep:
        @self.smp.step
        def nats_and_tokens(tokens_BS: tf.Tensor, weights_BT: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
            nats_BT = model(tokens_BS[:, :-1], labels_BT=tokens_BS[:, 1:])
            return tf.reduce_sum(nats_BT * weights_BT), tf.reduce_sum(weights_BT)

        @tf.function(autograph=False)  # plain graph code: converting it would take longer than tracing it
        def step(tokens_BS: tf.Tensor, weights_BT: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
            nats, tokens = nats_and_tokens(tokens_BS, weights_BT)
            both = tf.stack([nats.reduce_sum(), tokens.reduce_sum()])
            total = both if self.hvd is None else self.hvd.allreduce(both, op=self.hvd.Sum, name="evaluation")
            return total[0], total[1]

        return step

    def mean(self, value: float) -> float:
        return float(self._average(tf.constant(value, tf.float64), "mean"))

    def barrier(self) -> None:
        self.smp.barrier()

    def _gradients(self, loss: tf.Tensor, weights: List[tf.Variable]) -> List[Any]:
        """What the library documents for inside a step, an optimizer's get_gradients; here tf.gradients, which it is.

        Keras 3 has no get_gradients, and that of Keras 2 would leave backward operations without their partition.
        """
        if self.ours or not hasattr(tf.keras.optimizers.SGD, "get_gradients"):
            return tf.gradients(loss, weights)
        return tf.keras.optimizers.SGD().get_gradients(loss, weights)

    def _average(self, tensor: tf.Tensor, name: Optional[str] = None) -> tf.Tensor:
        """Over the replicas."""
        return tensor if self.hvd is None else self.hvd.allreduce(tensor, name=name)


def _distributed(smp: Any, decoder: Any, parallel: Smp) -> Any:
    """The decoder as a DistributedModel. With labels it gives nats [B, T]: logits would go to every rank."""

    class Distributed(smp.DistributedModel):
        def __init__(self) -> None:
            super().__init__(name="distributed")
            self.decoder = decoder

        def call(
            self, tokens_BT: tf.Tensor, seed: Optional[tf.Tensor] = None, labels_BT: Optional[tf.Tensor] = None
        ) -> tf.Tensor:
            if parallel.auto_partition:
                return self.decoder(tokens_BT, seed, labels_BT)
            parts, last = len(self.decoder.blocks), parallel.partitions - 1
            with smp.partition(0):
                x_BTD = self.decoder.embedding(tokens_BT, seed)
            for number, block in enumerate(self.decoder.blocks):
                with smp.partition(number * parallel.partitions // parts):
                    x_BTD = block(x_BTD, seed)
            with smp.partition(last):
                if self.decoder.final_norm is not None:
                    x_BTD = self.decoder.final_norm(x_BTD)
                return self.decoder.head(x_BTD, tf.convert_to_tensor(self.decoder.embedding.tokens), labels_BT)

    return Distributed()
