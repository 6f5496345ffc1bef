"""Which sequence comes when: a pure function of seed, epoch and position, the same for any number of replicas.

A split of N sequences is cut into chunks of neighbours, so that reads are large. An epoch permutes the chunks,
takes them a window at a time, and permutes the sequences within each window. A run's whole position is one
integer, the number of sequences consumed.
"""

from __future__ import annotations

import functools
from typing import Any, Tuple

import numpy as np

CHUNK_BYTES = 2**20  # a read of this size keeps a network file system busy
WINDOW_CHUNKS = 16


class Order:
    """The order of a split.

    sequences: N, at least 1. seed: of the run. chunk_sequences, window_chunks: the sizes of chunk and window.
    """

    def __init__(self, sequences: int, seed: int, chunk_sequences: int, window_chunks: int = WINDOW_CHUNKS) -> None:
        self.sequences, self.seed = sequences, seed
        self.chunk_sequences, self.window_chunks = chunk_sequences, window_chunks
        self.chunks = -(-sequences // chunk_sequences)
        self.windows_per_epoch = -(-self.chunks // window_chunks)
        self._permutation = functools.lru_cache(maxsize=2)(self._permute_chunks)

    def _permute_chunks(self, epoch: int) -> np.ndarray[Any, Any]:
        return _generator(self.seed, epoch, 0).permutation(self.chunks)

    def window_chunk_ids(self, window: int) -> np.ndarray[Any, Any]:
        """The chunks of a window, windows counted through all epochs."""
        epoch, index = divmod(window, self.windows_per_epoch)
        return self._permutation(epoch)[index * self.window_chunks : (index + 1) * self.window_chunks]

    def chunk_range(self, chunk: int) -> Tuple[int, int]:
        """First sequence of a chunk and the one after its last; the split's last chunk may be short."""
        first = chunk * self.chunk_sequences
        return first, min(first + self.chunk_sequences, self.sequences)

    def within_window(self, window: int, count: int) -> np.ndarray[Any, Any]:
        """The permutation of a window's sequences, as they lie chunk after chunk."""
        epoch, index = divmod(window, self.windows_per_epoch)
        return _generator(self.seed, epoch, index + 1).permutation(count)

    def locate(self, position: int) -> Tuple[int, int]:
        """The window that holds the position-th sequence of the run, and how many of the window come before."""
        epoch, within = divmod(position, self.sequences)
        starts = self._window_starts(epoch)
        window = int(np.searchsorted(starts, within, side="right")) - 1
        return epoch * self.windows_per_epoch + window, within - int(starts[window])

    def _window_starts(self, epoch: int) -> np.ndarray[Any, Any]:
        """Where in the epoch each window begins: all windows are full but the last and the short chunk's."""
        starts = np.arange(self.windows_per_epoch) * self.window_chunks * self.chunk_sequences
        short_at = int(np.flatnonzero(self._permutation(epoch) == self.chunks - 1)[0]) // self.window_chunks
        starts[short_at + 1 :] -= self.chunks * self.chunk_sequences - self.sequences
        return starts


def _generator(seed: int, epoch: int, stream: int) -> np.random.RandomState:
    """NumPy's legacy generator, the one whose numbers are frozen for good (NEP 19)."""
    return np.random.RandomState([seed & 0xFFFFFFFF, epoch & 0xFFFFFFFF, stream & 0xFFFFFFFF])
