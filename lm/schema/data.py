"""What it is trained on: a dataset, how it is prepared, and in what mixture it is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional

from lm.setting import setting


@dataclass
class Dataset:
    """Where text comes from and how it is cut into token shards."""

    name: str = setting(pattern=r"[A-Za-z0-9._-]+")
    source: Optional[str] = setting(None)  # a folder, a file, a glob, a URL, or python:stdlib; a plan needs none
    validation_source: Optional[str] = setting(None)  # held out whole; null: validation_fraction of the documents
    tokenizer: Optional[str] = setting(None)  # a tokenizer.json; null: one is trained
    vocabulary_size: int = setting(minimum=257, maximum=2**31 - 1)  # declared: a plan needs no data
    output: Optional[str] = setting(None)  # null: outputs/datasets/<name>-<hash of these settings>
    text_key: str = setting("text")  # of a .jsonl record, or a .parquet column
    source_key: str = setting("meta.pile_set_name")  # what names a record's source, by dots
    validation_fraction: float = setting(0.05, above=0, below=1)
    shard_bytes: int = setting(2**30, minimum=4)
    on_bad_record: str = setting("skip", choices=("skip", "error"))


@dataclass
class Prepare:
    """How a dataset is prepared; nothing of it changes the result."""

    dask_address: Optional[str] = setting(None)  # tcp://HOST:PORT of a scheduler; null: a cluster of this machine
    workers: Optional[int] = setting(None, minimum=1)  # of this machine's cluster; null: as many as cores
    max_window_bytes: int = setting(2**29, minimum=2**10, maximum=2**31)  # memory that a zstd frame may ask for


@dataclass
class Mixture:
    """What training draws from: the dataset's sources and other prepared sets, by name, in proportion."""

    name: str = setting("natural")
    sets: Dict[str, str] = setting({})  # name -> folder of a further prepared set, with the same tokenizer
    weights: Dict[str, float] = setting({})  # SOURCE, SET or SET/SOURCE -> share of the sequences, in any unit
    epochs: Dict[str, float] = setting({})  # or: how often each is gone through, relative to the others
    on_absent: str = setting("error", choices=("error", "skip"))  # where no set has a name
