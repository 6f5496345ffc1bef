"""How input becomes parts: the shares of files that one task prepares. The same for any number of workers."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import List, Tuple

from lm.data.files import InputError, InputFile, common_prefix, find
from lm.data.formats import Piece
from lm.data.sources import FASTA, RECORDS, TOKENS
from lm.refusal import ConfigError, Problem
from lm.schema import Dataset

STDLIB = "python:stdlib"
SPLIT_BYTES = 256 * 2**20  # files of records that are larger are shared among tasks, where the format allows
JOIN_BYTES = 16 * 2**20  # neighbours that are smaller share a task, in bytes of text
PACKED_RATIO = 4  # of text to what is stored, about, where a file is compressed
FEW_TEXTS = 20  # below this many .txt files a split by file is too coarse
KINDS = "a folder, a file, a URL, or a quoted glob of .jsonl(.zst|.gz), .parquet, .txt, .fasta(.gz), .bin or .idx files"


@dataclass(frozen=True)
class Input:
    """All input of a dataset.

    digest: eight hexadecimal digits that change with most changes of the text.
    """

    parts: List[List[Piece]]
    files: int
    stored_bytes: int
    digest: str

    @property
    def state(self) -> str:
        """A digest of times of change and borders of shares too: what a preparation that goes on must find again."""
        return _digest(repr(self.parts))


def find_input(dataset: Dataset) -> Input:
    """The files of a dataset's sources and how they are shared among tasks.

    Raises ConfigError where there are no files, or files of another kind, or of tokens without their tokenizer.
    """
    if dataset.source is None:
        raise ConfigError(
            [Problem(("dataset.source",), f"dataset={dataset.name} needs its text", f"dataset.source={KINDS}")]
        )
    files = _find("source", dataset.source)
    held_out = _find("validation_source", dataset.validation_source) if dataset.validation_source else []
    problems = _problems(dataset, files, held_out)
    if problems:
        raise ConfigError(problems)
    pieces = [
        *_pieces(files, False if held_out else None, 0.0 if held_out else dataset.validation_fraction),
        *_pieces(held_out, True, 0.0),
    ]
    every = files + held_out
    root = common_prefix(every)
    listing = "".join(f"{file.url[len(root) :]} {file.stored_bytes}\n" for file in every)
    return Input(_join(pieces), len(every), sum(file.stored_bytes for file in every), _digest(listing))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _find(setting: str, source: str) -> List[InputFile]:
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
        paths = [path for path in root.rglob("*.py") if not skipped.intersection(path.relative_to(root).parts)]
        return sorted(InputFile.at(str(path)) for path in paths)
    try:
        found = find(source, _suffixes())
    except InputError as error:
        raise ConfigError([Problem((f"dataset.{setting}",), str(error), KINDS)]) from None
    indexed = {file.url[: -len(".idx")] + ".bin" for file in found if file.kind == ".idx"}
    return [file for file in found if file.url not in indexed]  # Megatron's .bin is read through its .idx


def _suffixes() -> Tuple[str, ...]:
    """The names that a folder's files may end with: packed records and sequences, and plain files of every kind."""
    plain = (".txt", *RECORDS, *FASTA, *TOKENS)
    return (*plain, *(f"{kind}{packed}" for kind in (".jsonl", *FASTA) for packed in (".zst", ".gz")))


def _problems(dataset: Dataset, files: List[InputFile], held_out: List[InputFile]) -> List[Problem]:
    problems = []
    for setting, source, found in (
        ("dataset.source", dataset.source, files),
        ("dataset.validation_source", dataset.validation_source, held_out),
    ):
        unknown = [file for file in found if not file.url.endswith((*_suffixes(), ".py"))]
        if source is not None and not found:
            problems.append(Problem((setting,), f"{setting}={source} matches no file", f"{setting}={KINDS}"))
        elif unknown:
            text = f"{setting}={source} matches {unknown[0].url}, which is of no kind that can be read"
            problems.append(Problem((setting,), text, KINDS))
    tokens = [file for file in files + held_out if file.kind in TOKENS]
    if tokens and dataset.tokenizer is None:
        text = f"{tokens[0].url} holds tokens, and dataset.tokenizer=null does not say of which vocabulary"
        problems.append(Problem(("dataset.tokenizer",), text, "dataset.tokenizer=THEIR_TOKENIZER.json"))
    flat = [file.url for file in files + held_out if file.kind == ".bin"]
    megatrons = [url for url in flat if Path(url).with_suffix(".idx").exists()]
    if megatrons:
        text = f"{megatrons[0]} has its .idx beside it, so it is Megatron's and not nanoGPT's"
        problems.append(Problem(("dataset.source",), text, "the .idx files in its place"))
    twice = {file.url for file in files} & {file.url for file in held_out}
    if twice:
        text = f"{min(twice)} is in both dataset.source and dataset.validation_source"
        problems.append(Problem(("dataset.validation_source",), text, "two sources without a file in common"))
    return problems


def _pieces(files: List[InputFile], held_out: bool | None, fraction: float) -> List[Piece]:
    """Whole files, or shares of those that are large and can be shared."""
    if not files:
        return []
    root = common_prefix(files)
    within = fraction > 0 and len(files) < FEW_TEXTS and all(file.kind == ".txt" for file in files)
    pieces = []
    for file in files:
        folder = file.url[len(root) :].rpartition("/")[0].partition("/")[0] if file.kind in RECORDS else ""
        cut = int(file.stored_bytes * (1 - fraction)) if within else None
        shareable = not file.packed and file.kind in (*RECORDS, *FASTA)
        shares = max(1, -(-file.stored_bytes // SPLIT_BYTES)) if shareable else 1
        borders = [file.stored_bytes * share // shares for share in range(shares + 1)]
        pieces += [Piece(file, start, end, held_out, cut, folder) for start, end in zip(borders, borders[1:])]
    return pieces


def _join(pieces: List[Piece]) -> List[List[Piece]]:
    """Pieces as tasks: small neighbours together, the others each for itself."""
    parts: List[List[Piece]] = []
    room = 0
    for piece in pieces:
        packed = piece.file.packed or piece.file.kind == ".parquet"
        size = (piece.end - piece.start) * (PACKED_RATIO if packed else 1)
        if not parts or size > room:
            parts.append([])
            room = JOIN_BYTES
        parts[-1].append(piece)
        room -= size
    return parts


