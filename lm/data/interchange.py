"""Token files of other programs: nanoGPT's .bin read and written, Megatron-LM's .bin with its .idx read."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, Iterator, List, Tuple

import numpy as np

from lm.data.files import READ_BYTES, InputError, InputFile
from lm.data.formats import Reading
from lm.data.shards import SPLITS, read_manifest
from lm.data.streams import TokenStream
from lm.refusal import ConfigError, Problem

NANOGPT_DTYPE = np.dtype("<u2")  # karpathy/nanoGPT, data/openwebtext/prepare.py: no header, no index
NANOGPT_FILES = {"train": "train.bin", "validation": "val.bin"}
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"  # NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type code, sequences, documents' borders
MEGATRON_VERSION = 1
MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are of floating point
PIECE_TOKENS = 2**22
INDEX_DOCUMENTS = 2**20  # of an .idx that are read at once
Ids = Tuple[np.ndarray[Any, Any], bool]  # ids of a document, and whether it ends with them


def nanogpt_documents(file: InputFile, end_of_text: int, read: Reading) -> Iterator[Ids]:
    """The documents of a flat file of uint16 ids, cut at end-of-text, which they are given without.

    Raises InputError for half a token.
    """
    if file.stored_bytes % NANOGPT_DTYPE.itemsize:
        raise InputError(f"{file.url} has {file.stored_bytes:,} bytes, and a token has {NANOGPT_DTYPE.itemsize}")
    waiting = np.empty(0, NANOGPT_DTYPE)
    with file.open() as stored:
        while block := stored.read(READ_BYTES):
            read(len(block))
            *ended, waiting = _cut_after(np.concatenate([waiting, np.frombuffer(block, NANOGPT_DTYPE)]), end_of_text)
            yield from ((ids, True) for ids in ended if len(ids))
            if len(waiting) > PIECE_TOKENS:
                yield waiting[:-1], False  # one stays, so that the document has an end
                waiting = waiting[-1:]
    if len(waiting):
        yield waiting, True


def megatron_documents(file: InputFile, end_of_text: int, read: Reading) -> Iterator[Ids]:
    """The documents of an .idx, from the .bin beside it; the end-of-text that --append-eod added is taken off.

    Raises InputError for another format, and where index and tokens disagree.
    """
    tokens = InputFile(file.url[: -len(".idx")] + ".bin", 0)
    with file.open() as index, tokens.open() as stored:
        header = index.read(MEGATRON_HEADER.size)
        if not header.startswith(MEGATRON_MAGIC) or len(header) < MEGATRON_HEADER.size:
            raise InputError(f"{file.url} is no index of Megatron's memory-mapped format")
        _, version, code, sequences, borders = MEGATRON_HEADER.unpack(header)
        if version != MEGATRON_VERSION or code not in MEGATRON_DTYPES:
            raise InputError(f"{file.url}: version {version} with type code {code} is not known")
        dtype = np.dtype(MEGATRON_DTYPES[code])
        pointers_at = MEGATRON_HEADER.size + sequences * 4
        borders_at = pointers_at + sequences * 8
        if file.stored_bytes < borders_at + borders * 8:
            raise InputError(f"{file.url} is cut short: {file.stored_bytes:,} bytes for {sequences:,} sequences")

        def array(kind: str, at: int, first: int, end: int) -> np.ndarray[Any, Any]:
            item = np.dtype(kind)
            index.seek(at + first * item.itemsize)
            return np.frombuffer(index.read((end - first) * item.itemsize), item)

        for first in range(0, borders - 1, INDEX_DOCUMENTS):  # an index may be larger than memory
            of_documents = array("<i8", borders_at, first, min(first + INDEX_DOCUMENTS + 1, borders))
            begin, end = int(of_documents[0]), int(of_documents[-1])
            lengths = array("<i4", MEGATRON_HEADER.size, begin, end)
            pointers = array("<i8", pointers_at, begin, end)
            for start, stop in zip(of_documents - begin, of_documents[1:] - begin):
                parts = [np.empty(0, dtype)]
                for sequence in range(int(start), int(stop)):
                    stored.seek(int(pointers[sequence]))
                    wanted = int(lengths[sequence]) * dtype.itemsize
                    block = stored.read(wanted)
                    if len(block) != wanted:
                        raise InputError(f"{tokens.url} ends within sequence {begin + sequence:,} of {file.url}")
                    parts.append(np.frombuffer(block, dtype))
                yield from ((ids, True) for ids in _cut_after(np.concatenate(parts), end_of_text) if len(ids))
    read(file.stored_bytes)


def _cut_after(ids: np.ndarray[Any, Any], end_of_text: int) -> List[np.ndarray[Any, Any]]:
    """Runs of ids between the end-of-texts; what follows the last one comes last, and may be empty."""
    ends = np.flatnonzero(ids == end_of_text)
    starts = [0, *(ends + 1)]
    return [ids[start:end] for start, end in zip(starts, [*ends, len(ids)])]


def write_nanogpt(dataset: Path, folder: Path) -> List[Path]:
    """Writes a prepared set as nanoGPT's train.bin and val.bin. Returns their paths.

    Raises ConfigError where its ids need more than 16 bits or a file is there already, FileNotFoundError for no set.
    """
    manifest = read_manifest(dataset)
    paths = {split: folder / NANOGPT_FILES[split] for split in SPLITS}
    problems = [
        Problem(("folder",), f"{path} is there already, and nothing is overwritten", "another folder")
        for path in paths.values()
        if path.exists()
    ]
    if np.dtype(manifest.dtype) != NANOGPT_DTYPE:
        text = f"nanoGPT's files have 16 bits a token, and {dataset} has {manifest.vocabulary_size:,} ids"
        problems.append(Problem(("dataset",), text, "a set with dataset.vocabulary_size=65536 or less"))
    if problems:
        raise ConfigError(problems)
    folder.mkdir(parents=True, exist_ok=True)
    for split, path in paths.items():
        stream = TokenStream.of(dataset, manifest, split)
        aside = path.with_name(path.name + ".partial")
        with open(aside, "wb") as file:
            for start in range(0, stream.tokens, PIECE_TOKENS):
                file.write(stream.read(start, min(PIECE_TOKENS, stream.tokens - start)).tobytes())
        os.replace(aside, path)
    return list(paths.values())
