"""The decoder as Keras layers that run in Keras 2.6 and Keras 3 alike. It never learns how it is parallelised.

Shapes: B batch, T time, D width, H heads, K head width, F feed-forward width, V vocabulary. A tensor's name
ends in its shape: x_BTD. Weights are float32; each layer casts them to the precision that its products compute in.
Norms and softmaxes compute in float32, and logits are float32 from their product on.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, Callable, Dict, Optional

import tensorflow as tf

from lm import fused
from lm.loss import nats
from lm.recompute import recomputed
from lm.schema import Model as ModelSettings
from lm.shapes import feedforward_width, head_width, slice_tokens


def seeded_normal(seed: int, standard_deviation: float) -> Callable[[str], Callable[..., tf.Tensor]]:
    """Initialisers that depend on the run's seed and the weight's name alone: equal on every rank and version."""

    def named(name: str) -> Callable[..., tf.Tensor]:
        def initialise(shape: Any, dtype: Any = None, **_: Any) -> tf.Tensor:
            seeds = tf.constant([seed, zlib.crc32(name.encode())], tf.int64)
            return tf.random.stateless_normal(shape, seeds, stddev=standard_deviation, dtype=tf.float32)

        return initialise

    return named


class Part(tf.keras.layers.Layer):
    """A layer whose weights are named by their place in the decoder ("blocks.0.attention.qkv.kernel")."""

    def __init__(self, place: str, settings: ModelSettings, seed: int, compute: tf.DType) -> None:
        super().__init__(name=place.replace(".", "_"), dtype="float32", autocast=False)
        self.place, self.settings, self.seed, self.compute = place, settings, seed, compute

    def weight(self, name: str, *shape: int, initial: str = "normal") -> Any:
        """A float32 weight. initial: normal (0.02, as GPT-2), residual (scaled down by depth), zeros, ones."""
        full = f"{self.place}.{name}"
        deviation = 0.02 / math.sqrt(2 * self.settings.layers) if initial == "residual" else 0.02
        initializer = initial if initial in ("zeros", "ones") else seeded_normal(self.seed, deviation)(full)
        return self.add_weight(name=full, shape=shape, initializer=initializer, dtype="float32")

    def bias(self, name: str, size: int) -> Optional[Any]:
        return self.weight(name, size, initial="zeros") if self.settings.bias else None

    def project(self, x: tf.Tensor, kernel: Any, bias: Optional[Any]) -> tf.Tensor:
        """x [..., in] times kernel [in, out] plus bias, in the compute precision."""
        rows = tf.reshape(tf.cast(x, self.compute), [-1, kernel.shape[0]])  # one large product
        y = tf.matmul(rows, tf.cast(kernel, self.compute))
        if bias is not None:
            y = fused.add_bias(y, tf.cast(bias, self.compute))
        return tf.reshape(y, tf.concat([tf.shape(x)[:-1], [kernel.shape[1]]], 0))

    def drop(self, x: tf.Tensor, rate: float, seed: Optional[tf.Tensor], site: int) -> tf.Tensor:
        """Inverted dropout whose mask is a function of the seed, this layer and the site in it."""
        if seed is None or rate == 0.0:
            return x
        place = zlib.crc32(f"{self.place}.{site}".encode())
        uniform = tf.random.stateless_uniform(tf.shape(x), seed + tf.constant([place, 0], tf.int64))
        return tf.where(uniform >= rate, x / tf.cast(1.0 - rate, x.dtype), tf.zeros_like(x))


class Norm(Part):
    """LayerNorm or RMSNorm, its scale and, of the first, its offset."""

    def __init__(self, place: str, settings: ModelSettings, seed: int, compute: tf.DType) -> None:
        super().__init__(place, settings, seed, compute)
        self.scale = self.weight("scale", settings.width, initial="ones")
        centred = settings.norm == "layernorm"
        self.offset = self.weight("bias", settings.width, initial="zeros") if centred else None
        self.normalise = fused.normalised(settings.norm_epsilon, centred)

    def call(self, x_BTD: tf.Tensor) -> tf.Tensor:
        weights = [self.scale] if self.offset is None else [self.scale, self.offset]
        return self.normalise(x_BTD, *map(tf.convert_to_tensor, weights))


def rotate(x_BHTK: tf.Tensor) -> tf.Tensor:
    """Rotary positions (Su et al. 2021, equation 34) on halves: pair i is (x[i], x[i + K/2])."""
    width = x_BHTK.shape[-1]
    frequencies = 10000.0 ** (-tf.range(0, width, 2, dtype=tf.float32) / width)
    angles_TK = tf.range(tf.shape(x_BHTK)[2], dtype=tf.float32)[:, None] * frequencies[None, :]
    cos, sin = tf.cast(tf.cos(angles_TK), x_BHTK.dtype), tf.cast(tf.sin(angles_TK), x_BHTK.dtype)
    first, second = tf.split(x_BHTK, 2, axis=-1)
    return tf.concat([first * cos - second * sin, first * sin + second * cos], -1)


class Attention(Part):
    """Causal multi-head attention (Vaswani et al. 2017, section 3.2.2), one product for Q, K and V."""

    def __init__(self, place: str, settings: ModelSettings, seed: int, compute: tf.DType) -> None:
        super().__init__(place, settings, seed, compute)
        self.heads, self.head_width = settings.heads, head_width(settings)
        projected = self.heads * self.head_width
        self.qkv_kernel = self.weight("qkv.kernel", settings.width, 3 * projected)
        self.qkv_bias = self.bias("qkv.bias", 3 * projected)
        self.output_kernel = self.weight("output.kernel", projected, settings.width, initial="residual")
        self.output_bias = self.bias("output.bias", settings.width)

    def call(self, x_BTD: tf.Tensor, seed: Optional[tf.Tensor] = None) -> tf.Tensor:
        batch, time = tf.shape(x_BTD)[0], tf.shape(x_BTD)[1]
        qkv = self.project(x_BTD, self.qkv_kernel, self.qkv_bias)
        qkv = tf.reshape(qkv, [batch, time, 3, self.heads, self.head_width])
        q_BHTK, k_BHTK, v_BHTK = tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]))
        if self.settings.positions == "rotary":
            q_BHTK, k_BHTK = rotate(q_BHTK), rotate(k_BHTK)
        q_BHTK *= tf.cast(1.0 / math.sqrt(self.head_width), self.compute)
        weights_BHTT = fused.causal_softmax(tf.matmul(q_BHTK, k_BHTK, transpose_b=True))
        weights_BHTT = self.drop(weights_BHTT, self.settings.attention_dropout, seed, 0)
        mixed_BHTK = tf.matmul(weights_BHTT, v_BHTK)
        mixed = tf.reshape(tf.transpose(mixed_BHTK, [0, 2, 1, 3]), [batch, time, self.heads * self.head_width])
        return self.project(mixed, self.output_kernel, self.output_bias)


class FeedForward(Part):
    """Two matrices with GELU (tanh form, as GPT-2), ReLU, or SwiGLU (Shazeer 2020) between them."""

    def __init__(self, place: str, settings: ModelSettings, seed: int, compute: tf.DType) -> None:
        super().__init__(place, settings, seed, compute)
        inner = feedforward_width(settings)
        self.gated = settings.activation == "swiglu"
        self.input_kernel = self.weight("input.kernel", settings.width, inner)
        self.input_bias = self.bias("input.bias", inner)
        if self.gated:
            self.gate_kernel = self.weight("gate.kernel", settings.width, inner)
            self.gate_bias = self.bias("gate.bias", inner)
        self.output_kernel = self.weight("output.kernel", inner, settings.width, initial="residual")
        self.output_bias = self.bias("output.bias", settings.width)

    def call(self, x_BTD: tf.Tensor) -> tf.Tensor:
        inner_BTF = self.project(x_BTD, self.input_kernel, self.input_bias)
        if self.gated:
            inner_BTF = fused.silu_gated(inner_BTF, self.project(x_BTD, self.gate_kernel, self.gate_bias))
        elif self.settings.activation == "relu":
            inner_BTF = tf.nn.relu(inner_BTF)
        else:
            inner_BTF = fused.gelu(inner_BTF)
        return self.project(inner_BTF, self.output_kernel, self.output_bias)


class Block(Part):
    """Attention and a feed-forward layer, each a residual branch; norms before the branch or after the sum."""

    def __init__(self, place: str, settings: ModelSettings, seed: int, compute: tf.DType) -> None:
        super().__init__(place, settings, seed, compute)
        self.norm_1 = Norm(f"{place}.norm_1", settings, seed, compute)
        self.attention = Attention(f"{place}.attention", settings, seed, compute)
        self.norm_2 = Norm(f"{place}.norm_2", settings, seed, compute)
        self.feedforward = FeedForward(f"{place}.feedforward", settings, seed, compute)

    def call(self, x_BTD: tf.Tensor, seed: Optional[tf.Tensor] = None) -> tf.Tensor:
        if self.settings.recompute == "block":
            return recomputed(lambda x_BTD: self.branches(x_BTD, seed), x_BTD)
        return self.branches(x_BTD, seed)

    def branches(self, x_BTD: tf.Tensor, seed: Optional[tf.Tensor]) -> tf.Tensor:
        rate = self.settings.dropout
        if self.settings.norm_placement == "pre":
            x_BTD += self.drop(self.attention(self.norm_1(x_BTD), seed), rate, seed, 1)
            x_BTD += self.drop(self.feedforward(self.norm_2(x_BTD)), rate, seed, 2)
            return x_BTD
        x_BTD = self.norm_1(x_BTD + self.drop(self.attention(x_BTD, seed), rate, seed, 1))
        return self.norm_2(x_BTD + self.drop(self.feedforward(x_BTD), rate, seed, 2))


class Embedding(Part):
    """Token embeddings, learned positions added; the head's matrix too where the two are tied."""

    def __init__(self, settings: ModelSettings, vocabulary: int, seed: int, compute: tf.DType) -> None:
        super().__init__("embedding", settings, seed, compute)
        self.tokens = self.weight("tokens", vocabulary, settings.width)
        learned = settings.positions == "learned"
        self.positions = self.weight("positions", settings.context, settings.width) if learned else None

    def call(self, tokens_BT: tf.Tensor, seed: Optional[tf.Tensor] = None) -> tf.Tensor:
        x_BTD = tf.gather(tf.convert_to_tensor(self.tokens), tokens_BT)
        if self.positions is not None:
            x_BTD += tf.convert_to_tensor(self.positions)[: tf.shape(tokens_BT)[1]]
        return tf.cast(self.drop(x_BTD, self.settings.embedding_dropout, seed, 0), self.compute)


