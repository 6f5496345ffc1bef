"""Writes one part of a prepared dataset: documents in, shards, document tables and checksums out."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import zlib
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, Tuple

import numpy as np

from lm.data.shards import CHECKED_BYTES, DOCUMENT, PartSplit, Shard, SourceRange, documents_file

IN_MEMORY_BYTES = 64 * 2**20  # of a split's tokens and table


class SplitWriter:
    """One split of a part.

    folder: the part's. shard_bytes: the most that a shard may have. Tokens and tables wait by source until `close`
    lays the sources one after the other. What waits beyond IN_MEMORY_BYTES, of all sources together, does so in one
    temporary file, so that memory does not grow with the input.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], end_of_text: int, shard_bytes: int) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self.end_of_text = np.array([end_of_text], dtype).tobytes()
        self.shard_tokens = max(1, shard_bytes // dtype.itemsize)
        self._sources: Dict[str, _Waiting] = {}
        self._spill: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by close()
        self._in_memory = 0

    def add(self, ids: np.ndarray[Any, Any], text_bytes: int, source: str, ends: bool = True) -> None:
        """Appends a document's ids, or a piece of them; the end-of-text after the piece that ends it."""
        waiting = self._sources.get(source)
        if waiting is None:
            waiting = self._sources[source] = _Waiting()
        content = ids.astype(self.dtype).tobytes()
        waiting.text_bytes += text_bytes
        waiting.tokens.append(content + self.end_of_text if ends else content)
        self._in_memory += len(content) + DOCUMENT.itemsize
        if ends:
            waiting.end(self.dtype.itemsize)
        if self._in_memory > IN_MEMORY_BYTES:
            for one in self._sources.values():
                one.tokens.spill(self._spill)
                one.rows.spill(self._spill)
            self._in_memory = 0

    def close(self) -> PartSplit:
        """Writes the files and returns their counts and checksums."""
        split = PartSplit()
        stream, table = hashlib.sha256(), hashlib.sha256()
        item = self.dtype.itemsize
        shard: _Shard | None = None
        first = 0
        with self._spill, open(self.folder / documents_file(self.name), "wb") as documents:
            for source, waiting in sorted(self._sources.items()):
                for piece in waiting.rows.pieces(self._spill):
                    rows = np.frombuffer(piece, DOCUMENT).copy()
                    rows["first_token"] += np.uint64(first)
                    documents.write(rows.tobytes())
                    table.update(rows.tobytes())
                tokens = waiting.tokens.bytes // item
                split.sources.append(SourceRange(source, waiting.documents, tokens, waiting.all_text_bytes))
                first += tokens
                for piece in waiting.tokens.pieces(self._spill):
                    stream.update(piece)
                    rest = memoryview(piece)
                    while rest:
                        if shard is None:
                            file = f"{self.name}-{len(split.shards):05d}.bin"
                            shard = _Shard(self.folder / file, self.shard_tokens * item)
                        rest = shard.write(rest)
                        if not shard.room:
                            split.shards.append(shard.close(item))
                            shard = None
        if shard is not None:
            split.shards.append(shard.close(item))
        split.tokens_sha256, split.documents_sha256 = stream.hexdigest(), table.hexdigest()
        return split


class _Waiting:
    """One source's tokens and rows of the table, in the order in which they came."""

    def __init__(self) -> None:
        self.tokens, self.rows = _Buffer(), _Buffer()
        self.documents = self.text_bytes = self.all_text_bytes = 0
        self._begin = 0  # of the document that has not ended yet, in tokens

    def end(self, item_bytes: int) -> None:
        self.rows.append(struct.pack("<QQ", self._begin, self.text_bytes))
        self.all_text_bytes += self.text_bytes
        self._begin, self.text_bytes = self.tokens.bytes // item_bytes, 0
        self.documents += 1


class _Buffer:
    """Bytes that are appended: the older ones in places of a file, the newer ones in memory."""

    def __init__(self) -> None:
        self.bytes = 0
        self._places: List[Tuple[int, int]] = []
        self._memory: List[bytes] = []

    def append(self, content: bytes) -> None:
        self._memory.append(content)
        self.bytes += len(content)

    def spill(self, file: IO[bytes]) -> None:
        if self._memory:
            content = b"".join(self._memory)
            self._places.append((file.seek(0, os.SEEK_END), len(content)))
            file.write(content)
            self._memory.clear()

    def pieces(self, file: IO[bytes]) -> Iterator[bytes]:
        for place, size in self._places:
            file.seek(place)
            yield file.read(size)
        yield b"".join(self._memory)
        self._memory.clear()


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
