"""Feeds batches of a mixture through tf.data, in the stateless order.

Shapes: B batch, S = T + 1 tokens of a sequence: T inputs and T labels that overlap.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf

from lm.data.mixture import Mixture
from lm.data.shards import DatasetError
from lm.data.streams import TokenStream

READERS = 16  # reads at once: what hides the latency of a network file system
BATCHES_AHEAD = 8
TOKENS_A_CALL, MOST_BATCHES_A_CALL = 2**17, 64  # small batches come from Python several at once


class _Loaded(NamedTuple):
    """A block in memory: every sequence as a view [n, S] of the tokens, and which of them comes when."""

    windows: np.ndarray[Any, Any]  # [token, S]: the S tokens from each token on
    order: np.ndarray[Any, Any]  # the first token of the sequence that comes 0th, 1st, ...


class Feed:
    """Global batches of a mixture from a position on; one block is read ahead of the one that is consumed.

    context: T. position: sequences consumed so far. share: sequences of a batch that this replica takes, from
    `offset` on. Not for several threads.
    """

    def __init__(
        self, mixture: Mixture, context: int, position: int, global_batch_sequences: int, offset: int, share: int
    ) -> None:
        self.mixture, self.context = mixture, context
        self._position, self._batch = position, global_batch_sequences
        self._offset, self._share = offset, share
        self._within = (0, 0, 0)  # the block that was consumed last, its first position and the one after its last
        self._blocks: Dict[int, Future[_Loaded]] = {}
        self._loader = ThreadPoolExecutor(1, "block")
        self._readers = ThreadPoolExecutor(READERS, "read")

    def batch(self, number: int) -> np.ndarray[Any, Any]:
        """This replica's sequences of a batch: int32 [share, S]. Batches are asked for in order."""
        position = self._position + number * self._batch + self._offset
        rows: List[np.ndarray[Any, Any]] = []
        left = self._share
        while left:
            block, offset = self._place(position)
            loaded = self._loaded(block)
            first = loaded.order[offset : offset + left]
            rows.append(loaded.windows[first])
            left, position = left - len(first), position + len(first)
        whole = rows[0] if len(rows) == 1 else np.concatenate(rows)
        return whole.astype(np.int32)

    def _place(self, position: int) -> Tuple[int, int]:
        """The block of a position and the place in it."""
        block, start, end = self._within
        if not start <= position < end:
            block, offset = self.mixture.locate(position)
            start, end = position - offset, self.mixture.start(block + 1)
            self._within = (block, start, end)
        return block, position - start

    def _loaded(self, block: int) -> _Loaded:
        for wanted in (block, block + 1):
            if wanted not in self._blocks:
                self._blocks[wanted] = self._loader.submit(self._load, wanted)
        for old in [number for number in self._blocks if number < block]:
            del self._blocks[old]
        return self._blocks[block].result()

    def _load(self, block: int) -> _Loaded:
        """Reads a block: every run of sequences, and the one token after it, which is its last label."""
        runs, permutation = self.mixture.block(block)
        if not runs:  # a block of a few sequences may have none, and is never consumed then
            return _Loaded(np.empty([0, 0]), permutation)
        sizes = [run.length * self.context + 1 for _, run in runs]
        ends = np.cumsum(sizes)
        tokens = np.empty(int(ends[-1]), self.mixture.components[0].stream.dtype)
        reads = []
        starts = []
        for (component, run), size, end in zip(runs, sizes, ends):
            part = tokens[end - size : end]
            stream = self.mixture.components[component].stream
            reads.append(self._readers.submit(stream.read_into, run.first * self.context, part))
            starts.append(np.arange(run.length) * self.context + (end - size))
        for read in wait(reads).done:
            read.result()
        item = tokens.dtype.itemsize
        shape = (len(tokens) - self.context, self.context + 1)
        windows = np.lib.stride_tricks.as_strided(tokens, shape, (item, item), writeable=False)
        return _Loaded(windows, np.concatenate(starts)[permutation])


def training_batches(
    mixture: Mixture, context: int, position: int, global_batch_sequences: int, replica: int, replicas: int
) -> Iterator[tf.Tensor]:
    """This replica's share of every global batch from a position on, without end: int32 [B, S].

    position: sequences consumed so far. Global batch n is the same set of sequences for any number of replicas.
    Raises DatasetError for a damaged shard.
    """
    share = global_batch_sequences // replicas
    together = min(MOST_BATCHES_A_CALL, max(1, TOKENS_A_CALL // (share * context)))
    feed = Feed(mixture, context, position, global_batch_sequences, replica * share, share)

    faults: List[DatasetError] = []

    def several(call: np.int64) -> np.ndarray[Any, Any]:
        with _kept(faults):
            return np.stack([feed.batch(int(call) * together + number) for number in range(together)])

    def read(call: tf.Tensor) -> tf.Tensor:
        tokens_NBS = tf.numpy_function(several, [call], tf.int32)
        tokens_NBS.set_shape([together, share, context + 1])
        return tokens_NBS

    calls = tf.data.Dataset.range(np.iinfo(np.int64).max // together).map(read).prefetch(1)
    return _with_its_cause(calls.unbatch().prefetch(BATCHES_AHEAD), faults)


def evaluation_batches(
    stream: TokenStream, context: int, batch_sequences: int, replica: int, replicas: int, at_most: Optional[int] = None
) -> Iterator[Tuple[tf.Tensor, tf.Tensor]]:
    """Every token of a split but its first as a label, once: int32 [B, S] and float32 weights [B, T].

    at_most: so many sequences, evenly spread over the split, the same however they are batched; None: all of them.
    All replicas get the same number of batches; what is missing at the end is padding of weight 0.
    Raises DatasetError for a damaged shard.
    """
    labels = stream.tokens - 1
    sequences = -(-labels // context)
    chosen = sequences if at_most is None else min(sequences, at_most)
    steps = -(-chosen // (batch_sequences * replicas))
    faults: List[DatasetError] = []

    def batch(step: np.int64) -> Tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        tokens = np.zeros((batch_sequences, context + 1), np.int32)
        weights = np.zeros((batch_sequences, context), np.float32)
        first = (int(step) * replicas + replica) * batch_sequences
        for row, number in enumerate(range(first, min(first + batch_sequences, chosen))):
            begin = number * sequences // chosen * context
            count = min(context, labels - begin)
            with _kept(faults):
                tokens[row, : count + 1] = stream.read(begin, count + 1)
            weights[row, :count] = 1.0
        return tokens, weights

    def read(step: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        tokens, weights = tf.numpy_function(batch, [step], [tf.int32, tf.float32])
        tokens.set_shape([batch_sequences, context + 1])
        weights.set_shape([batch_sequences, context])
        return tokens, weights

    return _with_its_cause(tf.data.Dataset.range(steps).map(read).prefetch(2), faults)


@contextlib.contextmanager
def _kept(faults: List[DatasetError]) -> Iterator[None]:
    """Keeps a fault, of which TensorFlow would pass on the words alone."""
    try:
        yield
    except DatasetError as fault:
        faults.append(fault)
        raise


def _with_its_cause(batches: tf.data.Dataset, faults: List[DatasetError]) -> Iterator[Any]:
    try:
        yield from batches
    except tf.errors.OpError:
        if faults:
            raise faults[0] from None
        raise