class Head(Part):
    """Logits in float32, by the embedding's matrix where tied, else by a dense layer of its own; or the loss."""

    def __init__(self, settings: ModelSettings, vocabulary: int, seed: int, compute: tf.DType) -> None:
        super().__init__("head", settings, seed, compute)
        tied = settings.tied_head
        self.vocabulary = vocabulary
        self.kernel = None if tied else self.weight("kernel", settings.width, vocabulary)
        self.offset = None if tied else self.bias("bias", vocabulary)

    def call(self, x_BTD: tf.Tensor, embedding_VD: tf.Tensor, labels_BT: Optional[tf.Tensor] = None) -> tf.Tensor:
        """Logits [B, T, V]; with labels, the nats of each, [B, T]: then no more logits exist than lm.loss allows."""
        rows_ND = tf.reshape(x_BTD, [-1, self.settings.width])
        weights = [embedding_VD] if self.kernel is None else [self.kernel, self.offset]
        weights = [tf.cast(weight, self.compute) for weight in weights if weight is not None]
        if labels_BT is None:
            shape = tf.concat([tf.shape(x_BTD)[:-1], [self.vocabulary]], 0)
            return tf.cast(tf.reshape(self.logits(rows_ND, *weights), shape), tf.float32)
        labels_N = tf.reshape(labels_BT, [-1])
        nats_N = nats(self.logits, rows_ND, weights, labels_N, slice_tokens(self.vocabulary))
        return tf.reshape(nats_N, tf.shape(labels_BT))

    def logits(self, rows_ND: tf.Tensor, matrix: tf.Tensor, offset_V: Optional[tf.Tensor] = None) -> tf.Tensor:
        """[N, V], in the compute precision. matrix: [V, D] where tied, else [D, V]."""
        logits_NV = tf.matmul(tf.cast(rows_ND, self.compute), matrix, transpose_b=self.kernel is None)
        return logits_NV if offset_V is None else tf.nn.bias_add(logits_NV, offset_V)


