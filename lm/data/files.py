"""Input files wherever they are, local, s3:// or https://: found, sized, and opened as a stream of plain bytes."""

from __future__ import annotations

import functools
import glob
import os
import zlib
from typing import IO, Any, Callable, Iterator, List, NamedTuple, Optional, Tuple

import zstandard
from braceexpand import braceexpand
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from lm.run import RunFailed

READ_BYTES = 2**20
PACKED_READ_BYTES = 2**10  # of zstd at once: 4 bytes can stand for 128 KiB, so that what comes out is below 32 MiB
ZSTD_HEADER_BYTES = 18  # that a frame's header has at most (RFC 8878, 3.1.1.1)
PACKED = {".zst": "zstd", ".gz": "gzip"}
ZSTD_SKIPPABLE = range(0x184D2A50, 0x184D2A60)  # magic numbers of frames without data (RFC 8878, 3.1.2)


class InputError(RunFailed):
    """Input that cannot be read as it should; the message names file and place."""


class InputFile(NamedTuple):
    """A file and its size as it is stored. version: a time or an ETag that changes with its content, where known."""

    url: str
    stored_bytes: int
    version: str = ""

    @classmethod
    def at(cls, path: str) -> InputFile:
        """A local file as it is now."""
        stat = os.stat(path)
        return cls(path, stat.st_size, str(stat.st_mtime_ns))

    @property
    def kind(self) -> str:
        """The suffix that tells the format, compression left out: ".jsonl" of a.jsonl.zst."""
        return _kind(self.url)

    @property
    def packed(self) -> str:
        """zstd, gzip, or nothing."""
        return PACKED.get(os.path.splitext(self.url)[1], "")

    def open(self) -> IO[bytes]:
        fs, path = url_to_fs(self.url)
        return fs.open(path, "rb", **({} if is_local(fs) else {"cache_type": "readahead"}))


@functools.lru_cache(maxsize=1024)  # asked for each record
def _kind(url: str) -> str:
    stem, suffix = os.path.splitext(url)
    return os.path.splitext(stem)[1] if suffix in PACKED else suffix


def is_local(fs: AbstractFileSystem) -> bool:
    return "file" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)


def find(source: str, suffixes: Tuple[str, ...]) -> List[InputFile]:
    """The files of a folder (those with such a suffix), a glob, a URL, or several by braces: {00..29}.jsonl.zst.

    Sorted by name; links are followed. Raises InputError where a place cannot be listed, or one of several is missing.
    """
    try:
        expanded = list(braceexpand(source))
    except ValueError:  # unbalanced: braces of a name
        expanded = [source]
    found: List[InputFile] = []
    for one in expanded:
        try:
            files = _find_one(one, suffixes)
        except FileNotFoundError:
            files = []
        except Exception as error:  # whatever a protocol's library raises: no credentials, no network
            raise InputError(f"{one} cannot be listed: {type(error).__name__}: {error}") from error
        if not files and len(expanded) > 1:
            raise InputError(f"{one} is not there, and {source} names it")
        found += files
    return sorted(set(found))


def _find_one(one: str, suffixes: Tuple[str, ...]) -> List[InputFile]:
    fs, path = url_to_fs(one)
    if is_local(fs):
        if os.path.isdir(path):
            walked = os.walk(path, onerror=_raise, followlinks=True)
            names = [os.path.join(folder, name) for folder, _, files in walked for name in files]
            names = [name for name in names if name.endswith(suffixes)]
        else:
            names = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
        return [InputFile.at(name) for name in names if not os.path.isdir(name)]
    if any(sign in path for sign in "*?["):
        details = fs.glob(path, detail=True)
    elif not path.endswith(suffixes) and fs.isdir(path):
        details = {name: info for name, info in fs.find(path, detail=True).items() if name.endswith(suffixes)}
    else:
        details = {path: fs.info(path)}
    files = []
    for name, info in details.items():
        if info.get("type") == "directory":
            continue
        url = fs.unstrip_protocol(name)
        if info.get("size") is None:
            raise InputError(f"{url}: its server does not tell its size")
        files.append(InputFile(url, int(info["size"]), str(info.get("ETag") or "")))
    return files


def _raise(error: OSError) -> None:
    raise error


