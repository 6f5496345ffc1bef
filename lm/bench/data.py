"""Preparing against a pipeline of Hugging Face's tokenizers, on the same files, cores and vocabulary."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import numpy as np
import orjson
import zstandard
from rich.console import Console

from lm.bench.corpus import make_corpus
from lm.compose import compose
from lm.data.encode import token_dtype
from lm.data.files import InputFile, blocks
from lm.data.prepare import prepare
from lm.data.shards import SPLITS, TOKENIZER
from lm.data.tokenizer import Tokenizer, train
from lm.data.workers import cores

FOLDER = Path("outputs/bench")
CHUNK_LINES = 32  # that a worker gets at once, as Megatron-LM's tools/preprocess_data.py has it


def bench_data(megabytes: int, vocabulary_size: int, rounds: int, console: Console) -> Dict[str, Any]:
    """Measures, prints and returns MB of text a second, ratios, memory, and where the time goes."""
    files, text_bytes = make_corpus(FOLDER / f"corpus-{megabytes}", megabytes)
    stored = sum(path.stat().st_size for path in files)
    console.print(
        f"{text_bytes / 1e6:,.0f} MB of text in {len(files)} files ({stored / 1e6:,.0f} MB), {cores()} cores, "
        f"{vocabulary_size:,} ids"
    )
    tokenizer = _tokenizer(files, vocabulary_size)
    slow = tokenizer.with_name("slow.json")
    idle = {"type": "Sequence", "normalizers": []}  # changes nothing, and is more than tiktoken can express
    slow.write_text(json.dumps({**json.loads(tokenizer.read_text()), "normalizer": idle}))
    ways: Dict[str, Callable[[], int]] = {
        "lm prepare": lambda: _ours(files, tokenizer, vocabulary_size),
        "pool of Hugging Face encoders": lambda: _pool(files, tokenizer),
        "lm prepare with Hugging Face's encoder": lambda: _ours(files, slow, vocabulary_size),
    }
    seconds: Dict[str, List[float]] = {name: [] for name in ways}
    tokens: Dict[str, int] = {}
    peak = 0
    for _ in range(rounds):
        for name, work in ways.items():
            begun = time.perf_counter()
            tokens[name] = work()
            seconds[name].append(time.perf_counter() - begun)
            peak = peak or resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # of the first way's workers
    if len(set(tokens.values())) != 1:
        raise AssertionError(f"the pipelines disagree: {tokens}")
    rates = {name: text_bytes / 1e6 / statistics.median(spent) for name, spent in seconds.items()}
    ours = rates["lm prepare"]
    for name, rate in rates.items():
        console.print(f"  {name:<40} {rate:6.1f} MB/s, {rate / cores():5.1f} a core{_times(ours, rate)}")
    console.print(f"  peak memory of a worker {peak / 2**20:,.0f} MiB; {next(iter(tokens.values())):,} tokens each way")
    spent = _where(files[0], tokenizer)
    console.print("  one core, MB/s of text: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in spent.items()))
    return {"megabytes_per_second": rates, "worker_peak_bytes": peak, "stages_megabytes_per_second": spent}


def _times(ours: float, rate: float) -> str:
    return "" if rate == ours else f"   lm prepare is {ours / rate:.2f} x as fast"


def _tokenizer(files: List[Path], vocabulary_size: int) -> Path:
    """A vocabulary of the corpus itself, trained once."""
    folder = files[0].parent / f"vocabulary-{vocabulary_size}"
    if not (folder / TOKENIZER).exists():
        folder.mkdir(exist_ok=True)
        lines = (line for path in files for line in _lines(path))
        texts = (orjson.loads(line)["text"] for number, line in enumerate(lines) if number % 8 == 0)
        train(texts, vocabulary_size, folder / "partial.json")
        os.replace(folder / "partial.json", folder / TOKENIZER)
    return folder / TOKENIZER


def _ours(files: List[Path], tokenizer: Path, vocabulary_size: int) -> int:
    """`lm prepare` from start to manifest. Returns the tokens."""
    output = FOLDER / "prepared"
    shutil.rmtree(output, ignore_errors=True)
    config = compose(
        [
            "dataset=text",
            f"dataset.source={files[0].parent}/*.zst",
            f"dataset.tokenizer={tokenizer}",
            f"dataset.vocabulary_size={vocabulary_size}",
            f"dataset.output={output}",
            "dataset.validation_fraction=0.001",
        ]
    )
    with open(os.devnull, "w") as nowhere:
        _, manifest = prepare(config.dataset, config.prepare, Console(file=nowhere))
    return sum(manifest.totals(split).tokens for split in SPLITS)


def _lines(path: Path) -> Iterator[str]:
    """A file's lines as lm_dataformat reads them: a text wrapper over the library's stream."""
    with open(path, "rb") as file:
        stream = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(file, read_across_frames=True)
        yield from io.TextIOWrapper(stream, "utf-8", newline="\n")


_encoder: Any = None


def _start_encoder(path: str) -> None:
    import tokenizers

    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = tokenizers.Tokenizer.from_file(path)


def _encode_line(line: str) -> List[int]:
    return _encoder.encode(json.loads(line)["text"], add_special_tokens=False).ids


def _pool(files: List[Path], tokenizer: Path) -> int:
    """As Megatron-LM and GPT-NeoX prepare: lines to a pool of encoders, ids back to one writer. Returns the tokens."""
    own = Tokenizer(tokenizer)
    dtype = token_dtype(own.vocabulary_size)
    tokens = 0
    with (
        open(FOLDER / "pool.bin", "wb") as out,
        multiprocessing.get_context("spawn").Pool(cores(), _start_encoder, (str(tokenizer),)) as pool,
    ):
        for path in files:
            for ids in pool.imap(_encode_line, _lines(path), CHUNK_LINES):
                out.write(np.array([*ids, own.end_of_text], dtype).tobytes())
                tokens += len(ids) + 1
    (FOLDER / "pool.bin").unlink()
    return tokens


def _where(path: Path, tokenizer: Path) -> Dict[str, float]:
    """Each stage of one worker on one file, by itself: MB of text a second."""
    file = InputFile.at(str(path))
    encoder = Tokenizer(tokenizer)
    rates = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        made = work()
        rates[name] = time.perf_counter() - begun
        return made

    plain = timed("zstd", lambda: b"".join(blocks(file, 2**31)))
    lines = plain.split(b"\n")[:-1]
    texts = timed("JSON", lambda: [orjson.loads(line)["text"] for line in lines])
    ids = timed("encoding", lambda: [encoder.encode(text) for text in texts])
    with open(FOLDER / "stage.bin", "wb") as out:
        timed("writing", lambda: [out.write(one.astype("<u2").tobytes()) for one in ids])
    (FOLDER / "stage.bin").unlink()
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    return {name: megabytes / seconds for name, seconds in rates.items()}
