"""The format of a prepared dataset: parts of flat little-endian token shards, document tables, and a manifest.

    <output>/manifest.json                        written last, by a rename; without it a folder is no dataset
    <output>/tokenizer.json
    <output>/parts/00000/part.json                what the manifest repeats of this part
    <output>/parts/00000/train-00000.bin          token ids, uint16 or uint32, one end-of-text after each document
    <output>/parts/00000/train-00000.bin.crc32    CRC-32 of each MiB of it, which places a fault
    <output>/parts/00000/train.documents.bin      DOCUMENT records: where each begins, its bytes of text

and the same for validation. A part is what one task made of one share of the input. Within it the documents of one
source (a set of the Pile, say) are neighbours, so that any mixture of sources reads large runs. Flat tokens leave the
context length to the training run, and are plainly readable: `numpy.fromfile(path, "<u2")`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import numpy as np

from lm.schema import Dataset

FORMAT = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
PARTS = "parts"
PART = "part.json"
SPLITS = ("train", "validation")
DOCUMENT = np.dtype([("first_token", "<u8"), ("text_bytes", "<u8")])  # first_token: of the part's split
CHECKED_BYTES = 2**20  # of a shard under one CRC-32


class DatasetError(Exception):
    """A dataset whose files and manifest disagree; the message names the file and both numbers."""


@dataclass
class Shard:
    file: str  # within the part's folder
    tokens: int
    sha256: str


@dataclass
class SourceRange:
    """The documents of one source in a part's split, which are neighbours. text_bytes: UTF-8, without separators."""

    source: str
    documents: int
    tokens: int
    text_bytes: int


@dataclass
class PartSplit:
    """What a part holds of train or of validation; its sources in the order in which they lie."""

    shards: List[Shard] = field(default_factory=list)
    sources: List[SourceRange] = field(default_factory=list)
    tokens_sha256: str = ""  # of all its tokens, whatever the shards
    documents_sha256: str = ""
    gzip_bytes: int = 0  # of the text under gzip -9; counted for validation alone

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(source.documents for source in self.sources)


@dataclass
class Part:
    """One task's share of a dataset. rejected: records by reason."""

    name: str
    rejected: Dict[str, int]
    splits: Dict[str, PartSplit]

    @staticmethod
    def of(values: Dict[str, Any]) -> Part:
        """From the plain values of JSON. Raises KeyError or TypeError where they are not those of a part."""
        splits = {
            name: PartSplit(
                **{
                    **split,
                    "shards": [Shard(**shard) for shard in split["shards"]],
                    "sources": [SourceRange(**source) for source in split["sources"]],
                }
            )
            for name, split in values["splits"].items()
        }
        return Part(**{**values, "splits": splits})


class Totals(NamedTuple):
    """Counts of a split over all parts."""

    documents: int
    tokens: int
    text_bytes: int
    gzip_bytes: int


class Extent(NamedTuple):
    """A run of tokens in one file."""

    path: Path
    first: int
    tokens: int


