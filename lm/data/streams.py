"""Reads runs of tokens out of the shards that hold them, many at once."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, List, Optional

import numpy as np

from lm.data.shards import DatasetError, Extent, Manifest

OPEN_FILES = 256


class TokenStream:
    """Extents of shards as one flat array that is read in ranges; safe to read from several threads.

    vocabulary_size: a token that is not below it is no token: a damaged shard is told when it is read.
    """

    def __init__(self, extents: List[Extent], dtype: np.dtype[Any], vocabulary_size: int) -> None:
        self.dtype, self.vocabulary_size = dtype, vocabulary_size
        self._extents = extents
        self._starts = np.concatenate([[0], np.cumsum([extent.tokens for extent in extents], dtype=np.int64)])
        self.tokens = int(self._starts[-1])

    @classmethod
    def of(cls, folder: Path, manifest: Manifest, split: str, sources: Optional[List[str]] = None) -> TokenStream:
        """A split of a prepared set, source after source; all of its sources unless some are named."""
        chosen = list(manifest.source_tokens(split)) if sources is None else sources
        return cls(manifest.extents(folder, split, chosen), np.dtype(manifest.dtype), manifest.vocabulary_size)

    def read(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """Tokens [start, start + count). Raises DatasetError where a shard is too short."""
        tokens = np.empty(count, self.dtype)
        self.read_into(start, tokens)
        return tokens

    def read_into(self, start: int, tokens: np.ndarray[Any, Any]) -> None:
        """Fills an array with the tokens from start on, in one read an extent."""
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < len(tokens):
            extent, within = self._extents[number], start - int(self._starts[number])
            wanted = min(len(tokens) - filled, extent.tokens - within)
            self._read_file(extent.path, extent.first + within, tokens[filled : filled + wanted])
            start, filled, number = start + wanted, filled + wanted, number + 1

    def _read_file(self, path: Path, first: int, tokens: np.ndarray[Any, Any]) -> None:
        """One read, the GIL free meanwhile; more only where a signal or the kernel cuts it short."""
        room, offset = memoryview(tokens.data).cast("B"), first * self.dtype.itemsize
        try:
            file = _open(path)
            while room:
                got = os.preadv(file.descriptor, [room], offset)
                if not got:
                    raise DatasetError(f"{path} ends at token {offset // self.dtype.itemsize:,}, in mid-read")
                room, offset = room[got:], offset + got
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error}") from error
        if len(tokens) and tokens.max() >= self.vocabulary_size:
            at = int(np.argmax(tokens >= self.vocabulary_size))
            raise DatasetError(
                f"{path} is damaged: token {first + at:,} (byte {(first + at) * self.dtype.itemsize:,}) is "
                f"{tokens[at]}, and the vocabulary has {self.vocabulary_size} ids. lm verify tells what else is"
            )


class _File:
    """An open file, closed when nobody reads it any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_open = functools.lru_cache(OPEN_FILES)(_File)

