"""Input wherever it is and however it is packed: every frame is read, and what is damaged is named (D01, D03)."""

from __future__ import annotations

import gzip
import http.server
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any, Iterator, List

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import good_records, gz, long_window, skippable, zst

from lm.data.files import InputError, InputFile, blocks, find

WINDOW = 2**27


def content(path: Path | str, max_window_bytes: int = WINDOW) -> bytes:
    size = Path(path).stat().st_size if "://" not in str(path) else 0
    return b"".join(blocks(InputFile(str(path), size), max_window_bytes))


# --- zstd ----------------------------------------------------------------------------------------------


def test_every_frame_is_read(tmp_path: Path) -> None:
    records = good_records(50)
    one = zst(tmp_path / "one.jsonl.zst", [b"".join(records)])
    many = zst(tmp_path / "many.jsonl.zst", records)
    assert content(one) == content(many) == b"".join(records)


def test_empty_and_skippable_frames_are_passed_over(tmp_path: Path) -> None:
    first, second = good_records(2)
    pack = zstandard.ZstdCompressor().compress
    path = tmp_path / "odd.jsonl.zst"
    frames = [skippable(), pack(b""), pack(first), pack(b"") * 3, skippable(b""), pack(second), skippable()]
    path.write_bytes(b"".join(frames))
    assert content(path) == first + second


def test_another_reader_reads_the_same(tmp_path: Path) -> None:
    """pyarrow's, over its own build of zstd."""
    import pyarrow

    records = good_records(50)
    path = zst(tmp_path / "many.jsonl.zst", records)
    with pyarrow.input_stream(str(path), compression="zstd") as stream:
        assert stream.read() == content(path)


@settings(max_examples=60, deadline=None)
@given(frames=st.lists(st.binary(max_size=400_000), max_size=5), cut=st.integers(1, 40))
def test_a_file_cut_anywhere_is_never_taken_for_whole(frames: List[bytes], cut: int, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl.zst"
    zst(path, frames)
    assert content(path) == b"".join(frames)
    whole = path.read_bytes()
    sizes = [len(zstandard.ZstdCompressor().compress(frame)) for frame in frames]
    ends = {sum(sizes[:n]) for n in range(len(frames) + 1)}
    if len(whole) > cut and len(whole) - cut not in ends:
        path.write_bytes(whole[:-cut])
        with pytest.raises(InputError, match=r"is cut short: it ends at byte|is no zstd at byte"):
            content(path)


def test_a_flipped_byte_is_named_with_its_frame(tmp_path: Path) -> None:
    records = good_records(3)
    pack = zstandard.ZstdCompressor(write_checksum=True).compress
    frames = [pack(record) for record in records]
    path = tmp_path / "flipped.jsonl.zst"
    damaged = bytearray(b"".join(frames))
    damaged[len(frames[0]) + len(frames[1]) - 10] ^= 0x40
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=rf"flipped.jsonl.zst is damaged in the zstd frame at byte {len(frames[0])}"):
        content(path)


def test_a_long_window_is_read_or_names_what_it_needs(tmp_path: Path) -> None:
    """87 bytes that ask for 256 MiB, as the Reddit dumps do."""
    (record,) = good_records(1)
    path = long_window(tmp_path / "long.jsonl.zst", record, 28)
    assert content(path, 2**28) == record
    with pytest.raises(InputError, match=r"long.jsonl.zst: .* window of 268,435,456 bytes .*_bytes=268435456"):
        content(path, 2**27)


def test_text_that_is_no_zstd_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl.zst").write_bytes(b"plain text and more of it, no frame at all")
    with pytest.raises(InputError, match=r"plain\.jsonl\.zst is no zstd at byte 0"):
        content(tmp_path / "plain.jsonl.zst")


# --- gzip ----------------------------------------------------------------------------------------------


def test_every_gzip_member_is_read_and_padding_is_not(tmp_path: Path) -> None:
    records = good_records(50)
    path = gz(tmp_path / "many.jsonl.gz", [*records[:20], b"", *records[20:]])
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    assert content(path) == gzip.decompress(path.read_bytes()) == b"".join(records)


