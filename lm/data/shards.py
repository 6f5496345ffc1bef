"""The format of a prepared dataset: flat little-endian token shards, a document table, and a manifest.

    <output>/manifest.json           written last; a folder without it is not a dataset
    <output>/tokenizer.json
    <output>/train-00000.bin         token ids, uint16 or uint32, each document followed by one end-of-text
    <output>/train.documents.bin     DOCUMENT records: where each starts, its bytes of text, its source

and the same for validation. Flat tokens leave the context length to the training run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List

import numpy as np

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
DOCUMENT = np.dtype([("first_token", "<u8"), ("text_bytes", "<u8"), ("source", "<u4")])


class DatasetError(Exception):
    """A dataset whose files and manifest disagree; the message names the file and both numbers."""


@dataclass
class Shard:
    file: str
    tokens: int
    sha256: str


@dataclass
class Split:
    """Counts and files of train or validation. text_bytes: UTF-8, without separators."""

    documents: int = 0
    tokens: int = 0
    tokens_sha256: str = ""  # of the whole stream
    text_bytes: int = 0
    shards: List[Shard] = field(default_factory=list)
    documents_file: str = ""
    documents_sha256: str = ""
    gzip_bytes: int = 0  # of the text under gzip -9; counted for validation alone


@dataclass
class Manifest:
    """All that is known of a prepared dataset."""

    settings: Dict[str, Any]  # the dataset section, output left out
    vocabulary_size: int  # ids that the tokenizer has
    end_of_text: int
    dtype: str
    tokenizer_sha256: str
    source_digest: str  # of the files' names and sizes when they were read
    sources: List[str]
    rejected: Dict[str, int]
    splits: Dict[str, Split]
    format: int = FORMAT

    def fingerprint(self) -> str:
        """Eight hexadecimal digits that change with any token, and not with the shards' boundaries."""
        parts = [self.tokenizer_sha256, self.dtype, *(self.splits[split].tokens_sha256 for split in SPLITS)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared dataset, its files' sizes checked against it.

    Raises DatasetError where they disagree or the manifest is damaged, and FileNotFoundError where there is none.
    """
    text = (folder / MANIFEST).read_text()
    try:
        values = json.loads(text)
        found = values["format"]
        splits = {
            name: Split(**{**split, "shards": [Shard(**shard) for shard in split["shards"]]})
            for name, split in values["splits"].items()
        }
        manifest = Manifest(**{**values, "splits": splits})
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{folder}/{MANIFEST} cannot be read ({error}). Prepare the set again") from None
    if found != FORMAT:
        raise DatasetError(f"{folder}/{MANIFEST} has format {found}, this version reads {FORMAT}")
    item_bytes = np.dtype(manifest.dtype).itemsize
    for split in manifest.splits.values():
        sizes = {shard.file: shard.tokens * item_bytes for shard in split.shards}
        sizes[split.documents_file] = split.documents * DOCUMENT.itemsize
        for file, expected in sizes.items():
            path = folder / file
            found = path.stat().st_size if path.exists() else -1
            if found != expected:
                state = "is missing" if found < 0 else f"has {found:,} bytes"
                raise DatasetError(f"{path} {state}; the manifest says {expected:,} bytes. Prepare the set again")
    return manifest


class SplitWriter:
    """Writes one split's shards, each of at most shard_bytes, and its document table."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], shard_bytes: int) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self.shard_tokens = max(1, shard_bytes // dtype.itemsize)
        self.split = Split(documents_file=f"{name}.documents.bin")
        self._documents = _HashedFile(folder / self.split.documents_file)
        self._shard: _HashedFile | None = None
        self._in_shard = 0
        self._stream = hashlib.sha256()

    def add(self, tokens: np.ndarray[Any, Any], text_bytes: int, source: int) -> None:
        """Appends one document's tokens, its end-of-text included."""
        record = np.array([(self.split.tokens, text_bytes, source)], DOCUMENT)
        self._documents.write(record.tobytes())
        self.split.documents += 1
        self.split.text_bytes += text_bytes
        self.split.tokens += len(tokens)
        tokens = tokens.astype(self.dtype)
        self._stream.update(tokens.tobytes())
        while len(tokens):
            if self._shard is None:
                self._shard = _HashedFile(self.folder / f"{self.name}-{len(self.split.shards):05d}.bin")
            room = self.shard_tokens - self._in_shard
            self._shard.write(tokens[:room].tobytes())
            self._in_shard += len(tokens[:room])
            tokens = tokens[room:]
            if self._in_shard == self.shard_tokens:
                self._finish_shard()

    def close(self) -> Split:
        """Finishes the files and returns their counts and checksums."""
        self._finish_shard()
        self.split.documents_sha256 = self._documents.close()
        self.split.tokens_sha256 = self._stream.hexdigest()
        return self.split

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self.split.shards.append(Shard(self._shard.path.name, self._in_shard, self._shard.close()))
            self._shard, self._in_shard = None, 0


class _HashedFile:
    """A file that is checksummed as it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close(), after many writes
        self._hash = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)

    def close(self) -> str:
        self._file.close()
        return self._hash.hexdigest()


class TokenStream:
    """A split's shards as one flat array that is read in ranges."""

    def __init__(self, folder: Path, manifest: Manifest, split: str) -> None:
        self.dtype = np.dtype(manifest.dtype)
        self.tokens = manifest.splits[split].tokens
        self._paths = [folder / shard.file for shard in manifest.splits[split].shards]
        counts = [shard.tokens for shard in manifest.splits[split].shards]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def read(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """Tokens [start, start + count), in one read a shard. Raises DatasetError where a shard is too short."""
        parts = []
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while count:
            offset = start - int(self._starts[shard])
            wanted = min(count, int(self._starts[shard + 1]) - start)
            part = np.fromfile(self._paths[shard], self.dtype, wanted, offset=offset * self.dtype.itemsize)
            if len(part) != wanted:
                raise DatasetError(f"{self._paths[shard]} ends at token {offset + len(part):,}, in mid-read")
            parts.append(part)
            start, count, shard = start + wanted, count - wanted, shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
