"""Prepares a dataset: trains or takes the tokenizer, has every part encoded, and publishes them by the manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from rich.console import Console

from lm.data.encode import Task, token_dtype
from lm.data.files import InputError
from lm.data.parts import Input, find_input
from lm.data.shards import (
    FORMAT,
    MANIFEST,
    PARTS,
    SPLITS,
    TOKENIZER,
    Manifest,
    output_folder,
    read_manifest,
    settings_of,
)
from lm.data.sources import Reader
from lm.data.tokenizer import Tokenizer, TokenizerError, check_encodes, train
from lm.data.workers import Display, check_scheduler, run_tasks
from lm.refusal import ConfigError, Problem
from lm.run import sync_folder, write_whole
from lm.schema import Dataset, Prepare

BEGUN = "preparing.json"  # there from the first byte to the manifest: what is being prepared
SAMPLE_BYTES = 100 * 2**20  # of text that the tokenizer learns from
SAMPLED_PARTS = 64  # spread over the input
PROBED_RECORDS = 1000


def prepare(dataset: Dataset, how: Prepare, console: Console, wait: bool = True) -> Tuple[Path, Manifest]:
    """The folder and the manifest of the prepared set, which is prepared now, or further, if it is not there.

    wait: for another process that prepares the same set; else it is refused.
    Raises ConfigError for a source without files or text, and for a folder that holds another dataset;
    DatasetError for files that the manifest does not match; InputError for input that cannot be read.
    """
    folder = output_folder(dataset)
    if not (folder / MANIFEST).exists():  # a set that is there is only read: its place may not be writable
        with _lock(folder, console, wait):
            if not (folder / MANIFEST).exists():
                _prepare_into(folder, dataset, how, console)
    manifest = read_manifest(folder)
    _refuse_other_settings(folder, dataset, manifest.settings)
    _warn_of_changed_text(folder, dataset, manifest, console)
    return folder, manifest


@contextlib.contextmanager
def _lock(folder: Path, console: Console, wait: bool) -> Iterator[None]:
    """One preparation of a folder at a time."""
    path = folder.resolve()
    try:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError("it is a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path.with_name(path.name + ".lock"), "w")  # noqa: SIM115 - closed below
    except OSError as error:
        text = f"dataset.output={folder} cannot be written: {error}"
        raise ConfigError([Problem(("dataset.output",), text, "dataset.output=A_FOLDER of yours")]) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"another process is preparing {folder}"
            if not wait:
                fix = "wait for it; the same command then finds the set, or goes on"
                raise ConfigError([Problem(("dataset.output",), text, fix)]) from None
            console.print(f"{text}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _refuse_other_settings(folder: Path, dataset: Dataset, stored: Dict[str, Any]) -> None:
    problems = []
    for key, value in settings_of(dataset).items():
        if stored.get(key) != value:
            text = f"dataset.{key}={value}, and the set in {folder} was prepared with {stored.get(key)}"
            fix = f"dataset.{key}={stored.get(key)}, or another dataset.output"
            problems.append(Problem((f"dataset.{key}",), text, fix))
    if problems:
        raise ConfigError(problems)


def _warn_of_changed_text(folder: Path, dataset: Dataset, manifest: Manifest, console: Console) -> None:
    if "://" in f"{dataset.source}{dataset.validation_source}":  # a run does not wait for a far listing
        return
    try:
        found = find_input(dataset).digest
    except ConfigError:  # the text may be gone: the prepared set is whole without it
        return
    if found != manifest.source_digest:
        console.print(
            f"warning: the files of dataset.source={dataset.source} are not those that {folder} was prepared from "
            f"(names and sizes {found}, then {manifest.source_digest}); dataset.output=A_NEW_FOLDER prepares them anew"
        )


def _prepare_into(folder: Path, dataset: Dataset, how: Prepare, console: Console) -> None:
    """Part after part into the folder; the manifest comes last, at once."""
    given = _given_tokenizer(dataset)
    text = find_input(dataset)
    _begin(folder, dataset, text)
    console.print(f"preparing {folder}: {text.files:,} files, {text.stored_bytes / 1e6:,.1f} MB")
    tasks = [Task(f"{number:05d}", pieces, folder, dataset, how) for number, pieces in enumerate(text.parts)]
    try:
        check_scheduler(how, folder)
        tokenizer = _tokenizer(folder, dataset, how, text, given)
        if tokenizer.slow:
            console.print(
                f"warning: the tokenizer has {tokenizer.slow}, which tiktoken cannot express; "
                "Hugging Face's tokenizers encode instead, at about a sixth of the speed"
            )
    except (ConfigError, InputError):
        shutil.rmtree(folder)  # a refused request leaves nothing
        raise
    try:
        with Display(console, text.stored_bytes) as display:
            parts = run_tasks(folder, tasks, how, display)
    except InputError:
        # a mistake found at once leaves nothing to be in the way of its correction; on a cluster tasks may still run
        if how.dask_address is None and not any((folder / PARTS).glob("[0-9]*")):
            shutil.rmtree(folder)
        raise
    _remove_leftovers(folder)
    manifest = Manifest(
        settings=settings_of(dataset),
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text=tokenizer.end_of_text,
        dtype=token_dtype(tokenizer.vocabulary_size).str,
        tokenizer_sha256=tokenizer.sha256,
        source_digest=text.digest,
        parts=parts,
    )
    problems = _emptiness(dataset, manifest)
    if problems:
        shutil.rmtree(folder)  # it could never be published
        raise ConfigError(problems)
    write_whole(folder / MANIFEST, json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")
    (folder / BEGUN).unlink()
    sync_folder(folder)
    for name in SPLITS:
        total = manifest.totals(name)
        console.print(
            f"  {name}: {total.documents:,} documents, {total.text_bytes:,} bytes, {total.tokens:,} tokens "
            f"({total.text_bytes / max(total.tokens, 1):.2f} bytes each)"
        )
    for reason, count in manifest.rejected().items():
        console.print(f"  {count:,} records: {reason}")


def _begin(folder: Path, dataset: Dataset, text: Input) -> None:
    """Makes the folder, or finds in it the same preparation half done.

    Raises ConfigError where it holds something else: nothing there is overwritten.
    """
    begun = {"format": FORMAT, "settings": settings_of(dataset), "input": text.state}
    if (folder / BEGUN).exists():
        stored = json.loads((folder / BEGUN).read_text())
        _refuse_other_settings(folder, dataset, stored["settings"])
        if stored != begun:
            problem = f"the files of dataset.source={dataset.source} have changed since {folder} was begun"
            raise ConfigError([Problem(("dataset.output",), problem, f"rm -r {folder}, or another dataset.output")])
        _remove_leftovers(folder)
    elif folder.exists() and any(folder.iterdir()):
        problem = (
            f"dataset.output={folder} has files and no {MANIFEST}: "
            "it is no dataset, and nothing there is overwritten"
        )
        raise ConfigError([Problem(("dataset.output",), problem, "dataset.output=AN_EMPTY_FOLDER")])
    else:
        folder.mkdir(exist_ok=True)
        write_whole(folder / BEGUN, json.dumps(begun, indent=1) + "\n")
    (folder / PARTS).mkdir(exist_ok=True)


def _remove_leftovers(folder: Path) -> None:
    """What tasks that were killed have left; the lock is ours."""
    for left in (folder / PARTS).glob(".*"):
        shutil.rmtree(left, ignore_errors=True)


def _given_tokenizer(dataset: Dataset) -> Tokenizer | None:
    """The tokenizer that the settings name. Raises ConfigError where it cannot be used, or has too many ids."""
    if dataset.tokenizer is None:
        return None
    key = ("dataset.tokenizer",)
    try:
        tokenizer = Tokenizer(Path(dataset.tokenizer))
        check_encodes(tokenizer)
    except (OSError, TokenizerError) as error:
        fix = "dataset.tokenizer=FILE, a byte-level BPE's tokenizer.json, or null to train one"
        raise ConfigError([Problem(key, f"dataset.tokenizer={dataset.tokenizer}: {error}", fix)]) from None
    if tokenizer.vocabulary_size > dataset.vocabulary_size:
        size = tokenizer.vocabulary_size
        text = f"dataset.vocabulary_size={dataset.vocabulary_size}, and {dataset.tokenizer} has {size} ids"
        raise ConfigError([Problem(("dataset.vocabulary_size", *key), text, f"dataset.vocabulary_size={size}")])
    return tokenizer


def _tokenizer(folder: Path, dataset: Dataset, how: Prepare, text: Input, given: Tokenizer | None) -> Tokenizer:
    """The dataset's tokenizer, in its folder: the one given, the one of an earlier attempt, or a new one."""
    path, aside = folder / TOKENIZER, folder / f"{TOKENIZER}.partial"
    reader = Reader(dataset, how, given.end_of_text if given else 0)
    _probe(dataset, reader, text)
    if not path.exists():
        if given:
            shutil.copyfile(str(dataset.tokenizer), aside)
        else:
            train(_sample(reader, text), dataset.vocabulary_size, aside)
        os.replace(aside, path)
        sync_folder(folder)
    return Tokenizer(path)


