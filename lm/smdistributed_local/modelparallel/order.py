"""The order of the microbatches' passes: interleaved bounds how many are alive, simple has all forward passes first.

TensorFlow's executor runs whatever is ready, so an order is control dependencies and nothing else.
"""

from __future__ import annotations

from typing import Any, List

import tensorflow as tf

from lm.smdistributed_local.modelparallel.parameters import Parameters


class Order:
    """The passes of one step, as they are traced."""

    def __init__(self, parameters: Parameters) -> None:
        self.simple = parameters.pipeline == "simple"
        self.alive = parameters.partitions
        self.results: List[List[tf.Tensor]] = []  # of each microbatch: losses, gradients
        self.outputs: List[tf.Tensor] = []  # of the model
        self.backward_begins: List[tf.Operation] = []

    def before_next(self) -> List[tf.Tensor]:
        """What the next microbatch waits for: interleaved, the results of the one that must be over by then."""
        number = len(self.results)
        return [] if self.simple or number < self.alive else self.results[number - self.alive]

    def done(self, results: Any) -> None:
        """Takes what a microbatch gave."""
        self.results.append([one for one in tf.nest.flatten(results) if tf.is_tensor(one)])

    def forward_done(self, output: tf.Tensor) -> tf.Tensor:
        """The model's output, and through it the beginning of its backward pass."""
        if not self.simple:
            return output

        @tf.custom_gradient
        def noted(output: tf.Tensor) -> Any:
            def backward(upstream: tf.Tensor) -> tf.Tensor:
                begun = tf.identity(upstream)
                self.backward_begins.append(begun.op)
                return begun

            return tf.identity(output), backward

        self.outputs.append(output)
        with tf.device(output.device):
            return noted(output)

    def close(self) -> None:
        """Has every backward pass wait for all forward passes, which have all been traced by now."""
        for operation in self.backward_begins:
            operation._add_control_inputs([output.op for output in self.outputs])
