"""Prepares a dataset: trains the tokenizer, encodes every document, and publishes shards and manifest at once."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from lm.config import ConfigError, Problem
from lm.data import sources
from lm.data.shards import MANIFEST, Manifest, SplitWriter, read_manifest
from lm.data.tokenizer import Tokenizer, train
from lm.run import sync_folder
from lm.schema import Dataset

TOKENIZER_SAMPLE_BYTES = 100 * 2**20  # of text that the tokenizer learns from
ENCODE_BATCH_CHARACTERS = 4 * 2**20


def settings_of(dataset: Dataset) -> Dict[str, Any]:
    """The settings that decide a dataset's content."""
    return {key: value for key, value in dataclasses.asdict(dataset).items() if key != "output"}


def output_folder(dataset: Dataset) -> Path:
    """Where the prepared set is: dataset.output, or a name made of the settings."""
    if dataset.output is not None:
        return Path(dataset.output)
    digest = hashlib.sha256(json.dumps(settings_of(dataset), sort_keys=True).encode()).hexdigest()[:8]
    return Path("outputs") / "datasets" / f"{dataset.name}-{digest}"


def prepare(dataset: Dataset, console: Console) -> Tuple[Path, Manifest]:
    """The folder and the manifest of the prepared set, which is prepared now if it is not there.

    Raises ConfigError for a source without files or text, and for a folder that holds another dataset;
    DatasetError for files that the manifest does not match; sources.BadRecord.
    """
    folder = output_folder(dataset)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        if not (folder / MANIFEST).exists():
            _refuse_other_files(folder)
            _prepare_into(folder, dataset, console)
        manifest = read_manifest(folder)
    _refuse_other_dataset(folder, dataset, manifest)
    _warn_of_changed_text(folder, dataset, manifest, console)
    return folder, manifest


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One preparation of a folder at a time; another waits, and then finds the work done."""
    with open(folder.with_name(folder.name + ".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _refuse_other_files(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        text = (
            f"dataset.output={folder} has files and no {MANIFEST}: "
            "it is no dataset, and nothing there is overwritten"
        )
        raise ConfigError([Problem(("dataset.output",), text, "dataset.output=AN_EMPTY_FOLDER")])


def _refuse_other_dataset(folder: Path, dataset: Dataset, manifest: Manifest) -> None:
    problems = []
    for key, value in settings_of(dataset).items():
        stored = manifest.settings.get(key)
        if stored != value:
            text = f"dataset.{key}={value}, and the set in {folder} was prepared with {stored}"
            problems.append(Problem((f"dataset.{key}",), text, f"dataset.{key}={stored}, or another dataset.output"))
    if problems:
        raise ConfigError(problems)


def _warn_of_changed_text(folder: Path, dataset: Dataset, manifest: Manifest, console: Console) -> None:
    try:
        found = sources.digest(sources.find_files(dataset))
    except ConfigError:  # the text may be gone: the prepared set is whole without it
        return
    if found != manifest.source_digest:
        console.print(
            f"warning: the files of dataset.source={dataset.source} are not those that {folder} was prepared from "
            f"(names and sizes {found}, then {manifest.source_digest}); dataset.output=A_NEW_FOLDER prepares them anew"
        )


def _prepare_into(folder: Path, dataset: Dataset, console: Console) -> None:
    """Writes the set aside, then renames it: a folder is a whole dataset or is not there."""
    files = sources.find_files(dataset)
    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # left by a preparation that was killed; the lock is ours
    aside.mkdir()
    size = sum(file.stat().st_size for file in files)
    console.print(f"preparing {folder}: {len(files):,} files, {size / 1e6:,.1f} MB", highlight=False)
    train(_sample(dataset, files), dataset.vocabulary_size, aside / "tokenizer.json")
    manifest = _encode(dataset, files, aside, console)
    manifest.write(aside)
    for path in aside.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(aside)
    if folder.exists():
        folder.rmdir()  # empty, or _refuse_other_files would have said so
    os.rename(aside, folder)
    sync_folder(folder.parent)
    for name, split in manifest.splits.items():
        console.print(
            f"  {name}: {split.documents:,} documents, {split.text_bytes:,} bytes, {split.tokens:,} tokens "
            f"({split.text_bytes / max(split.tokens, 1):.2f} bytes each)",
            highlight=False,
        )
    for reason, count in manifest.rejected.items():
        console.print(f"  rejected {count:,}: {reason}", highlight=False)


def _sample(dataset: Dataset, files: List[Path]) -> Iterator[str]:
    """Training text for the tokenizer, from the beginning up to the sample's size."""
    left = TOKENIZER_SAMPLE_BYTES
    for document in sources.documents(dataset, files, Counter()):
        if document.split == "train":
            yield document.text
            left -= len(document.text)
            if left < 0:
                return


