"""Feeding against what training can eat, against the page cache, and against a file system of 5 ms a read."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
from rich.console import Console

from lm.bench.stepping import prepare
from lm.data.loader import READERS, Feed, training_batches
from lm.data.mixture import BLOCK_BYTES, Component, Mixture
from lm.data.order import CHUNK_BYTES, Order
from lm.data.shards import Extent
from lm.data.streams import TokenStream

LATENCY_SECONDS = 0.005
VOCABULARY = 50257
STEPS = 12
EATERS: Dict[str, List[str]] = {
    "model=tiny": [],
    "a model of 1 x 64": ["model.layers=1", "model.width=64", "model.heads=2", "dataset.vocabulary_size=512"],
}


class _Far(TokenStream):
    """A stream that takes 5 ms more for each read, as a network file system may."""

    def _read_file(self, path: Path, first: int, tokens: np.ndarray[Any, Any]) -> None:
        time.sleep(LATENCY_SECONDS)
        super()._read_file(path, first, tokens)


def bench_loader(megabytes: int, seconds: float, console: Console) -> Dict[str, float]:
    """Measures, prints and returns tokens a second by what is measured."""
    path = Path("outputs/bench") / f"tokens-{megabytes}.bin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.random.default_rng(0).integers(0, VOCABULARY, megabytes * 500_000, dtype=np.uint16).tofile(path)
    tokens = path.stat().st_size // 2
    appetites = {name: _appetite(overrides) for name, overrides in EATERS.items()}  # first: it sets devices up
    raw = _page_cache_bytes_per_second(path)
    console.print(f"{tokens:,} tokens; page cache {raw / 1e9:.2f} GB/s in reads of 1 MiB by {READERS} threads")
    found = {"page cache": raw / 2, **appetites}
    for context, batch in ((256, 8), (1024, 64)):
        for name, kind in (("", TokenStream), (", 5 ms a read", _Far)):
            mixture = _mixture(kind([Extent(path, 0, tokens)], np.dtype("<u2"), VOCABULARY), context)
            feed = Feed(mixture, context, 0, batch, 0, batch)
            rate = _tokens_per_second(feed.batch, batch * context, seconds)
            shown = f"batch {batch} x {context}{name}"
            found[shown] = rate
            read = rate * 2 / 1e6
            console.print(f"  {shown:<32} {rate / 1e6:8.1f} M tokens/s, {read:8.1f} MB/s, {rate * 2 / raw:.0%}")
    mixture = _mixture(TokenStream([Extent(path, 0, tokens)], np.dtype("<u2"), VOCABULARY), 256)
    batches = training_batches(mixture, 256, 0, 8, 0, 1)
    found["tf.data"] = _tokens_per_second(lambda _: next(batches), 8 * 256, seconds)
    console.print(f"  through tf.data, batch 8 x 256   {found['tf.data'] / 1e6:8.1f} M tokens/s")
    for name, appetite in appetites.items():
        console.print(f"  {name} eats {appetite:,.0f} tokens/s: the feed is {found['tf.data'] / appetite:,.0f} x that")
    found["seek seconds"] = _seek_seconds()
    console.print(f"  seek in a billion sequences, three epochs in: {found['seek seconds']:.2f} s")
    return found


def _page_cache_bytes_per_second(path: Path) -> float:
    """Reads of 1 MiB by as many threads as the loader has, into memory that is there already."""
    size = path.stat().st_size // CHUNK_BYTES
    room = [bytearray(CHUNK_BYTES) for _ in range(READERS)]
    with open(path, "rb") as file, ThreadPoolExecutor(READERS) as pool:

        def work(reader: int) -> int:
            places = range(reader, size, READERS)
            return sum(os.preadv(file.fileno(), [room[reader]], place * CHUNK_BYTES) for place in places)

        sum(pool.map(work, range(READERS)))  # into the page cache
        begun = time.perf_counter()
        read = sum(pool.map(work, range(READERS)))
        return read / (time.perf_counter() - begun)


def _mixture(stream: TokenStream, context: int) -> Mixture:
    """One stream in the chunks and blocks that a run has."""
    sequences = (stream.tokens - 1) // context
    order = Order(sequences, 0, 0, CHUNK_BYTES // (2 * context))
    return Mixture([Component("tokens", stream, order, sequences)], 0, BLOCK_BYTES // (2 * context))


def _tokens_per_second(batch: Callable[[int], Any], tokens: int, seconds: float) -> float:
    """From the first batch on, whatever the first block takes to arrive."""
    begun, number = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        batch(number)
        number += 1
    return number * tokens / (time.perf_counter() - begun)


def _appetite(overrides: List[str]) -> float:
    """Tokens a second of training steps without any feeding: the same batch again and again."""
    _, plan, take = prepare(overrides)
    spent = [take(1) for _ in range(STEPS)]
    return plan.tokens_per_step / min(spent[2:])


def _seek_seconds() -> float:
    sequences, context = 1_000_000_007, 2048
    tokens = Extent(Path("of a set that is not there"), 0, sequences * context + 1)
    mixture = _mixture(TokenStream([tokens], np.dtype("<u2"), VOCABULARY), context)
    begun = time.perf_counter()
    block, _ = mixture.locate(3 * sequences + 987_654_321)
    mixture.block(block)
    return time.perf_counter() - begun
