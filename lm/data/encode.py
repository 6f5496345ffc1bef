"""One task of preparing: the pieces of a part in, its folder of shards out, at once or not at all."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import time
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np

from lm.data.files import InputError
from lm.data.formats import Piece
from lm.data.shards import PART, PARTS, SPLITS, TOKENIZER, Part
from lm.data.sources import Document, Reader
from lm.data.tokenizer import Tokenizer
from lm.data.writer import SplitWriter
from lm.run import sync_folder
from lm.schema import Dataset, Prepare

BATCH_CHARACTERS = 2**22  # that are encoded together
REPORT_SECONDS = 0.5


@dataclass(frozen=True)
class Task:
    """A part to prepare: its name, and the pieces of input that it is made of.

    folder: the dataset's, where tokenizer.json is. threads: that encode; the result does not depend on them.
    """

    name: str
    pieces: List[Piece]
    folder: Path
    dataset: Dataset
    prepare: Prepare
    threads: int = 1


@dataclass
class Progress:
    """How far a task is. read_bytes: of the input as stored. Of text_bytes and documents: what was taken."""

    part: str
    read_bytes: int = 0
    text_bytes: int = 0
    documents: int = 0
    rejected: Dict[str, int] = dataclasses.field(default_factory=dict)
    done: bool = False
    found: bool = False  # done before


def encode_part(task: Task, report: Callable[[Progress], Any]) -> Part:
    """Prepares one part of a dataset's folder, or takes it as it is where it was done before.

    report: told of the progress twice a second. Raises InputError.
    """
    target = task.folder / PARTS / task.name
    found = target.exists()
    if not found:
        aside = target.with_name(f".{task.name}.{uuid.uuid4().hex[:8]}")
        aside.mkdir()
        try:
            part = _encode(task, aside, report)
            (aside / PART).write_text(json.dumps(dataclasses.asdict(part), indent=1) + "\n")
            _sync(aside)
            os.rename(aside, target)
        except OSError:
            if not (target / PART).exists():  # else a task that was taken for dead has done it, with the same bytes
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        sync_folder(target.parent)
    part = read_part(target)
    counts = [source for split in part.splits.values() for source in split.sources]
    report(
        Progress(
            task.name,
            sum(piece.end - piece.start for piece in task.pieces),
            sum(count.text_bytes for count in counts),
            sum(count.documents for count in counts),
            part.rejected,
            done=True,
            found=found,
        )
    )
    return part


def read_part(folder: Path) -> Part:
    """What part.json tells of a part that is done."""
    return Part.of(json.loads((folder / PART).read_text()))


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path, modified_ns: int) -> Tokenizer:
    """One a process, whatever the number of parts that it prepares."""
    del modified_ns  # tells a tokenizer from an earlier one in the same place
    return Tokenizer(path)


def _encode(task: Task, aside: Path, report: Callable[[Progress], Any]) -> Part:
    path = task.folder / TOKENIZER
    tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
    dtype = token_dtype(tokenizer.vocabulary_size)
    writers = {
        name: SplitWriter(aside, name, dtype, tokenizer.end_of_text, task.dataset.shard_bytes) for name in SPLITS
    }
    progress = Progress(task.name)
    gzip = zlib.compressobj(9, zlib.DEFLATED, 31)  # 31: gzip's own header, as `gzip -9` writes it
    gzip_bytes = 0
    reported = time.monotonic()

    def read(count: int) -> None:
        progress.read_bytes += count

    reader = Reader(task.dataset, task.prepare, tokenizer.end_of_text, read)
    with closing(_Encoder(tokenizer, task.threads)) as encoder:
        for batch in _batches(reader, task.pieces):
            for document, ids, utf8 in encoder.encode(batch):
                writers[document.split].add(ids, len(utf8), document.source, document.ends)
                if document.split == "validation":
                    gzip_bytes += len(gzip.compress(utf8))
                progress.text_bytes += len(utf8)
                progress.documents += document.ends
            if time.monotonic() - reported > REPORT_SECONDS:
                progress.rejected = dict(reader.rejected)
                report(progress)
                reported = time.monotonic()
    splits = {name: writer.close() for name, writer in writers.items()}
    if splits["validation"].documents:
        splits["validation"].gzip_bytes = gzip_bytes + len(gzip.flush())
    return Part(task.name, dict(sorted(reader.rejected.items())), splits)


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """The smallest type that holds every id."""
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


class _Encoder:
    """Encodes batches of documents, on several threads where asked: tiktoken lets go of the interpreter meanwhile."""

    def __init__(self, tokenizer: Tokenizer, threads: int) -> None:
        self.tokenizer = tokenizer
        self.pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def encode(self, batch: List[Document]) -> Iterator[Tuple[Document, np.ndarray[Any, Any], bytes]]:
        """Each document with its ids and its UTF-8."""
        yield from (self.pool.map if self.pool else map)(self._one, batch)

    def _one(self, document: Document) -> Tuple[Document, np.ndarray[Any, Any], bytes]:
        if document.ids is None:
            return document, self.tokenizer.encode(document.text), document.text.encode()
        ids = document.ids
        bad = np.flatnonzero((ids < 0) | (ids >= self.tokenizer.vocabulary_size))
        if len(bad):
            raise InputError(
                f"the input of tokens has the id {ids[bad[0]]}, and the tokenizer has "
                f"{self.tokenizer.vocabulary_size}: it is of another vocabulary (dataset.tokenizer)"
            )
        return document, ids, self.tokenizer.decode_bytes(ids.tolist())

    def close(self) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)


def _batches(reader: Reader, pieces: List[Piece]) -> Iterator[List[Document]]:
    """Documents in portions that keep memory bounded and threads busy."""
    batch: List[Document] = []
    size = 0
    for piece in pieces:
        for document in reader.documents(piece):
            batch.append(document)
            size += len(document.text) if document.ids is None else 4 * len(document.ids)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