def _encode(dataset: Dataset, files: List[Path], aside: Path, console: Console) -> Manifest:
    tokenizer = Tokenizer(aside / "tokenizer.json")
    dtype = np.dtype("<u2" if tokenizer.vocabulary_size <= 2**16 else "<u4")
    writers = {name: SplitWriter(aside, name, dtype, dataset.shard_bytes) for name in ("train", "validation")}
    gzip = zlib.compressobj(9, zlib.DEFLATED, 31)  # 31: gzip's own header, as `gzip -9` writes it
    gzip_bytes = 0
    rejected: Counter[str] = Counter()
    source_ids: Dict[str, int] = {}
    threads = len(os.sched_getaffinity(0))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("encoding", total=sum(file.stat().st_size for file in files))
        for batch in _batches(sources.documents(dataset, files, rejected)):
            for document, ids in zip(batch, tokenizer.encode_batch([d.text for d in batch], threads)):
                utf8 = document.text.encode()
                source = source_ids.setdefault(document.source, len(source_ids))
                writers[document.split].add(np.array([*ids, tokenizer.end_of_text]), len(utf8), source)
                if document.split == "validation":
                    gzip_bytes += len(gzip.compress(utf8))
                progress.advance(task, len(utf8))
    splits = {name: writer.close() for name, writer in writers.items()}
    splits["validation"].gzip_bytes = gzip_bytes + len(gzip.flush())
    for name, split in splits.items():
        if not split.documents:
            other = "train" if name == "validation" else "validation"
            text = (
                f"dataset.source={dataset.source} has {splits[other].documents} documents, and with "
                f"dataset.validation_fraction={dataset.validation_fraction} none of them is for {name}"
            )
            fix = "more documents, or another dataset.validation_fraction"
            raise ConfigError([Problem(("dataset.source", "dataset.validation_fraction"), text, fix)])
    return Manifest(
        settings=settings_of(dataset),
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text=tokenizer.end_of_text,
        dtype=dtype.str,
        tokenizer_sha256=tokenizer.sha256,
        source_digest=sources.digest(files),
        sources=list(source_ids),
        rejected=dict(rejected),
        splits=splits,
    )


def _batches(documents: Iterator[sources.Document]) -> Iterator[List[sources.Document]]:
    """Documents in portions that keep every core busy and memory bounded."""
    batch: List[sources.Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= ENCODE_BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def check_fits(dataset: Dataset, manifest: Manifest, context: int, global_batch_sequences: int) -> int:
    """The training sequences of an epoch. Raises ConfigError where the set is too small for one batch."""
    problems = []
    tokens = manifest.splits["train"].tokens
    sequences = (tokens - 1) // context
    name = dataset.name
    if sequences < 1:
        problems.append(
            Problem(
                ("model.context", "dataset"),
                f"model.context={context} is longer than the dataset {name}: {tokens} training tokens",
                f"model.context={max(2, tokens // 10)}, or more text",
            )
        )
    elif sequences < global_batch_sequences:
        problems.append(
            Problem(
                ("train.global_batch_sequences", "dataset"),
                f"{sequences} sequences < batch {global_batch_sequences}: the dataset {name} has {tokens} training "
                f"tokens at model.context={context}",
                f"train.global_batch_sequences={sequences}, a shorter model.context, or more text",
            )
        )
    if manifest.splits["validation"].tokens < 2:
        problems.append(
            Problem(
                ("dataset.validation_fraction",),
                f"the dataset {name} has {manifest.splits['validation'].tokens} validation tokens: none to predict",
                "a larger dataset.validation_fraction",
            )
        )
    if manifest.vocabulary_size > dataset.vocabulary_size:
        problems.append(
            Problem(
                ("dataset.vocabulary_size",),
                f"dataset.vocabulary_size={dataset.vocabulary_size}, and its tokenizer has {manifest.vocabulary_size}",
                f"dataset.vocabulary_size={manifest.vocabulary_size}",
            )
        )
    if problems:
        raise ConfigError(problems)
    return sequences
