"""Feeds batches of a prepared dataset through tf.data, in the stateless order.

Shapes: B batch, S = T + 1 tokens of a sequence: T inputs and T labels that overlap.
"""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np
import tensorflow as tf

from lm.data.order import CHUNK_BYTES, Order
from lm.data.shards import TokenStream

WINDOWS_AHEAD = 2  # read while another is consumed
BATCHES_AHEAD = 8


class SequenceReader:
    """A split as sequences: sequence i is tokens [i T, i T + T], so that no label is lost between neighbours."""

    def __init__(self, stream: TokenStream, context: int, seed: int) -> None:
        self.stream, self.context = stream, context
        sequence_bytes = context * stream.dtype.itemsize
        self.order = Order((stream.tokens - 1) // context, seed, -(-CHUNK_BYTES // sequence_bytes))

    def window(self, window: int) -> np.ndarray[Any, Any]:
        """The sequences [n, S] of one window in the order of consumption; one read a chunk."""
        chunks = []
        for chunk in self.order.window_chunk_ids(window):
            first, end = self.order.chunk_range(int(chunk))
            tokens = self.stream.read(first * self.context, (end - first) * self.context + 1)
            chunks.append(overlapping(tokens, self.context))
        lying = np.concatenate(chunks)
        return lying[self.order.within_window(window, len(lying))]


def training_batches(
    reader: SequenceReader, position: int, global_batch_sequences: int, replica: int, replicas: int
) -> tf.data.Dataset:
    """This replica's share of every global batch from a position on, without end: int32 [B, S].

    position: sequences consumed so far. Global batch n is the same set of sequences for any number of replicas.
    """
    first_window, offset = reader.order.locate(position)
    share = global_batch_sequences // replicas

    def read(window: tf.Tensor) -> tf.Tensor:
        sequences = tf.numpy_function(lambda w: reader.window(int(w)), [window], _tf_dtype(reader))
        sequences.set_shape([None, reader.context + 1])
        return sequences

    def take_share(batch: tf.Tensor) -> tf.Tensor:
        return tf.cast(batch[replica * share : (replica + 1) * share], tf.int32)

    windows = tf.data.Dataset.range(first_window, np.iinfo(np.int64).max)
    sequences = windows.map(read, num_parallel_calls=WINDOWS_AHEAD, deterministic=True).unbatch().skip(offset)
    batches = sequences.batch(global_batch_sequences, drop_remainder=True)
    return batches.map(take_share).prefetch(BATCHES_AHEAD)


def evaluation_batches(
    stream: TokenStream, context: int, batch_sequences: int, replica: int, replicas: int
) -> tf.data.Dataset:
    """Every token of a split but its first as a label, once: int32 [B, S] and float32 weights [B, T].

    All replicas get the same number of batches; what is missing at the end is padding of weight 0.
    """
    labels = stream.tokens - 1
    sequences = -(-labels // context)
    steps = -(-sequences // (batch_sequences * replicas))

    def batch(step: np.int64) -> Tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        first = (int(step) * replicas + replica) * batch_sequences
        count = max(0, min(batch_sequences * context, labels - first * context))
        tokens = np.zeros(batch_sequences * context + 1, np.int32)
        if count:
            tokens[: count + 1] = stream.read(first * context, count + 1)
        weights = (np.arange(batch_sequences * context) < count).astype(np.float32)
        return overlapping(tokens, context).copy(), weights.reshape(batch_sequences, context)

    def read(step: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        tokens, weights = tf.numpy_function(batch, [step], [tf.int32, tf.float32])
        tokens.set_shape([batch_sequences, context + 1])
        weights.set_shape([batch_sequences, context])
        return tokens, weights

    return tf.data.Dataset.range(steps).map(read).prefetch(2)


def overlapping(tokens: np.ndarray[Any, Any], context: int) -> np.ndarray[Any, Any]:
    """n T + 1 tokens as a view [n, T + 1]: the last token of a sequence is the first of the next."""
    item = tokens.dtype.itemsize
    shape = ((len(tokens) - 1) // context, context + 1)
    return np.lib.stride_tricks.as_strided(tokens, shape, (context * item, item), writeable=False)


def _tf_dtype(reader: SequenceReader) -> tf.DType:
    return tf.as_dtype(reader.stream.dtype.newbyteorder("="))
