"""Writes one part of a prepared dataset: documents in, shards, document tables and checksums out."""

from __future__ import annotations

import hashlib
import tempfile
import zlib
from array import array
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List

import numpy as np

from lm.data.shards import CHECKED_BYTES, DOCUMENT, PartSplit, Shard, SourceRange, documents_file

IN_MEMORY_BYTES = 8 * 2**20  # of one source's tokens, before they go to a file of their own
COPY_BYTES = 2**23


class SplitWriter:
    """One split of a part.

    folder: the part's. shard_bytes: the most that a shard may have. Tokens wait by source until `close` lays the
    sources one after the other; memory stays bounded, since what waits beyond IN_MEMORY_BYTES does so in a file.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], end_of_text: int, shard_bytes: int) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self.end_of_text = np.array([end_of_text], dtype)
        self.shard_tokens = max(1, shard_bytes // dtype.itemsize)
        self._waiting: Dict[str, _Waiting] = {}

    def add(self, ids: np.ndarray[Any, Any], text_bytes: int, source: str, ends: bool = True) -> None:
        """Appends a document's ids, or a piece of them; the end-of-text after the piece that ends it."""
        waiting = self._waiting.get(source)
        if waiting is None:
            waiting = self._waiting[source] = _Waiting(self.folder)
        waiting.add(ids.astype(self.dtype), text_bytes)
        if ends:
            waiting.end(self.end_of_text)

    def close(self) -> PartSplit:
        """Writes the files and returns their counts and checksums."""
        split = PartSplit()
        stream, table = hashlib.sha256(), hashlib.sha256()
        shard: _Shard | None = None
        first = 0
        with open(self.folder / documents_file(self.name), "wb") as documents:
            for source, waiting in sorted(self._waiting.items()):
                rows = waiting.rows(first).tobytes()
                documents.write(rows)
                table.update(rows)
                split.sources.append(
                    SourceRange(source, len(waiting.first_tokens), waiting.tokens, sum(waiting.text_bytes))
                )
                first += waiting.tokens
                for piece in waiting.pieces():
                    stream.update(piece)
                    tokens = memoryview(piece).cast("B")
                    while tokens:
                        if shard is None:
                            file = f"{self.name}-{len(split.shards):05d}.bin"
                            shard = _Shard(self.folder / file, self.shard_tokens * self.dtype.itemsize)
                        tokens = shard.write(tokens)
                        if not shard.room:
                            split.shards.append(shard.close(self.dtype.itemsize))
                            shard = None
                waiting.file.close()
        if shard is not None:
            split.shards.append(shard.close(self.dtype.itemsize))
        split.tokens_sha256, split.documents_sha256 = stream.hexdigest(), table.hexdigest()
        return split


class _Waiting:
    """One source's tokens and documents, in the order in which they came. A document costs 16 bytes here."""

    def __init__(self, folder: Path) -> None:
        self.file: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES, dir=str(folder))  # noqa: SIM115 - see close
        self.tokens = 0
        self.first_tokens, self.text_bytes = array("Q"), array("Q")
        self._begun = 0

    def add(self, ids: np.ndarray[Any, Any], text_bytes: int) -> None:
        if not self._begun:
            self.first_tokens.append(self.tokens)
            self.text_bytes.append(0)
            self._begun = 1
        self.text_bytes[-1] += text_bytes
        self.file.write(ids.tobytes())
        self.tokens += len(ids)

    def end(self, end_of_text: np.ndarray[Any, Any]) -> None:
        self.file.write(end_of_text.tobytes())
        self.tokens += 1
        self._begun = 0

    def rows(self, first: int) -> np.ndarray[Any, Any]:
        table = np.empty(len(self.first_tokens), DOCUMENT)
        table["first_token"] = np.frombuffer(self.first_tokens, np.uint64) + np.uint64(first)
        table["text_bytes"] = np.frombuffer(self.text_bytes, np.uint64)
        return table

    def pieces(self) -> Iterator[bytes]:
        self.file.seek(0)
        while piece := self.file.read(COPY_BYTES):
            yield piece


class _Shard:
    """A shard as it is written, with its checksums."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path, self.room = path, most_bytes
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close(), after many writes
        self._sha256 = hashlib.sha256()
        self._checked: List[int] = []
        self._bytes = 0

    def write(self, tokens: memoryview) -> memoryview:
        """Takes what there is room for and returns the rest."""
        taken, rest = tokens[: self.room], tokens[self.room :]
        self._file.write(taken)
        self._sha256.update(taken)
        at = 0
        while at < len(taken):  # a CRC-32 goes on until its CHECKED_BYTES are full
            begun = self._bytes % CHECKED_BYTES
            piece = taken[at : at + CHECKED_BYTES - begun]
            if begun:
                self._checked[-1] = zlib.crc32(piece, self._checked[-1])
            else:
                self._checked.append(zlib.crc32(piece))
            at += len(piece)
            self._bytes += len(piece)
        self.room -= len(taken)
        return rest

    def close(self, item_bytes: int) -> Shard:
        self._file.close()
        checks = np.array(self._checked, "<u4")
        self.path.with_name(self.path.name + ".crc32").write_bytes(checks.tobytes())
        return Shard(self.path.name, self._bytes // item_bytes, self._sha256.hexdigest())
