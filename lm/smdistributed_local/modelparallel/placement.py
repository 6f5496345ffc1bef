"""Where a partitioned model's variables live: on the device of their partition."""

from __future__ import annotations

from typing import Any, Dict

import tensorflow as tf


def resources(layer: Any) -> Dict[int, tf.Variable]:
    """A layer's variables by identity. Keras 3 wraps TensorFlow's, Keras 2 has them as they are."""
    return {id(one): one if isinstance(one, tf.Variable) else one.value for one in layer.variables}


def move(variable: tf.Variable, device: str) -> None:
    """Moves a variable to a device. Whoever holds it goes on holding it; functions that are compiled already do not."""
    with tf.device(device):
        there = tf.Variable(variable.read_value(), trainable=False)
    # A variable is a handle of a resource, which lies somewhere; TensorFlow 2.6 frees it by an object beside it.
    for name in ("_handle", "_handle_deleter"):
        if hasattr(variable, name):
            old = getattr(variable, name)
            setattr(variable, name, getattr(there, name))
            setattr(there, name, old)
