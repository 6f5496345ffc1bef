"""Real text found on this machine, as files like the Pile's: zstd-compressed JSON lines with the source's name."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import orjson
import zstandard

from lm.refusal import ConfigError, Problem

KINDS = {
    "Python": (".py", ".pyi"),
    "C": (".h", ".hpp", ".c", ".cc"),
    "Web": (".js", ".html", ".css"),
    "Prose": (".md", ".rst", ".txt"),
}
FILES = 8
SMALLEST_BYTES, LARGEST_BYTES = 2**9, 2**21
LEVEL = 3  # zstd's own default


def make_corpus(folder: Path, megabytes: int) -> Tuple[List[Path], int]:
    """Files of so much text, made once. Returns them and the bytes of their texts.

    Raises ConfigError where this machine has less.
    """
    files = [folder / f"{number:02d}.jsonl.zst" for number in range(FILES)]
    counted = folder / "bytes.txt"
    if counted.exists():
        return files, int(counted.read_text())
    texts = _texts(megabytes * 10**6)
    total = sum(len(text) for _, text in texts)
    if total < megabytes * 10**6:
        text = f"there are {total / 1e6:,.0f} MB of text to be found here, and --megabytes={megabytes}"
        raise ConfigError([Problem(("megabytes",), text, f"--megabytes {total // 10**6}")])
    random.Random(0).shuffle(texts)
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(files):
        lines = (
            orjson.dumps({"text": text.decode(), "meta": {"pile_set_name": kind}}) + b"\n"
            for kind, text in texts[number::FILES]
        )
        with open(path, "wb") as file, zstandard.ZstdCompressor(LEVEL).stream_writer(file) as packed:
            for line in lines:
                packed.write(line)
    counted.write_text(str(total))
    return files, total


def _texts(wanted_bytes: int) -> List[Tuple[str, bytes]]:
    """Texts with their kind, each once, kind after kind in turn until there are enough."""
    kind_of = {suffix: kind for kind, suffixes in KINDS.items() for suffix in suffixes}
    paths: Dict[str, List[Path]] = {kind: [] for kind in KINDS}
    for root in (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], "/usr/include", "/usr/share"):
        for path in sorted(Path(root).rglob("*")):
            if path.suffix in kind_of and path.is_file() and not path.is_symlink():
                paths[kind_of[path.suffix]].append(path)
    seen: set[bytes] = set()
    queues = {kind: _readable(found, seen) for kind, found in paths.items()}
    texts: List[Tuple[str, bytes]] = []
    total = 0
    while queues and total < wanted_bytes:
        for kind in list(queues):
            text = next(queues[kind], None)
            if text is None:
                del queues[kind]
                continue
            texts.append((kind, text))
            total += len(text)
    return texts


def _readable(paths: List[Path], seen: set[bytes]) -> Iterator[bytes]:
    """The files that are UTF-8 of a usual size, without repeats."""
    for path in paths:
        if not SMALLEST_BYTES <= path.stat().st_size <= LARGEST_BYTES:
            continue
        text = path.read_bytes()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        if digest not in seen:
            seen.add(digest)
            yield text
