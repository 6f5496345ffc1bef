"""Chains of elementwise operations and reductions, compiled by XLA so that each is one pass over memory.

Matrix products stay outside: on CPUs oneDNN's are faster than XLA's. A pass keeps its inputs for its gradient and
computes the rest again, which costs nothing beside reading them. docs/architecture.md has what they gain together.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional, Tuple

import tensorflow as tf

_compiles = True


def use_xla(compiles: bool) -> None:
    """Whether passes are compiled in this process from here on, or run operation by operation (train.xla=false)."""
    global _compiles
    _compiles = compiles


def _by_xla(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function, autograph=False, jit_compile=True)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled as a whole for each shape that it meets."""
    whole = _by_xla(function)
    return lambda *inputs: whole(*inputs) if _compiles else function(*inputs)


def one_pass(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """A function of tensors, not of variables, compiled; and so is its gradient, which starts from the inputs again."""

    def gradients(upstream: tf.Tensor, *inputs: tf.Tensor) -> Any:
        return tf.gradients(function(*inputs), list(inputs), upstream)

    forward, backward = _by_xla(function), _by_xla(gradients)

    @tf.custom_gradient
    def passed(*inputs: tf.Tensor) -> Tuple[tf.Tensor, Any]:
        return forward(*inputs), lambda upstream: backward(upstream, *inputs)

    return lambda *inputs: passed(*map(tf.convert_to_tensor, inputs)) if _compiles else function(*inputs)


@tf.custom_gradient
def add_bias(x_NF: tf.Tensor, bias_F: tf.Tensor) -> Tuple[tf.Tensor, Any]:
    """x + bias, which oneDNN does within the product before it. The bias's gradient is a product with a row of ones."""

    def backward(upstream_NF: tf.Tensor) -> Any:
        ones_1N = tf.ones([1, tf.shape(upstream_NF)[0]], upstream_NF.dtype)
        return upstream_NF, tf.matmul(ones_1N, upstream_NF)[0]

    return tf.nn.bias_add(x_NF, bias_F), backward


@one_pass
def gelu(x: tf.Tensor) -> tf.Tensor:
    """Hendrycks and Gimpel 2016, in the tanh form, as GPT-2; in float32."""
    return tf.cast(tf.nn.gelu(tf.cast(x, tf.float32), approximate=True), x.dtype)


@one_pass
def silu_gated(inner: tf.Tensor, gate: tf.Tensor) -> tf.Tensor:
    """inner x SiLU(gate), as in SwiGLU (Shazeer 2020); in float32."""
    product = tf.cast(inner, tf.float32) * tf.nn.silu(tf.cast(gate, tf.float32))
    return tf.cast(product, inner.dtype)


@one_pass
def causal_softmax(scores_BHTT: tf.Tensor) -> tf.Tensor:
    """Over the keys of each query, those after it left out; in float32."""
    time = tf.shape(scores_BHTT)[-1]
    future_TT = tf.range(time)[None, :] > tf.range(time)[:, None]
    masked_BHTT = tf.where(future_TT, tf.constant(-1e9), tf.cast(scores_BHTT, tf.float32))
    return tf.cast(tf.nn.softmax(masked_BHTT), scores_BHTT.dtype)


@one_pass
def cross_entropy(logits_NV: tf.Tensor, labels_N: tf.Tensor) -> tf.Tensor:
    """Negative log-likelihood of each label in nats, [N] or [B, T]; in float32."""
    logits_NV = tf.cast(logits_NV, tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels_N, logits=logits_NV)


@functools.lru_cache  # one compiled pass for all norms that are alike
def normalised(epsilon: float, centred: bool) -> Callable[..., tf.Tensor]:
    """LayerNorm (Ba et al. 2016), or RMSNorm (Zhang and Sennrich 2019) where not centred: x, scale, offset -> y.

    In float32, whatever goes in and comes out.
    """

    def norm(x_BTD: tf.Tensor, scale_D: tf.Tensor, offset_D: Optional[tf.Tensor] = None) -> tf.Tensor:
        y_BTD = tf.cast(x_BTD, tf.float32)
        if centred:
            y_BTD = y_BTD - tf.reduce_mean(y_BTD, -1, keepdims=True)
        variance_BT1 = tf.reduce_mean(tf.square(y_BTD), -1, keepdims=True)
        y_BTD = y_BTD * tf.math.rsqrt(variance_BT1 + epsilon) * scale_D
        return tf.cast(y_BTD if offset_D is None else y_BTD + offset_D, x_BTD.dtype)

    return one_pass(norm)