def common_prefix(files: List[InputFile]) -> str:
    """The folder that all files are in, with its last slash; nothing where they share none."""
    folders = [file.url.rpartition("/")[0].split("/") for file in files]
    shared = []
    for names in zip(*folders):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return "".join(f"{name}/" for name in shared)


def blocks(
    file: InputFile, max_window_bytes: int, start: int = 0, end: Optional[int] = None, read: Callable[[int], Any] = int
) -> Iterator[bytes]:
    """A file's bytes without their compression, in blocks; of a plain file those in [start, end).

    max_window_bytes: the most memory that a zstd frame may ask for. read: told of each number of stored bytes that
    were read. Raises InputError for a damaged or truncated file, and for a frame that needs a larger window.
    """
    with file.open() as stored:
        if file.packed == "zstd":
            yield from _zstd(file, stored, max_window_bytes, read)
        elif file.packed == "gzip":
            yield from _gzip(file, stored, read)
        else:
            stored.seek(start)
            left = (file.stored_bytes if end is None else end) - start
            while left > 0:
                block = stored.read(min(READ_BYTES, left))
                if not block:
                    raise InputError(f"{file.url} ends {left:,} bytes before it should: it has changed meanwhile")
                left -= len(block)
                read(len(block))
                yield block


def _zstd(file: InputFile, stored: IO[bytes], max_window_bytes: int, read: Callable[[int], Any]) -> Iterator[bytes]:
    """Every frame of a .zst, skippable and empty ones too. The library's own readers end in mid-frame in silence."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=max_window_bytes)
    frame: Any = None
    frame_at = position = size = 0
    rest = b""
    made: List[bytes] = []
    while block := rest or stored.read(PACKED_READ_BYTES):
        if not rest:
            position += len(block)
            read(len(block))
        rest = b""
        if frame is None:
            while len(block) < ZSTD_HEADER_BYTES and (more := stored.read(PACKED_READ_BYTES)):
                position += len(more)
                read(len(more))
                block += more
            frame, frame_at = decompressor.decompressobj(), position - len(block)
            _check_window(file, block, frame_at, max_window_bytes)
        try:
            made.append(frame.decompress(block))
        except zstandard.ZstdError as error:
            raise InputError(f"{file.url} is damaged in the zstd frame at byte {frame_at:,}: {error}") from None
        size += len(made[-1])
        if size >= READ_BYTES:
            yield b"".join(made)
            made, size = [], 0
        if frame.eof:
            rest, frame = frame.unused_data, None
    yield b"".join(made)
    if frame is not None:
        raise InputError(
            f"{file.url} is cut short: it ends at byte {position:,} within the zstd frame that begins at {frame_at:,}"
        )


def _check_window(file: InputFile, header: bytes, at: int, max_window_bytes: int) -> None:
    if len(header) >= 4 and int.from_bytes(header[:4], "little") in ZSTD_SKIPPABLE:
        return
    try:
        window = zstandard.get_frame_parameters(header).window_size
    except zstandard.ZstdError as error:
        raise InputError(f"{file.url} is no zstd at byte {at:,}: {error}") from None
    if window > max_window_bytes:
        raise InputError(
            f"{file.url}: the zstd frame at byte {at:,} was compressed with a window of {window:,} bytes (--long), and "
            f"prepare.max_window_bytes={max_window_bytes:,}. It takes that much memory a worker: "
            f"prepare.max_window_bytes={window}"
        )


def _gzip(file: InputFile, stored: IO[bytes], read: Callable[[int], Any]) -> Iterator[bytes]:
    """Every member of a .gz; trailing zeros are padding, as gzip has it."""
    member: Any = None
    rest = b""
    position = 0
    while True:
        block = rest or stored.read(READ_BYTES)
        if not block:
            break
        if not rest:
            position += len(block)
            read(len(block))
        rest = b""
        if member is None:
            block = block.lstrip(b"\0") if position > len(block) else block
            if not block:
                continue
            member = zlib.decompressobj(wbits=31)
        try:
            plain = member.decompress(block, READ_BYTES)
            while plain:
                yield plain
                plain = member.decompress(member.unconsumed_tail, READ_BYTES) if member.unconsumed_tail else b""
        except zlib.error as error:
            raise InputError(f"{file.url} is damaged in the gzip member before byte {position:,}: {error}") from None
        if member.eof:
            rest, member = member.unused_data, None
    if member is not None:
        raise InputError(f"{file.url} is cut short: it ends at byte {position:,} within a gzip member")
