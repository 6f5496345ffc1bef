"""Records out of a piece of a file: JSON lines, Parquet rows, FASTA sequences, plain text. Streamed, never whole."""

from __future__ import annotations

import codecs
import json
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import orjson

from lm.data.files import READ_BYTES, InputError, InputFile, blocks

MAX_RECORD_BYTES = 256 * 2**20
TOO_LONG, NOT_UTF8 = f"longer than {MAX_RECORD_BYTES >> 20} MiB", "not UTF-8"
FASTA_SEPARATOR = b"\n>"
PIECE_CHARACTERS = 2**22  # of a long document that are encoded at once
ROWS = 256  # of a .parquet that are decoded at once
Record = Tuple[int, Any]  # number within the piece, and what it is: a ValueError where it is no record at all


class Piece(NamedTuple):
    """A share of one file that one task reads.

    start, end: stored bytes. A plain .jsonl or .fasta gives the records that begin in there, a .parquet the same
    share of its row groups; other files are whole. held_out: all for validation, or none; null: decided document by
    document. cut: about where the end of a text begins that is held out. folder: below the common one; names a source.
    """

    file: InputFile
    start: int
    end: int
    held_out: Optional[bool] = None
    cut: Optional[int] = None
    folder: str = ""


Reading = Callable[[int], Any]  # told of each number of stored bytes that were read


def json_lines(piece: Piece, max_window_bytes: int, read: Reading) -> Iterator[Record]:
    """The lines of a .jsonl as values; a blank line is none."""
    for number, line in _lines(_whole_records(piece, b"\n", max_window_bytes, read)):
        if line is None:
            yield number, ValueError(TOO_LONG)
        elif line and not line.isspace():
            try:
                yield number, orjson.loads(line)
            except ValueError:  # the standard library also takes lone surrogates and NaN, and tells us of them
                yield number, _slow_json(line)


def _slow_json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return ValueError("not JSON")


