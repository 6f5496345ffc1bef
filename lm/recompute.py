"""Activation recomputation: keep a function's input, and compute the rest again for its backward pass.

Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost. `tf.recompute_grad` does it by a tape, which
SageMaker's model parallelism forbids, so this is by tf.gradients: for compiled functions, where all training happens.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Tuple

import tensorflow as tf


def recomputed(function: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """function(x), of which the backward pass remembers x and the variables alone.

    function: the same each time that it is called, so of dropout its masks too.
    """

    @tf.custom_gradient
    def forward(x: tf.Tensor) -> Tuple[tf.Tensor, Any]:
        def backward(upstream: tf.Tensor, variables: Optional[Sequence[tf.Variable]] = None) -> Any:
            with tf.control_dependencies([upstream]):  # not before the gradient is there, or it would be kept as well
                again = tf.identity(x)
            inputs = [again, *(variables or [])]
            of_x, *of_variables = tf.gradients(function(again), inputs, upstream)
            return of_x if variables is None else (of_x, of_variables)

        return function(x), backward

    return forward(x)
