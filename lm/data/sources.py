"""Documents out of input: what is taken, what is rejected and why, whose it is, and which split it belongs to."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import islice
from typing import Any, Iterator, List, NamedTuple, Optional, Set, Tuple

import numpy as np

from lm.data import formats, interchange
from lm.data.files import InputError
from lm.data.formats import PIECE_CHARACTERS, Piece, Reading
from lm.schema import Dataset, Prepare

TEXT, RECORDS, FASTA = (".txt", ".py"), (".jsonl", ".parquet"), (".fasta", ".fa", ".faa")
TOKENS = (".bin", ".idx")  # nanoGPT's; Megatron's, whose .bin lies beside it
HASHED_CHARACTERS = 2**16  # of a document's beginning, which decide whether it is held out
MAX_SOURCES = 4096
SURROGATE = "lone surrogate replaced by U+FFFD (kept)"
REPLACED = "bytes that are not UTF-8 replaced by U+FFFD (kept)"


class Document(NamedTuple):
    """A document, or a piece of a long one. text: or ids, where the input has tokens. ends: with this piece."""

    split: str  # train or validation
    source: str
    text: str
    ids: Optional[np.ndarray[Any, Any]] = None
    ends: bool = True


class Reader:
    """Reads pieces of input under the settings.

    end_of_text: the id that separates documents where the input has tokens. read: told of stored bytes as they are
    read. Its counts, accepted and rejected by reason, are of records.
    """

    def __init__(self, dataset: Dataset, prepare: Prepare, end_of_text: int, read: Reading = int) -> None:
        self.dataset, self.end_of_text, self.read = dataset, end_of_text, read
        self.max_window_bytes = prepare.max_window_bytes
        self.accepted = 0
        self.rejected: Counter[str] = Counter()
        self._sources: Set[str] = set()

    def documents(self, piece: Piece) -> Iterator[Document]:
        """The documents of a piece, in order.

        Raises InputError for a damaged file, and under on_bad_record=error for a bad record, with file and line.
        """
        kind = piece.file.kind
        if kind in TEXT:
            yield from self._text(piece)
        elif kind in TOKENS:
            yield from self._tokens(piece)
        else:
            for number, record in self._records(piece):
                yield from self._record(piece, number, record)

    def probe(self, piece: Piece, count: int) -> List[str]:
        """Why each of the first records would be rejected, "" for those that would not; nothing for other input."""
        if piece.file.kind in (*TEXT, *TOKENS):
            return []
        key = self._text_key(piece)
        return [_text_of(record, key)[1] for _, record in islice(self._records(piece), count)]

    def _text_key(self, piece: Piece) -> str:
        return "text" if piece.file.kind in FASTA else self.dataset.text_key

    def _records(self, piece: Piece) -> Iterator[formats.Record]:
        if piece.file.kind == ".parquet":
            columns = [self.dataset.text_key, self.dataset.source_key.partition(".")[0]]
            return formats.rows(piece, columns, self.read)
        form = formats.json_lines if piece.file.kind == ".jsonl" else formats.sequences
        return form(piece, self.max_window_bytes, self.read)

    def _record(self, piece: Piece, number: int, record: Any) -> Iterator[Document]:
        text, reason = _text_of(record, self._text_key(piece))
        if reason:
            self._reject(piece, number, reason)
            return
        if not _is_unicode(text):
            self.rejected[SURROGATE] += 1
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self.accepted += 1
        source = self._source(piece, record)
        split = self._split(piece, text[:HASHED_CHARACTERS].encode())
        if len(text) < PIECE_CHARACTERS:
            yield Document(split, source, text)
            return
        del record
        waiting = None
        for part in formats.in_pieces([text]):
            if waiting is not None:
                yield Document(split, source, waiting, ends=False)
            waiting = part
        yield Document(split, source, waiting or "")

    def _text(self, piece: Piece) -> Iterator[Document]:
        """A text file is a document, or two where its end is held out."""
        waiting: Optional[Document] = None
        split, reason = "", "empty text"
        for held_out, text in formats.plain_text(piece, self.max_window_bytes, self.read):
            if not _is_unicode(text):
                reason = formats.NOT_UTF8
                if waiting is None:  # another encoding, or no text at all
                    break
                self.rejected[REPLACED] += 1
                text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            if piece.cut is not None:
                split = "validation" if held_out else "train"
            elif waiting is None:
                split = self._split(piece, text[:HASHED_CHARACTERS].encode())
            begins = waiting is None or waiting.split != split
            if begins and not text.strip():
                continue
            if waiting is not None:
                yield waiting._replace(ends=begins)
            waiting = Document(split, piece.folder or self.dataset.name, text)
        if waiting is None:
            self._reject(piece, 1, reason)
        else:
            self.accepted += 1
            yield waiting

    def _tokens(self, piece: Piece) -> Iterator[Document]:
        form = interchange.nanogpt_documents if piece.file.kind == ".bin" else interchange.megatron_documents
        begins, split = True, ""
        for ids, ends in form(piece.file, self.end_of_text, self.read):
            if begins:
                self.accepted += 1
                split = self._split(piece, ids[:HASHED_CHARACTERS].tobytes())
            yield Document(split, piece.folder or self.dataset.name, "", ids, ends)
            begins = ends

    def _reject(self, piece: Piece, number: int, reason: str) -> None:
        if self.dataset.on_bad_record == "error":
            row = piece.file.kind == ".parquet"
            line = number + (formats.first_line(piece) if piece.start and not row else 0)
            place = f"{piece.file.url}, row {number}" if row else f"{piece.file.url}:{line}"
            raise InputError(f"{place}: {reason} (dataset.on_bad_record=skip counts and goes on)")
        self.rejected[reason] += 1

    def _source(self, piece: Piece, record: Any) -> str:
        """What the record says under source_key; else its folder; else the dataset."""
        value = record
        for key in self.dataset.source_key.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        source = value if isinstance(value, str) and value else piece.folder or self.dataset.name
        self._sources.add(source)
        if len(self._sources) > MAX_SOURCES:
            raise InputError(
                f"{piece.file.url}: dataset.source_key={self.dataset.source_key} has more than {MAX_SOURCES} values, "
                "so it names no sources. dataset.source_key=none takes all as one"
            )
        return source

    def _split(self, piece: Piece, beginning: bytes) -> str:
        """By a hash of the document itself: the same anywhere, and two alike never lie on both sides."""
        held_out = piece.held_out
        if held_out is None:
            digest = hashlib.blake2b(beginning, digest_size=8).digest()
            held_out = int.from_bytes(digest, "big") / 2.0**64 < self.dataset.validation_fraction
        return "validation" if held_out else "train"


def _text_of(record: Any, text_key: str) -> Tuple[str, str]:
    """The text, or why the record is rejected."""
    if isinstance(record, ValueError):
        return "", str(record)
    if not isinstance(record, dict):
        return "", "not a JSON object"
    if text_key not in record:
        return "", f"no key {text_key}"
    text = record[text_key]
    if not isinstance(text, str):
        return "", f"{text_key} is not a string"
    if not text or text.isspace():
        return "", "empty text"
    return text, ""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
