"""Saving and restoring against the disk's own speed, in the same bytes."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import tensorflow as tf
from rich.console import Console

from lm.checkpoint import Checkpoints, Progress

VARIABLES = 16
BLOCK_BYTES = 2**24


def bench_checkpoint(megabytes: int, rounds: int, folder: Path, console: Console) -> Dict[str, Any]:
    """Measures, prints and returns GB/s of each way, and their ratios. folder: on the disk in question."""
    folder.mkdir(parents=True, exist_ok=True)
    values = megabytes * 10**6 // 4 // VARIABLES
    variables = {f"blocks.{i}.kernel": tf.Variable(tf.random.normal([values])) for i in range(VARIABLES)}
    size = VARIABLES * values * 4
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        plain = Path(scratch) / "plain.bin"
        checkpoints = Checkpoints(Path(scratch) / "checkpoints", {"bench": 0}, keep=1)
        progress = Progress()

        def save() -> None:
            progress.step += 1
            checkpoints.save(progress, variables)

        ways: Dict[str, Callable[[], Any]] = {
            "disk, written": lambda: _write(plain, size),
            "checkpoint saved": save,
            "disk, read": lambda: _read(plain),
            "checkpoint restored": lambda: checkpoints.restore(variables),
        }
        seconds: Dict[str, List[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, work in ways.items():
                began = time.perf_counter()
                work()
                seconds[name].append(time.perf_counter() - began)
    rates = {name: size / 1e9 / statistics.median(spent) for name, spent in seconds.items()}
    console.print(f"{size / 1e6:,.0f} MB on {folder}, medians of {rounds}; reads are from the page cache")
    for name, rate in rates.items():
        console.print(f"  {name:<20} {rate:6.2f} GB/s")
    ratios = {
        "saving, of the disk's own": rates["checkpoint saved"] / rates["disk, written"],
        "restoring, of the page cache's own": rates["checkpoint restored"] / rates["disk, read"],
    }
    return {"gigabytes_per_second": rates, "ratios": ratios}


def _write(path: Path, size: int) -> None:
    block = os.urandom(BLOCK_BYTES)
    with open(path, "wb") as file:
        for start in range(0, size, BLOCK_BYTES):
            file.write(block[: size - start])
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    room = bytearray(BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(room):
            pass