@dataclass
class Manifest:
    """All that is known of a prepared dataset."""

    settings: Dict[str, Any]  # the dataset section, output left out
    vocabulary_size: int  # ids that the tokenizer has
    end_of_text: int
    dtype: str
    tokenizer_sha256: str
    source_digest: str  # of the files' names and sizes when they were read
    parts: List[Part]
    format: int = FORMAT

    def fingerprint(self) -> str:
        """Eight hexadecimal digits that change with any token, and not with the shards' boundaries."""
        streams = [part.splits[split].tokens_sha256 for split in SPLITS for part in self.parts]
        text = json.dumps([self.tokenizer_sha256, self.dtype, *streams])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def totals(self, split: str) -> Totals:
        splits = [part.splits[split] for part in self.parts]
        sources = [source for part in splits for source in part.sources]
        return Totals(
            documents=sum(source.documents for source in sources),
            tokens=sum(source.tokens for source in sources),
            text_bytes=sum(source.text_bytes for source in sources),
            gzip_bytes=sum(part.gzip_bytes for part in splits),
        )

    def source_tokens(self, split: str) -> Dict[str, int]:
        """Tokens by source, by name."""
        tokens: Counter[str] = Counter()
        for part in self.parts:
            for source in part.splits[split].sources:
                tokens[source.source] += source.tokens
        return dict(sorted(tokens.items()))

    def rejected(self) -> Dict[str, int]:
        """Records that were not taken, by reason."""
        return dict(sorted(sum((Counter(part.rejected) for part in self.parts), Counter()).items()))

    def extents(self, folder: Path, split: str, sources: List[str]) -> List[Extent]:
        """Where the tokens of some sources lie: source after source, part after part."""
        found: Dict[str, List[Extent]] = {source: [] for source in sources}
        for part in self.parts:
            first = 0
            for source in part.splits[split].sources:
                if source.source in found:
                    paths = folder / PARTS / part.name
                    found[source.source] += _cut(paths, part.splits[split].shards, first, source.tokens)
                first += source.tokens
        return [extent for source in sources for extent in found[source]]


def _cut(folder: Path, shards: List[Shard], first: int, tokens: int) -> List[Extent]:
    """The tokens [first, first + tokens) of a part's split, in terms of its files."""
    extents = []
    begin = 0
    for shard in shards:
        start, end = max(first, begin), min(first + tokens, begin + shard.tokens)
        if start < end:
            extents.append(Extent(folder / shard.file, start - begin, end - start))
        begin += shard.tokens
    return extents


def settings_of(dataset: Dataset) -> Dict[str, Any]:
    """The settings that decide a dataset's content."""
    return {key: value for key, value in dataclasses.asdict(dataset).items() if key != "output"}


def output_folder(dataset: Dataset) -> Path:
    """Where the prepared set is: dataset.output, or a name made of the settings."""
    if dataset.output is not None:
        return Path(dataset.output)
    digest = hashlib.sha256(json.dumps(settings_of(dataset), sort_keys=True).encode()).hexdigest()[:8]
    return Path("outputs") / "datasets" / f"{dataset.name}-{digest}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared dataset, its files' sizes checked against it.

    Raises DatasetError where they disagree or the manifest is damaged, and FileNotFoundError where there is none.
    """
    text = (folder / MANIFEST).read_text()
    try:
        values = json.loads(text)
        found = values["format"]
        if found != FORMAT:
            raise DatasetError(f"{folder} has format {found}, this program reads {FORMAT}. Prepare the set again")
        manifest = Manifest(**{**values, "parts": [Part.of(part) for part in values["parts"]]})
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{folder}/{MANIFEST} cannot be read ({error}). Prepare the set again") from None
    tokenizer = folder / TOKENIZER
    if not tokenizer.exists() or hashlib.sha256(tokenizer.read_bytes()).hexdigest() != manifest.tokenizer_sha256:
        raise DatasetError(f"{tokenizer} is missing, or is not the tokenizer that the tokens are of")
    for part in manifest.parts:
        for name, expected in part_sizes(part, np.dtype(manifest.dtype).itemsize).items():
            path = folder / PARTS / part.name / name
            size = path.stat().st_size if path.exists() else -1
            if size != expected:
                state = "is missing" if size < 0 else f"has {size:,} bytes"
                raise DatasetError(f"{path} {state}; the manifest says {expected:,} bytes. Prepare the set again")
    return manifest


def part_sizes(part: Part, item_bytes: int) -> Dict[str, int]:
    """The bytes of each of a part's files."""
    sizes = {}
    for name, split in part.splits.items():
        sizes.update({shard.file: shard.tokens * item_bytes for shard in split.shards})
        sizes[documents_file(name)] = split.documents * DOCUMENT.itemsize
    return sizes


def documents_file(split: str) -> str:
    return f"{split}.documents.bin"
