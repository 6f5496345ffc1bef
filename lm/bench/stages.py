"""One arrangement of `lm bench pipeline`, in a process of its own: each stage alone on a core, then all as a pipeline.

python -m lm.bench.stages SETTINGS, a JSON object as lm.bench.pipeline makes it; prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Set

import tensorflow as tf

from lm import strategies
from lm.compose import compose
from lm.model import Decoder, named_variables
from lm.strategies.passes import dense

ROUNDS = 7
SEQUENCES = 4  # of a microbatch
SHAPE = [ "model.width=256", "model.heads=4", "model.context=128", "dataset.vocabulary_size=1024"]


class Arrangement:
    """A model in partitions, and the compiled functions whose times are compared."""

    def __init__(self, layers: int, partitions: int, microbatches: int, pipeline: str, hosts: List[str]) -> None:
        batch = SEQUENCES * microbatches
        config = compose(
            [
                *SHAPE,
                f"model.layers={layers}",
                "model.tied_head=false",
                "parallel=smp",
                f"parallel.partitions={partitions}",
                f"parallel.microbatches={microbatches}",
                f"parallel.pipeline={pipeline}",
                "parallel.optimize=speed",
                f"train.global_batch_sequences={batch}",
                f"cluster.hosts=[{','.join(hosts)}]",
            ]
        )
        strategy: Any = strategies.load(config)
        self.smp, self.microbatches, self.devices = strategy.smp, microbatches, strategy.partition_devices
        self.model = strategy.model(lambda: Decoder(config.model, config.dataset.vocabulary_size, 0, "float32"))
        self.decoder = self.model.decoder
        self.weights = list(named_variables(self.model).values())
        self.tokens_BS = tf.random.stateless_uniform([batch, 129], [0, 0], 0, 1024, tf.int32)
        self.hidden_BTD = tf.random.stateless_normal([SEQUENCES, 128, 256], [0, 0])

    def pipeline(self) -> Callable[[], tf.Tensor]:
        """A step's passes without its update."""

        @self.smp.step
        def passes(tokens_BS: tf.Tensor) -> Any:
            loss = tf.reduce_mean(self.model(tokens_BS[:, :-1], None, tokens_BS[:, 1:]))
            return loss, dense(tf.gradients(loss, self.weights), self.weights)

        @tf.function(autograph=False)
        def step(tokens_BS: tf.Tensor) -> tf.Tensor:
            losses, gradients = passes(tokens_BS)
            return losses.reduce_mean() + _all_of([gradient.accumulate() for gradient in gradients])

        return lambda: step(self.tokens_BS)

    def alone(self, stage: int) -> Callable[[], tf.Tensor]:
        """The passes of one stage for all microbatches, its input and its output's gradient given."""
        decoder, device = self.decoder, self.devices[stage]
        weights = [weight for weight in self.weights if weight.device == device]
        blocks = [block for block in decoder.blocks if named_device(block) == device]
        first, last = stage == 0, stage == len(self.devices) - 1

        @tf.function(autograph=False)
        def step(tokens_BS: tf.Tensor, hidden_BTD: tf.Tensor) -> tf.Tensor:
            sums: List[tf.Tensor] = []
            for tokens in tf.split(tokens_BS, self.microbatches):
                with tf.device(device), tf.control_dependencies(sums):
                    given_BTD = tf.identity(hidden_BTD)
                    x_BTD = decoder.embedding(tokens[:, :-1]) if first else given_BTD
                    for block in blocks:
                        x_BTD = block(x_BTD)
                    if last:
                        x_BTD = decoder.head(decoder.final_norm(x_BTD), decoder.embedding.tokens, tokens[:, 1:])
                    inputs = weights if first else [*weights, given_BTD]
                    gradients = dense(tf.gradients(x_BTD, inputs), inputs)
                    sums = [a + b for a, b in zip(sums, gradients)] if sums else gradients
            return _all_of(sums)

        return lambda: step(self.tokens_BS, self.hidden_BTD)

    def crossing(self) -> Callable[[], tf.Tensor]:
        """An activation's way through all stages and back, once a microbatch, one after the other."""

        @tf.function(autograph=False)
        def step(x_BTD: tf.Tensor) -> tf.Tensor:
            for _ in range(self.microbatches):
                for device in [*self.devices, *reversed(self.devices)]:
                    with tf.device(device):
                        x_BTD = x_BTD + 1.0  # an operation, or the way would be cut short
            return tf.reduce_sum(x_BTD)

        return lambda: step(self.hidden_BTD)


def _all_of(tensors: List[tf.Tensor]) -> tf.Tensor:
    """A number that needs all of them: TensorFlow leaves out what only a control dependency asks for."""
    numbers = []
    for tensor in tensors:
        with tf.device(tensor.device):
            numbers.append(tf.reduce_sum(tensor))
    return tf.add_n(numbers)


def named_device(layer: Any) -> str:
    """Where a layer's weights are."""
    device: str = next(iter(named_variables(layer).values())).device
    return device


def measure(settings: Dict[str, Any]) -> Dict[str, Any]:
    """Seconds a microbatch of each stage alone and of crossing, and seconds a step of the pipeline: medians."""
    partitions, hosts = settings["partitions"], settings["hosts"]
    cores = sorted(os.sched_getaffinity(0))[:partitions]
    if not hosts:  # every operation on one thread, and a thread for each stage
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(partitions)
    arrangement = Arrangement(**settings)
    stages = [arrangement.alone(stage) for stage in range(partitions)]
    pipeline, crossing = arrangement.pipeline(), arrangement.crossing()
    found: Dict[str, List[Any]] = {"stages": [], "pipeline": [], "crossing": []}
    for _ in range(ROUNDS + 1):
        alone = []
        for core, stage in zip(cores, stages):
            _pin({core} if not hosts else set(cores))
            alone.append(_seconds(stage) / settings["microbatches"])
        _pin(set(cores))
        found["stages"].append(alone)
        found["pipeline"].append(_seconds(pipeline))
        found["crossing"].append(_seconds(crossing) / settings["microbatches"])
    return {
        "stages": [statistics.median(stage) for stage in zip(*found["stages"][1:])],  # the first round compiles
        "pipeline": statistics.median(found["pipeline"][1:]),
        "crossing": statistics.median(found["crossing"][1:]),
        "crossing_bytes": arrangement.hidden_BTD.shape.num_elements() * 4,
    }


def _seconds(work: Callable[[], tf.Tensor]) -> float:
    begun = time.perf_counter()
    work().numpy()
    return time.perf_counter() - begun


def _pin(cores: Set[int]) -> None:
    """Keeps every thread of this process on some cores (sched_setaffinity(2) is a thread's)."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