def _probe(dataset: Dataset, reader: Reader, text: Input) -> None:
    """Refuses a wrong text_key before hours of rejecting: none of the first records has it."""
    reasons = reader.probe(text.parts[0][0], PROBED_RECORDS)
    if reasons and set(reasons) == {f"no key {dataset.text_key}"}:
        raise ConfigError([_no_text(dataset, Counter(reasons))])


def _no_text(dataset: Dataset, rejected: Dict[str, int]) -> Problem:
    reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.items())
    text = (
        f"0 of {sum(rejected.values())} records of {dataset.source} have text in "
        f"dataset.text_key={dataset.text_key} ({reasons})"
    )
    fix = "dataset.text_key=NAME of the key that holds the text"
    return Problem(("dataset.text_key", "dataset.source"), text, fix)


def _sample(reader: Reader, text: Input) -> Iterator[str]:
    """Training text for the tokenizer: the same amount from the beginning of parts all over the input."""
    step = max(1, len(text.parts) // SAMPLED_PARTS)
    sampled = text.parts[::step]
    for pieces in sampled:
        left = SAMPLE_BYTES // len(sampled)
        for document in (document for piece in pieces for document in reader.documents(piece)):
            if document.split == "train":
                yield document.text
                left -= len(document.text)
                if left < 0:
                    break


def _emptiness(dataset: Dataset, manifest: Manifest) -> List[Problem]:
    """Why a set cannot be published: no text at all, or none for one of the splits."""
    totals = {name: manifest.totals(name).documents for name in SPLITS}
    if not any(totals.values()) and manifest.rejected():
        return [_no_text(dataset, manifest.rejected())]
    problems = []
    for name in (name for name in SPLITS if not totals[name]):
        text = (
            f"dataset.source={dataset.source} has {sum(totals.values())} documents, and with "
            f"dataset.validation_fraction={dataset.validation_fraction} none of them is for {name}"
        )
        fix = "more documents, another dataset.validation_fraction, or a dataset.validation_source"
        problems.append(Problem(("dataset.source", "dataset.validation_fraction"), text, fix))
    return problems