def rows(piece: Piece, columns: List[str], read: Reading) -> Iterator[Record]:
    """The rows of a .parquet as dictionaries of some columns, those that it has."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    with piece.file.open() as file:
        try:
            parquet = ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)  # else a row group is read whole
            groups = parquet.num_row_groups
            first = groups * piece.start // piece.file.stored_bytes
            end = groups * piece.end // piece.file.stored_bytes
            wanted = [name for name in columns if name in parquet.schema_arrow.names]
            number = sum(parquet.metadata.row_group(group).num_rows for group in range(first))
            for group in range(first, end):
                for batch in parquet.iter_batches(ROWS, [group], wanted, use_threads=False):
                    for row in _python_rows(batch):
                        number += 1
                        yield number, row
                read((piece.end - piece.start) // max(1, end - first))
        except (ArrowException, OSError, ZeroDivisionError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the file system's, and not pyarrow's word for a damaged page
            raise InputError(f"{piece.file.url} is damaged: {error}") from None


def _python_rows(batch: Any) -> Iterator[Any]:
    """The rows of a batch; one whose text is not UTF-8 is a ValueError, and its neighbours are kept."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for at in range(batch.num_rows):
            try:
                yield batch.slice(at, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield ValueError(NOT_UTF8)


def sequences(piece: Piece, max_window_bytes: int, read: Reading) -> Iterator[Record]:
    """The sequences of a FASTA file as {"text": letters}: without headers and line breaks. Numbers are of lines."""
    header = size = 0
    letters: List[bytes] = []

    def sequence() -> Any:
        if size > MAX_RECORD_BYTES:
            return ValueError(TOO_LONG)
        return {"text": b"".join(letters).decode("ascii", "replace")}

    for number, line in _lines(_whole_records(piece, FASTA_SEPARATOR, max_window_bytes, read)):
        if line is not None and line.startswith(b">"):
            if header:
                yield header, sequence()
            header, size, letters = number, 0, []
        elif header:
            size += MAX_RECORD_BYTES + 1 if line is None else len(line)
            if line is not None and size <= MAX_RECORD_BYTES:
                letters.append(line.strip())
        elif line is None or line.strip():
            yield number, ValueError("no > before this line: not FASTA")
    if header:
        yield header, sequence()


def plain_text(piece: Piece, max_window_bytes: int, read: Reading) -> Iterator[Tuple[bool, str]]:
    """A text file in pieces for the encoder: whether each is of the part held out, which begins at a line.

    Bytes that are no UTF-8 are lone surrogates in it (PEP 383).
    """
    cut = piece.end if piece.cut is None else _line_or_character(piece.file, piece.cut)
    for held_out, start, end in ((bool(piece.held_out), 0, cut), (True, cut, piece.end)):
        plain = blocks(piece.file, max_window_bytes, start, end, read) if start < end else iter(())
        encoding = "utf-8" if start else "utf-8-sig"
        for text in in_pieces(codecs.iterdecode(plain, encoding, "surrogateescape")):
            yield held_out, text


def in_pieces(texts: Iterable[str]) -> Iterator[str]:
    """A long text in pieces that encode to the same ids one by one as all together.

    Byte-level BPE never joins what stands before a space with the space, so pieces end there; where a piece has no
    such place it ends at a line, or where it must.
    """
    held: List[str] = []
    size = 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size < PIECE_CHARACTERS:
            continue
        whole = "".join(held)
        at = 0
        while len(whole) - at >= PIECE_CHARACTERS:
            end = _border(whole, at, at + PIECE_CHARACTERS)
            yield whole[at:end]
            at = end
        held, size = [whole[at:]], len(whole) - at
    if size:
        yield "".join(held)


def _border(text: str, start: int, end: int) -> int:
    """The last place in (start, end) where a word ends and a space, or else a line break, follows."""
    for sign in (" ", "\n"):
        at = text.rfind(sign, start + 1, end)
        while at > start and text[at - 1].isspace():
            at = text.rfind(sign, start + 1, at)
        if at > start:
            return at
    return end


def first_line(piece: Piece) -> int:
    """The lines of the file before the piece's first record."""
    separator = b"\n" if piece.file.kind == ".jsonl" else FASTA_SEPARATOR
    begin = _record_start(piece.file, piece.start, separator) if piece.start else 0
    return sum(block.count(b"\n") for block in blocks(piece.file, 0, 0, begin))


def _whole_records(piece: Piece, separator: bytes, max_window_bytes: int, read: Reading) -> Iterator[bytes]:
    """The bytes of the records that begin in a piece of a plain file; all of a compressed one."""
    if piece.file.packed:
        return blocks(piece.file, max_window_bytes, read=read)
    start, end = (_record_start(piece.file, at, separator) for at in (piece.start, piece.end))
    return blocks(piece.file, max_window_bytes, start, end, read)


def _record_start(file: InputFile, at: int, separator: bytes) -> int:
    """The first place from `at` on where a record begins: after a separator's line break."""
    if at == 0 or at >= file.stored_bytes:
        return min(at, file.stored_bytes)
    with file.open() as stored:
        stored.seek(at - 1)
        seen, base = b"", at - 1
        while block := stored.read(READ_BYTES):
            seen += block
            found = seen.find(separator)
            if found >= 0:
                return base + found + 1
            base, seen = base + len(seen) - len(separator) + 1, seen[len(seen) - len(separator) + 1 :]
    return file.stored_bytes


def _lines(plain: Iterable[bytes]) -> Iterator[Tuple[int, Optional[bytes]]]:
    """Numbered lines of a stream, without their ends; None for one that is too long to hold."""
    number = 0
    waiting: List[bytes] = []  # of a line that goes on in the next block; nothing where it is too long already
    size = 0
    for block in plain:
        *lines, rest = block.split(b"\n")
        if lines:
            waiting.append(lines[0])
            lines[0] = b"".join(waiting)
            fits = size <= MAX_RECORD_BYTES and len(lines[0]) <= MAX_RECORD_BYTES
            waiting, size = [], 0
            yield number + 1, lines[0] if fits else None
            yield from enumerate(lines[1:], number + 2)
            number += len(lines)
        size += len(rest)
        if size <= MAX_RECORD_BYTES:
            waiting.append(rest)
        else:
            waiting.clear()
    if size:
        yield number + 1, b"".join(waiting) if size <= MAX_RECORD_BYTES else None


def _line_or_character(file: InputFile, at: int) -> int:
    """A place where a text can be cut: after the last line break before `at`, or else between two characters."""
    begin = max(0, at - READ_BYTES)
    with file.open() as stored:
        stored.seek(begin)
        window = stored.read(at + 1 - begin)
    line = window.rfind(b"\n", 0, at - begin)
    if line >= 0:
        return begin + line + 1
    while at > begin and window[at - begin] & 0xC0 == 0x80:  # within a character of UTF-8
        at -= 1
    return at