def test_a_gzip_that_is_cut_short_or_damaged_is_named(tmp_path: Path) -> None:
    path = gz(tmp_path / "a.jsonl.gz", [os.urandom(300_000)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(InputError, match=r"a\.jsonl\.gz is cut short"):
        content(path)
    damaged = bytearray(whole)
    damaged[-6] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=r"a\.jsonl\.gz is damaged"):
        content(path)


# --- places --------------------------------------------------------------------------------------------


def test_folders_globs_and_braces(tmp_path: Path) -> None:
    for name in ("00.jsonl.zst", "01.jsonl.zst", "02.jsonl.gz", "notes.md", "deep/er/03.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    def names(source: str) -> List[str]:
        return [file.url[len(str(tmp_path)) + 1 :] for file in find(str(tmp_path / source), (".jsonl", ".zst", ".gz"))]

    assert names(".") == ["00.jsonl.zst", "01.jsonl.zst", "02.jsonl.gz", "deep/er/03.jsonl"]
    assert names("*.zst") == names("{00..01}.jsonl.zst") == ["00.jsonl.zst", "01.jsonl.zst"]
    assert names("**/*.jsonl") == ["deep/er/03.jsonl"]
    assert names("{00.jsonl.zst,02.jsonl.gz}") == ["00.jsonl.zst", "02.jsonl.gz"]
    assert names("nothing*") == []
    with pytest.raises(InputError, match=r"02\.jsonl\.zst is not there, and .* names it"):
        names("{00..02}.jsonl.zst")


def test_links_are_followed_and_brackets_can_be_names(tmp_path: Path) -> None:
    """As the cache of Hugging Face's hub has them: files and folders that are links."""
    (tmp_path / "blobs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "blobs" / name).write_bytes(b"x")
    snapshot = tmp_path / "snap[1]"
    snapshot.mkdir()
    (snapshot / "a.jsonl").symlink_to(tmp_path / "blobs" / "a")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "b.jsonl").symlink_to(tmp_path / "blobs" / "b")
    (snapshot / "deep").symlink_to(tmp_path / "far")
    assert len(find(str(snapshot), (".jsonl",))) == 2
    assert len(find(str(tmp_path / "*" / "*.jsonl"), (".jsonl",))) == 2
    assert len(find(str(snapshot / "a.jsonl"), (".jsonl",))) == 1


def test_what_swells_comes_in_bounded_blocks(tmp_path: Path) -> None:
    """A gigabyte of the same line in some kilobytes."""
    path = tmp_path / "swells.jsonl.zst"
    with open(path, "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as packed:
        for _ in range(1024):
            packed.write(b"the same line again\n" * 52429)
    assert path.stat().st_size < 200_000
    sizes = [len(block) for block in blocks(InputFile(str(path), path.stat().st_size), WINDOW)]
    assert sum(sizes) == 1024 * 52429 * 20
    assert max(sizes) <= 33 * 2**20



@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """moto's S3 on loopback, found by the environment as the real one is."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import boto3

        boto3.client("s3").create_bucket(Bucket="pile")
        yield "s3://pile"
    server.stop()


def test_s3(s3: str, tmp_path: Path) -> None:
    import boto3

    records = good_records(3000)
    path = zst(tmp_path / "00.jsonl.zst", records)
    client = boto3.client("s3")
    client.upload_file(str(path), "pile", "train/00.jsonl.zst")
    client.put_object(Bucket="pile", Key="train/01.jsonl", Body=b"".join(records))
    found = find(f"{s3}/train", (".jsonl", ".jsonl.zst"))
    assert all(file.version for file in found)  # its ETag
    assert [(file.url, file.kind, file.packed) for file in found] == [
        ("s3://pile/train/00.jsonl.zst", ".jsonl", "zstd"),
        ("s3://pile/train/01.jsonl", ".jsonl", ""),
    ]
    assert found[0].stored_bytes == path.stat().st_size
    assert find(f"{s3}/train/*.zst", ()) == found[:1]
    for file in found:
        assert b"".join(blocks(file, WINDOW)) == b"".join(records)
    assert find("s3://no-such-bucket/x/*", ()) == []
    with pytest.raises(InputError, match=r"s5://pile/x cannot be listed: ValueError: Protocol not known: s5"):
        find("s5://pile/x", ())


def test_http(tmp_path: Path) -> None:
    records = good_records(200)
    zst(tmp_path / "00.jsonl.zst", records)
    zst(tmp_path / "01.jsonl.zst", records)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"
        found = find(root + "/{00..01}.jsonl.zst", ())
        assert [file.url for file in found] == [f"{root}/00.jsonl.zst", f"{root}/01.jsonl.zst"]
        assert b"".join(blocks(found[1], WINDOW)) == b"".join(records)
        assert find(root + "/02.jsonl.zst", ()) == []
        with pytest.raises(InputError, match=r"02\.jsonl\.zst is not there"):
            find(root + "/{01..02}.jsonl.zst", ())
        server.shutdown()
