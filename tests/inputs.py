"""Input files that tests read: the Pile's records, good and bad, packed in every way."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any, Iterable, List

import zstandard

ODDITIES = [
    "y is ?\r\n\ta  b \u200b e\u0301 \u00e9 \U0001f336 trailing  ",
    "def f(x):\n    return x  # don't\n\n\n",
    "<|endoftext|> in a text is text",
    "it's we'LL they'd \u2019s",
    "日本語のテキスト и кириллица ١٢٣ x²",
    "a" * 5000 + " " * 300 + "\n" * 50 + "!?" * 400,
    "\x00\x01\x7f control",
    "\ufeffbyte order mark",
    "na\u00efve\u00a0no-break\u2003em\u3000ideographic",
    " ",
    "",
]


def record(text: Any, source: str = "Words") -> bytes:
    """A line as the Pile has them."""
    return json.dumps({"text": text, "meta": {"pile_set_name": source}}).encode() + b"\n"


def good_records(count: int) -> List[bytes]:
    return [record(f"document {number}. " + "the quick brown fox " * 20) for number in range(count)]


def zst(path: Path, frames: Iterable[bytes]) -> Path:
    """A file of zstd frames, one each."""
    path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(frame) for frame in frames))
    return path


def skippable(content: bytes = b"skip") -> bytes:
    """A frame that a reader must pass over (RFC 8878, 3.1.2)."""
    return struct.pack("<II", 0x184D2A53, len(content)) + content


def long_window(path: Path, content: bytes, window_log: int) -> Path:
    """One frame as `zstd --long=N` writes it: it asks for a window of 2^N bytes, whatever its size."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window_log)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(compressor.compress(content) + compressor.flush())
    return path


def gz(path: Path, members: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(gzip.compress(member) for member in members))
    return path


BAD_LINES = [
    b'{"text": null, "meta": {}}\n',
    b'{"meta": {}}\n',
    b'{"text": 3}\n',
    b'{"text": ["a", "b"]}\n',
    b'{"text": NaN}\n',
    b'{"text": ""}\n',
    b'{"text": "   "}\n',
    b"\n",
    b"   \n",
    b'["a"]\n',
    b'{"text": "unterminated\n',
    b'{"text": "not utf-8: \xff\xfe"}\n',
]
BAD_REASONS = {"text is not a string": 4, "no key text": 1, "empty text": 2, "not a JSON object": 1, "not JSON": 2}