class Decoder(tf.keras.Model):
    """A GPT-style decoder: tokens in, logits out; or, with labels, their loss.

    settings: its shape. vocabulary: the number of token ids. seed: of its initial weights.
    precision: float32, bfloat16 or float16, of matrix products and what flows between them.
    """

    def __init__(self, settings: ModelSettings, vocabulary: int, seed: int, precision: str) -> None:
        super().__init__(name="decoder")
        compute = tf.as_dtype(precision)
        self.embedding = Embedding(settings, vocabulary, seed, compute)
        self.blocks = [Block(f"blocks.{i}", settings, seed, compute) for i in range(settings.layers)]
        pre = settings.norm_placement == "pre"
        self.final_norm = Norm("final_norm", settings, seed, compute) if pre else None
        self.head = Head(settings, vocabulary, seed, compute)

    def call(
        self, tokens_BT: tf.Tensor, seed: Optional[tf.Tensor] = None, labels_BT: Optional[tf.Tensor] = None
    ) -> tf.Tensor:
        """Logits [B, T, V], or with labels the nats of each [B, T], in float32.

        seed: two int64 that fix the dropout masks; None: no dropout.
        """
        x_BTD = self.embedding(tokens_BT, seed)
        for block in self.blocks:
            x_BTD = block(x_BTD, seed)
        if self.final_norm is not None:
            x_BTD = self.final_norm(x_BTD)
        return self.head(x_BTD, tf.convert_to_tensor(self.embedding.tokens), labels_BT)


def named_variables(model: tf.keras.Model) -> Dict[str, tf.Variable]:
    """The model's weights as plain TensorFlow variables, by their place in the decoder.

    Keras 3 wraps a variable and keeps its name as it was given; Keras 2 has the variable itself, its name
    within scopes and with an output number.
    """
    named = {}
    for weight in model.trainable_variables:
        variable = weight if isinstance(weight, tf.Variable) else weight.value
        named[weight.name.split("/")[-1].split(":")[0]] = variable
    assert len(named) == len(model.trainable_variables), "two weights share a name"
    return named
