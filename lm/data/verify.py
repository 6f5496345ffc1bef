"""Recomputes all that a manifest says of its files, and names the place of every fault."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from lm.data.shards import (
    CHECKED_BYTES,
    DOCUMENT,
    PARTS,
    SPLITS,
    DatasetError,
    Manifest,
    Part,
    Shard,
    documents_file,
    read_manifest,
)

READ_BLOCKS = 8  # of CHECKED_BYTES


def verify(folder: Path, console: Console) -> str:
    """Checks every shard and table. Returns what was found good, in words.

    Raises DatasetError with every fault: the shard and the byte, both counts where counts disagree.
    """
    manifest = read_manifest(folder)
    faults = []
    item = np.dtype(manifest.dtype).itemsize
    total = sum(manifest.totals(split).tokens for split in SPLITS) * item
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress("verifying", *columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("verify", total=total)
        for part in manifest.parts:
            for split in SPLITS:
                faults += _check_split(folder / PARTS / part.name, manifest, part, split)
                bar.advance(task, part.splits[split].tokens * item)
    if faults:
        raise DatasetError("\n  ".join([f"{len(faults)} faults in {folder}. Prepare the set again", *faults]))
    documents = sum(manifest.totals(split).documents for split in SPLITS)
    shards = sum(len(part.splits[split].shards) for part in manifest.parts for split in SPLITS)
    return f"whole: {shards:,} shards, {documents:,} documents, {total // item:,} tokens"


def _check_split(folder: Path, manifest: Manifest, part: Part, split: str) -> List[str]:
    """The faults of one split of a part: its shards' checksums, its table, and the separators where the table says."""
    expected = part.splits[split]
    faults = []
    separators = []
    stream = hashlib.sha256()
    first = 0
    for shard in expected.shards:
        bad, ends = _read_shard(folder / shard.file, shard, manifest, stream)
        faults += bad
        separators.append(ends + first)
        first += shard.tokens
    table = folder / documents_file(split)
    rows = np.fromfile(table, DOCUMENT)
    if hashlib.sha256(rows.tobytes()).hexdigest() != expected.documents_sha256:
        faults.append(f"{table} has another SHA-256 than the manifest says")
    if faults:
        return faults
    if stream.hexdigest() != expected.tokens_sha256:
        faults.append(f"{folder}: the shards of {split} are whole, and not in the manifest's order")
    ends = np.concatenate([np.empty(0, np.int64), *separators]) + 1
    begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    if len(ends) != expected.documents or not np.array_equal(begins, rows["first_token"].astype(np.int64)):
        at = _first_difference(begins, rows["first_token"])
        faults.append(f"{table}: {len(ends):,} end-of-texts, {expected.documents:,} documents; they part at row {at:,}")
    if first != sum(source.tokens for source in expected.sources):
        faults.append(f"{folder}: {first:,} tokens in the shards of {split}, and its sources have another sum")
    text_bytes = sum(source.text_bytes for source in expected.sources)
    if int(rows["text_bytes"].sum()) != text_bytes:
        faults.append(f"{table}: {int(rows['text_bytes'].sum()):,} bytes of text, the manifest says {text_bytes:,}")
    return faults


def _read_shard(path: Path, shard: Shard, manifest: Manifest, stream: Any) -> Tuple[List[str], np.ndarray[Any, Any]]:
    """A shard's faults, in the places that its CRC-32s tell, and where in it the end-of-texts are."""
    checks = path.with_name(path.name + ".crc32")
    known = np.fromfile(checks, "<u4") if checks.exists() else np.empty(0, "<u4")
    digest = hashlib.sha256()
    faults = []
    separators = [np.empty(0, np.int64)]
    dtype = np.dtype(manifest.dtype)
    at = number = 0
    with open(path, "rb") as file:
        while data := file.read(CHECKED_BYTES * READ_BLOCKS):
            digest.update(data)
            stream.update(data)
            for start in range(0, len(data), CHECKED_BYTES):
                block = memoryview(data)[start : start + CHECKED_BYTES]
                if number >= len(known) or zlib.crc32(block) != known[number]:
                    faults.append(f"{path} is damaged between bytes {at + start:,} and {at + start + len(block):,}")
                number += 1
            tokens = np.frombuffer(data, dtype)
            separators.append(np.flatnonzero(tokens == manifest.end_of_text) + at // dtype.itemsize)
            at += len(data)
    if digest.hexdigest() == shard.sha256:
        faults = [f"{checks} is damaged or cut short; the shard itself is whole"] if faults else []
    elif len(known) != number or not faults:
        faults = [f"{path} has another SHA-256 than the manifest says, and {checks.name} does not tell where"]
    return faults, np.concatenate(separators)


def _first_difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    shared = min(len(a), len(b))
    different = np.flatnonzero(a[:shared].astype(np.int64) != b[:shared].astype(np.int64))
    return int(different[0]) if len(different) else shared
