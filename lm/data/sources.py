"""Documents out of files: what is read, what is rejected and why, and which split each belongs to."""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Tuple

from lm.config import ConfigError, Problem
from lm.schema import Dataset

STDLIB = "python:stdlib"
SUFFIXES = (".txt", ".jsonl", ".py")
FEW_DOCUMENTS = 20  # below this many .txt files a split by file is too coarse


class BadRecord(Exception):
    """A record that on_bad_record=error does not let pass; the message has file and line."""


class Document(NamedTuple):
    """A document and where it goes. source: the Pile's set name, or the folder's."""

    split: str  # train or validation
    text: str
    source: str


def find_files(dataset: Dataset) -> List[Path]:
    """The files of a source, sorted. Raises ConfigError where there are none."""
    kinds = "dataset.source=FOLDER, a file, or a quoted glob of .txt and .jsonl files"
    if dataset.source is None:
        raise ConfigError([Problem(("dataset.source",), f"dataset={dataset.name} needs its text", kinds)])
    if dataset.source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
        files = [path for path in root.rglob("*.py") if not skipped.intersection(path.relative_to(root).parts)]
    elif Path(dataset.source).is_dir():
        files = [path for path in Path(dataset.source).rglob("*") if path.suffix in SUFFIXES[:2] and path.is_file()]
    else:
        files = [Path(path) for path in glob.glob(dataset.source, recursive=True) if Path(path).is_file()]
    unknown = [path for path in files if path.suffix not in SUFFIXES]
    if not files or unknown:
        text = f"dataset.source={dataset.source} matches no file"
        if unknown:
            text = f"dataset.source={dataset.source} matches {unknown[0]}, which is neither .txt nor .jsonl"
        raise ConfigError([Problem(("dataset.source",), text, kinds)])
    return sorted(files)


def digest(files: List[Path]) -> str:
    """Eight hexadecimal digits of the files' names and sizes, which change with most changes of the text."""
    root = _common_folder(files)
    listing = "".join(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n" for path in files)
    return hashlib.sha256(listing.encode()).hexdigest()[:8]


def documents(dataset: Dataset, files: List[Path], rejected: Counter[str]) -> Iterator[Document]:
    """Every document of the files, in order; what is rejected is counted by its reason.

    A document is held out by a hash of its place, so that a split is the same on every machine. A corpus of a few
    .txt files is split within each file instead, its end held out.

    Raises BadRecord under on_bad_record=error, and ConfigError where no record at all has the text key.
    """
    root = _common_folder(files)
    records = accepted = 0
    within = len(files) < FEW_DOCUMENTS and all(path.suffix == ".txt" for path in files)
    for path in files:
        place = path.relative_to(root).as_posix()
        for line, record in _records(path):
            records += 1
            text, source, reason = _text(record, dataset.text_key)
            if reason:
                if dataset.on_bad_record == "error":
                    raise BadRecord(f"{path}:{line}: {reason} (dataset.on_bad_record=skip counts and goes on)")
                rejected[reason] += 1
                continue
            accepted += 1
            if _has_lone_surrogate(text):
                rejected["lone surrogate replaced by U+FFFD (kept)"] += 1
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            source = source or (path.parent.name if path.suffix == ".jsonl" else dataset.name)
            if within:
                yield from _cut(text, source, dataset.validation_fraction)
            else:
                held_out = _unit_hash(f"{place}:{line}") < dataset.validation_fraction
                yield Document("validation" if held_out else "train", text, source)
    if records and not accepted:
        reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.items())
        fix = "dataset.text_key=NAME of the key that holds the text"
        raise ConfigError(
            [
                Problem(
                    ("dataset.text_key", "dataset.source"),
                    f"0 of {records} records of {dataset.source} have text in dataset.text_key={dataset.text_key} "
                    f"({reasons})",
                    fix,
                )
            ]
        )


def _common_folder(files: List[Path]) -> Path:
    folders = [path.parent for path in files]
    first = folders[0]
    while not all(folder == first or first in folder.parents for folder in folders):
        first = first.parent
    return first


def _records(path: Path) -> Iterator[Tuple[int, Any]]:
    """Line number and record: a .jsonl's lines, or another file's whole text as one record."""
    if path.suffix != ".jsonl":
        yield 1, {"text": path.read_bytes().decode("utf-8", "replace")}
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError:
                    yield number, ValueError("not JSON")


def _text(record: Any, text_key: str) -> Tuple[str, str, str]:
    """The text, the source that the record names, and why it is rejected, if it is."""
    if isinstance(record, ValueError):
        return "", "", str(record)
    if not isinstance(record, dict):
        return "", "", "not a JSON object"
    if text_key not in record:
        return "", "", f"no key {text_key}"
    text = record[text_key]
    if not isinstance(text, str):
        return "", "", f"{text_key} is not a string"
    if not text.strip():
        return "", "", "empty text"
    meta = record.get("meta")
    return text, str(meta.get("pile_set_name", "")) if isinstance(meta, dict) else "", ""


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _cut(text: str, source: str, fraction: float) -> Iterator[Document]:
    """A file in two at a line's end: the last fraction is held out."""
    at = text.rfind("\n", 0, int(len(text) * (1 - fraction))) + 1 or int(len(text) * (1 - fraction))
    for split, part in (("train", text[:at]), ("validation", text[at:])):
        if part.strip():
            yield Document(split, part, source)


def _unit_hash(place: str) -> float:
    """A number in [0, 1) that depends on the place alone."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "big") / 2.0**64
