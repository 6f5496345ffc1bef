"""Documents out of every format: what is taken, rejected and held out (D04, D06), whatever way a file is shared."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, List

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import make_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import BAD_LINES, BAD_REASONS, ODDITIES, good_records, record, zst

from lm.compose import compose
from lm.data import formats, parts
from lm.data.files import InputError, InputFile
from lm.data.formats import Piece, in_pieces
from lm.data.parts import find_input
from lm.data.sources import REPLACED, SURROGATE, Document, Reader
from lm.data.tokenizer import Tokenizer, train
from lm.refusal import ConfigError


def whole(path: Path, **more: Any) -> Piece:
    size = path.stat().st_size
    return Piece(InputFile(str(path), size), 0, size, **more)


def reader(*overrides: str) -> Reader:
    config = compose(["dataset=text", *overrides])
    return Reader(config.dataset, config.prepare, end_of_text=0)


def texts_of(documents: Any) -> List[str]:
    """Whole texts: the pieces of a long document together."""
    texts, begun = [], ""
    for document in documents:
        begun += document.text
        if document.ends:
            texts.append(begun)
            begun = ""
    assert not begun
    return texts


# --- bad records ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_bad_records_are_counted_by_reason_and_never_become_text(tmp_path: Path, packed: bool) -> None:
    good = good_records(3)
    lines = [good[0], *BAD_LINES, good[1], good[2].rstrip(b"\n")]  # the last line has no end
    path = tmp_path / ("bad.jsonl.zst" if packed else "bad.jsonl")
    zst(path, [b"".join(lines)]) if packed else path.write_bytes(b"".join(lines))
    reads = reader()
    texts = texts_of(reads.documents(whole(path)))
    assert texts == [json.loads(line)["text"] for line in good]
    assert reads.rejected == BAD_REASONS
    assert reads.accepted == 3


def test_strict_mode_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(good_records(1)[0] + b"\n" + b'{"text": 3}\n')
    with pytest.raises(InputError, match=r"bad\.jsonl:3: text is not a string"):
        list(reader("dataset.on_bad_record=error").documents(whole(path)))


def test_strict_mode_names_the_line_of_the_file_and_not_of_the_share(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = [*good_records(20), b"[]\n", *good_records(5)]
    path.write_bytes(b"".join(lines))
    middle = len(b"".join(lines[:10])) + 3
    with pytest.raises(InputError, match=r"bad\.jsonl:21: not a JSON object"):
        list(reader("dataset.on_bad_record=error").documents(whole(path)._replace(start=middle)))


def test_lone_surrogates_are_replaced_and_counted_and_pairs_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b'{"text": "plain"}\n{"text": "lone \\ud83d here"}\n{"text": "pair \\ud83d\\ude00"}\n')
    reads = reader()
    assert texts_of(reads.documents(whole(path))) == ["plain", "lone \ufffd here", "pair \U0001f600"]
    assert reads.rejected == {SURROGATE: 1}


def test_a_record_too_large_to_hold_is_counted_and_its_neighbours_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_RECORD_BYTES", 5_000_000)
    first, second = good_records(2)
    for name, last in (("middle", second), ("last", b"")):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(first + record("x" * 6_000_000) + last)
        reads = reader()
        assert len(texts_of(reads.documents(whole(path)))) == 1 + bool(last)
        assert list(reads.rejected.values()) == [1]


def test_sources_by_key_by_folder_and_too_many(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(record("one", "Github") + b'{"text": "two"}\n{"text": "three", "kind": {"of": "book"}}\n')
    named = [d.source for d in reader().documents(whole(path, folder="arxiv"))]
    assert named == ["Github", "arxiv", "arxiv"]
    named = [d.source for d in reader("dataset.source_key=kind.of").documents(whole(path))]
    assert named == ["text", "text", "book"]
    path.write_bytes(b"".join(record("x", f"source {number}") for number in range(5000)))
    with pytest.raises(InputError, match=r"dataset\.source_key=meta\.pile_set_name has more than 4096 values"):
        list(reader().documents(whole(path)))


# --- held out ------------------------------------------------------------------------------------------


def test_a_document_is_held_out_by_what_it_says_wherever_it_is(tmp_path: Path) -> None:
    texts = make_texts(200)
    (tmp_path / "a.jsonl").write_bytes(b"".join(map(record, texts)))
    (tmp_path / "b.jsonl").write_bytes(b"".join(map(record, reversed([*texts, *texts]))))

    def held_out(name: str) -> Counter[str]:
        return Counter(d.text for d in reader().documents(whole(tmp_path / name)) if d.split == "validation")

    assert 2 <= len(held_out("a.jsonl")) <= 25
    assert {text: 2 for text in held_out("a.jsonl")} == held_out("b.jsonl")


def test_a_few_texts_are_split_within_at_a_line(tmp_path: Path) -> None:
    lines = "".join(f"line {number} of the only file\n" for number in range(2000))
    (tmp_path / "one.txt").write_text(lines)
    dataset = compose(["dataset=text", f"dataset.source={tmp_path}"]).dataset
    (piece,) = find_input(dataset).parts[0]
    found = list(reader().documents(piece))
    assert "".join(document.text for document in found) == lines
    assert [document.split for document in found] == ["train", "validation"]
    assert found[1].text.startswith("line ")
    assert len(found[1].text) == pytest.approx(0.05 * len(lines), rel=0.05)


def test_a_validation_source_is_held_out_whole_and_the_rest_is_not(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b"".join(good_records(100)))
    (tmp_path / "val.jsonl").write_bytes(b"".join(map(record, make_texts(5))))
    overrides = [f"dataset.source={tmp_path}/train.jsonl", f"dataset.validation_source={tmp_path}/val.jsonl"]
    found = find_input(compose(["dataset=text", *overrides]).dataset)
    splits = Counter(d.split for pieces in found.parts for piece in pieces for d in reader().documents(piece))
    assert splits == {"train": 100, "validation": 5}
    overrides[1] = f"dataset.validation_source={tmp_path}/*.jsonl"
    with pytest.raises(ConfigError, match=r"train.jsonl is in both dataset.source and dataset.validation_source"):
        find_input(compose(["dataset=text", *overrides]).dataset)


# --- shares of a file ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=30),
    shares=st.integers(1, 9),
    kind=st.sampled_from([".jsonl", ".fasta"]),
    last=st.booleans(),
)
def test_however_a_file_is_shared_every_record_comes_once_and_in_order(
    sizes: List[int], shares: int, kind: str, last: bool, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("shares") / f"a{kind}"
    texts = [chr(65 + number % 26) * (size + 1) for number, size in enumerate(sizes)]
    if kind == ".jsonl":
        content = b"".join(map(record, texts))
    else:
        content = "".join(f">id {n} of > it\n{text[:70]}\n{text[70:]}\n" for n, text in enumerate(texts)).encode()
    path.write_bytes(content if last else content.rstrip(b"\n"))
    size = path.stat().st_size
    borders = [size * share // shares for share in range(shares + 1)]
    pieces = [whole(path)._replace(start=start, end=end) for start, end in zip(borders, borders[1:])]
    reads = reader()
    assert [text for piece in pieces for text in texts_of(reads.documents(piece))] == texts
    assert not reads.rejected


def test_large_plain_files_are_shared_and_packed_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "SPLIT_BYTES", 10_000)
    monkeypatch.setattr(parts, "JOIN_BYTES", 4_000)
    records = good_records(100)
    (tmp_path / "a.jsonl").write_bytes(b"".join(records))
    zst(tmp_path / "b.jsonl.zst", [bytes(np.random.default_rng(0).bytes(30_000))])
    for number in range(4):
        (tmp_path / f"c{number}.jsonl").write_bytes(records[0] * 3)
    found = find_input(compose(["dataset=text", f"dataset.source={tmp_path}"]).dataset)
    shapes = [[Path(piece.file.url).name for piece in pieces] for pieces in found.parts]
    shared = -(-len(b"".join(records)) // 10_000)
    assert shapes == [["a.jsonl"]] * shared + [["b.jsonl.zst"], ["c0.jsonl", "c1.jsonl"], ["c2.jsonl", "c3.jsonl"]]


# --- formats -------------------------------------------------------------------------------------------


def test_parquet_rows_by_row_groups(tmp_path: Path) -> None:
    texts = [*make_texts(50), None, "", "the last"]
    table = pyarrow.table({"content": texts, "url": ["x"] * 53, "meta": [{"pile_set_name": "Github"}] * 53})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    reads = reader("dataset.text_key=content")
    piece = whole(tmp_path / "a.parquet")
    found = list(reads.documents(piece))
    assert [document.text for document in found] == [text for text in texts if text]
    assert {document.source for document in found} == {"Github"}
    assert reads.rejected == {"content is not a string": 1, "empty text": 1}
    halves = [piece._replace(end=piece.end // 2), piece._replace(start=piece.end // 2)]
    assert [d.text for half in halves for d in reads.documents(half)] == [text for text in texts if text]
    with pytest.raises(InputError, match=r"a\.parquet, row 51: content is not a string"):
        list(reader("dataset.text_key=content", "dataset.on_bad_record=error").documents(halves[1]))
    wrong = reader()
    assert not list(wrong.documents(piece))
    assert wrong.rejected == {"no key text": 53}
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a\.parquet is damaged"):
        list(reads.documents(whole(tmp_path / "a.parquet")))


def test_fasta_is_letters_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.fasta.zst"
    zst(path, [b">sp|P1 one\nMKV\nLLA*\n\n>sp|P2 nothing\n>sp|P3\r\nACD\r\nEF\r\n"])
    reads = reader()
    assert texts_of(reads.documents(whole(path))) == ["MKVLLA*", "ACDEF"]
    assert reads.rejected == {"empty text": 1}
    zst(path, [b"MKV\n>sp|P1\nACD\n"])
    assert texts_of(reads.documents(whole(path))) == ["ACD"]
    assert reads.rejected["no > before this line: not FASTA"] == 1


def test_a_text_in_another_encoding_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin-1"))
    reads = reader()
    assert not list(reads.documents(whole(tmp_path / "a.txt")))
    assert reads.rejected == {"not UTF-8": 1}
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    assert texts_of(reads.documents(whole(tmp_path / "a.txt"))) == ["with a mark"]
    (tmp_path / "a.txt").write_bytes("naïve".encode("utf-16"))
    with pytest.raises(InputError, match=r"a\.txt:1: not UTF-8"):
        list(reader("dataset.on_bad_record=error").documents(whole(tmp_path / "a.txt")))


def test_bytes_that_are_not_utf8_far_into_a_text_are_replaced_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "PIECE_CHARACTERS", 5000)
    text = "".join(make_texts(40))
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xff\xfe end")
    reads = reader()
    assert texts_of(reads.documents(whole(tmp_path / "a.txt"))) == [text + "\ufffd\ufffd end"]
    assert reads.rejected == {REPLACED: 1}


def test_a_sequence_too_long_to_hold_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_RECORD_BYTES", 3_000_000)
    lines = b"".join(b"A" * 60 + b"\n" for _ in range(60_000))
    (tmp_path / "a.fasta").write_bytes(b">one\n" + lines + b">two\nACD\n>three\n" + b"A" * 4_000_000 + b"\n>four\nEF\n")
    reads = reader()
    assert texts_of(reads.documents(whole(tmp_path / "a.fasta"))) == ["ACD", "EF"]
    assert list(reads.rejected.values()) == [2]


def test_damaged_parquet_pages_are_named(tmp_path: Path) -> None:
    table = pyarrow.table({"text": make_texts(200)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="snappy")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    for at in range(200, 2000):
        content[at] ^= 0x55
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.parquet is damaged"):
        list(reader().documents(whole(tmp_path / "a.parquet")))


def test_a_text_of_any_size_is_one_document_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "READ_BYTES", 1000)
    monkeypatch.setattr(formats, "PIECE_CHARACTERS", 5000)
    text = "".join(make_texts(40)) + "é" * 3000 + "日本 語" * 500
    (tmp_path / "a.txt").write_text(text)
    found = list(reader().documents(whole(tmp_path / "a.txt")))
    assert len(found) > 10
    assert [document.ends for document in found] == [False] * (len(found) - 1) + [True]
    assert texts_of(found) == [text]
    assert len({document.split for document in found}) == 1


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.sampled_from([*ODDITIES, "word ", "  two", "\n", "x", "'s", " \n "]), max_size=40))
def test_pieces_encode_to_the_ids_of_the_whole(texts: List[str], tokenizer: Tokenizer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "PIECE_CHARACTERS", 40)
        text = " and ".join(texts)
        pieces = list(in_pieces([text]))
    assert "".join(pieces) == text
    borders = [before[-1] + after[0] for before, after in zip(pieces, pieces[1:])]
    if all(not border[0].isspace() and border[1] in " \n" for border in borders):  # else it had to cut a word
        assert [i for piece in pieces for i in tokenizer.encode(piece)] == list(tokenizer.encode(text))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train([*make_texts(20), *ODDITIES], 400, path)
    return Tokenizer(path)


# --- what is no input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["dataset.source=null"], "dataset=text needs its text"),
        (["dataset.source=empty"], "dataset.source=empty matches no file"),
        (["dataset.source=a.md"], "a.md, which is of no kind that can be read"),
        (["dataset.source=a.bin"], "a.bin holds tokens, and dataset.tokenizer=null"),
        (["dataset.source=a.txt", "dataset.validation_source=no/*"], "dataset.validation_source=no/* matches no file"),
    ],
)
def test_input_that_cannot_be_is_refused(overrides: List[str], said: str) -> None:
    Path("empty").mkdir()
    for name in ("a.md", "a.bin", "a.txt"):
        Path(name).write_text("x")
    with pytest.raises(ConfigError) as error:
        find_input(compose(["dataset=text", *overrides]).dataset)
    assert said in str(error.value)


def test_an_empty_file_may_come_first(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("text")
    (pieces,) = find_input(compose(["dataset=text", f"dataset.source={tmp_path}"]).dataset).parts
    assert len(pieces) == 2


def test_megatrons_bin_is_not_taken_for_nanogpts(tmp_path: Path, prepared: Path) -> None:
    for name in ("a.bin", "a.idx"):
        (tmp_path / name).write_bytes(b"1234")
    overrides = [f"dataset.source={tmp_path}/*.bin", f"dataset.tokenizer={prepared / 'tokenizer.json'}"]
    with pytest.raises(ConfigError, match=r"a\.bin has its \.idx beside it"):
        find_input(compose(["dataset=text", *overrides]).dataset)


def test_the_standard_library_is_found() -> None:
    found = find_input(compose([]).dataset)
    assert found.files > 300
    assert not any("site-packages" in piece.file.url for pieces in found.parts for piece in pieces)


def test_a_document_is_plain(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(record("text", "Github"))
    (document,) = reader().documents(whole(tmp_path / "a.jsonl", held_out=True))
    assert document == Document("validation", "Github", "text")
