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
        self.totals: List[List[tf.Tensor]] = []  # of losses and gradients, after each microbatch
        self.outputs: List[tf.Tensor] = []  # of the model
        self.backward_begins: List[tf.Operation] = []

    def before_next(self) -> List[tf.Tensor]:
        """What the next microbatch waits for: interleaved, the sums with the one that must be over by then.

        The sums and not the gradients themselves: TensorFlow would make one sum of all microbatches' gradients, for
        which they would all have to be there, but it leaves a sum alone that something waits for.
        """
        number = len(self.totals)
        return [] if self.simple or number < self.alive else self.totals[number - self.alive]

    def done(self, results: Any) -> None:
        """Takes what a microbatch gave, and adds it to what those before it gave."""
        flat, before = tf.nest.flatten(results), self.totals[-1] if self.totals else None
        totals = []
        for place, one in enumerate(flat):
            if isinstance(one, tf.IndexedSlices):  # a lookup's gradient
                one = tf.convert_to_tensor(one)
            if before is not None and tf.is_tensor(one) and (one.dtype.is_floating or one.dtype.is_integer):
                with tf.device(one.device):  # a gradient stays on its partition
                    one = before[place] + one
            totals.append(one)
        self.totals.append(totals)

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
