"""Which sequence of a stream comes when: a pure function of seed, epoch and position.

A stream of N sequences is cut into chunks of neighbours, so that reads are large, and each epoch goes through the
chunks in another order. `lm.data.mixture` takes runs of this order and shuffles the sequences within them.
"""

from __future__ import annotations

import functools
from typing import Any, List, NamedTuple, Tuple

import numpy as np

CHUNK_BYTES = 2**20  # a read of this size keeps a network file system busy


class Run(NamedTuple):
    """Neighbouring sequences, from first on."""

    first: int
    length: int


class Order:
    """The order of one stream.

    sequences: N, at least 1. seed: the run's. stream: a number that tells streams of one run apart.
    chunk_sequences: the size of a chunk; the stream's last one may be shorter.
    """

    def __init__(self, sequences: int, seed: int, stream: int, chunk_sequences: int) -> None:
        self.sequences, self.chunk_sequences = sequences, chunk_sequences
        self.chunks = -(-sequences // chunk_sequences)
        self._seed = (seed, stream)
        self._chunks_of = functools.lru_cache(maxsize=2)(self._permute)

    def _permute(self, epoch: int) -> Tuple[np.ndarray[Any, Any], int]:
        """An epoch's chunks in order, and the place among them of the one that may be short."""
        chunks = generator(*self._seed, epoch).permutation(self.chunks)
        return chunks, int(np.flatnonzero(chunks == self.chunks - 1)[0])

    def runs(self, first: int, end: int) -> List[Run]:
        """The sequences at positions [first, end), positions counted through all epochs."""
        found: List[Run] = []
        size, missing = self.chunk_sequences, self.chunks * self.chunk_sequences - self.sequences
        while first < end:
            epoch, within = divmod(first, self.sequences)
            chunks, short_at = self._chunks_of(epoch)
            padded = within if within < (short_at + 1) * size - missing else within + missing
            place, offset = divmod(padded, size)
            chunk = int(chunks[place])
            begin = chunk * size
            length = min(min(begin + size, self.sequences) - begin - offset, end - first)
            found.append(Run(begin + offset, length))
            first += length
        return found


def generator(*key: int) -> np.random.RandomState:
    """NumPy's legacy generator, the one whose numbers are frozen for good (NEP 19)."""
    return np.random.RandomState([part & 0xFFFFFFFF for part in key])
