"""Token files of nanoGPT and of Megatron-LM: what people have is read, and what they can read is written."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
from conftest import ROOT, make_texts
from test_prepare import documents_of, prepare_with

from lm.cli import main
from lm.data import interchange
from lm.data.files import InputError, InputFile
from lm.data.interchange import megatron_documents, nanogpt_documents
from lm.data.shards import read_manifest
from lm.data.streams import TokenStream
from lm.data.tokenizer import Tokenizer
from lm.refusal import ConfigError

GOLDEN = ROOT / "tests" / "golden"


def _input(path: Path) -> InputFile:
    return InputFile(str(path), path.stat().st_size)


def nanogpt(path: Path, texts: List[str], tokenizer: Tokenizer) -> Path:
    """As data/openwebtext/prepare.py writes it: uint16, an end-of-text after each document."""
    ids = [i for text in texts for i in [*tokenizer.encode(text).tolist(), tokenizer.end_of_text]]
    np.array(ids, np.uint16).tofile(path)
    return path


def test_nanogpts_files_come_in_and_go_out_the_same(tmp_path: Path, prepared: Path) -> None:
    tokenizer = Tokenizer(prepared / "tokenizer.json")
    texts = make_texts(60, seed=3)
    nanogpt(tmp_path / "train.bin", texts[:50], tokenizer)
    nanogpt(tmp_path / "val.bin", texts[50:], tokenizer)
    folder, manifest = prepare_with(
        "dataset=text",
        f"dataset.source={tmp_path / 'train.bin'}",
        f"dataset.validation_source={tmp_path / 'val.bin'}",
        f"dataset.tokenizer={prepared / 'tokenizer.json'}",
        "dataset.vocabulary_size=300",
        f"dataset.output={tmp_path / 'set'}",
    )
    assert documents_of(folder, manifest) == Counter(texts)
    assert (manifest.totals("train").documents, manifest.totals("validation").documents) == (50, 10)
    assert manifest.totals("train").text_bytes == sum(len(text.encode()) for text in texts[:50])
    assert main(["to-nanogpt", str(folder), str(tmp_path / "out")]) == 0
    for name in ("train.bin", "val.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert main(["to-nanogpt", str(folder), str(tmp_path / "out")]) == 2  # nothing is overwritten


def test_what_is_written_is_the_whole_of_a_set_of_texts(tmp_path: Path, prepared: Path) -> None:
    assert main(["to-nanogpt", str(prepared), str(tmp_path)]) == 0
    manifest = read_manifest(prepared)
    for split, name in (("train", "train.bin"), ("validation", "val.bin")):
        stream = TokenStream.of(prepared, manifest, split)
        data = np.memmap(tmp_path / name, dtype=np.uint16, mode="r")  # as nanoGPT's train.py opens it
        np.testing.assert_array_equal(data, stream.read(0, stream.tokens))


def test_ids_of_more_than_16_bits_are_no_nanogpt(tmp_path: Path, prepared: Path) -> None:
    import json

    shutil.copytree(prepared, tmp_path / "set")
    for path in (tmp_path / "set").rglob("*-*.bin"):
        np.fromfile(path, "<u2").astype("<u4").tofile(path)
    stored = json.loads((tmp_path / "set" / "manifest.json").read_text())
    (tmp_path / "set" / "manifest.json").write_text(json.dumps({**stored, "dtype": "<u4"}))
    assert main(["to-nanogpt", str(tmp_path / "set"), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_documents_across_reads_and_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interchange, "READ_BYTES", 10)
    monkeypatch.setattr(interchange, "PIECE_TOKENS", 12)
    ids = [*range(1, 30), 0, 0, 5, 6, 0, *range(1, 4)]
    np.array(ids, np.uint16).tofile(tmp_path / "a.bin")
    found: List[List[int]] = [[]]
    for part, ends in nanogpt_documents(InputFile(str(tmp_path / "a.bin"), 2 * len(ids)), 0, int):
        found[-1] += part.tolist()
        if ends:
            found.append([])
    assert found == [list(range(1, 30)), [5, 6], [1, 2, 3], []]


def test_half_a_token_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    with pytest.raises(InputError, match=r"a.bin has 3 bytes, and a token has 2"):
        list(nanogpt_documents(InputFile(str(tmp_path / "a.bin"), 3), 0, int))


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize("at_once", [1, 2, 1000])
def test_megatrons_own_files_are_read(dtype: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by megatron-core's IndexedDatasetBuilder (tests/golden/make_references.py)."""
    monkeypatch.setattr(interchange, "INDEX_DOCUMENTS", at_once)
    path = GOLDEN / f"megatron-{dtype}.idx"
    found = [ids.tolist() for ids, _ in megatron_documents(_input(path), 0, int)]
    assert found == [[5, 6, 7], [8, 9, 10, 11, 12], [40, 41]]


def test_a_folder_of_megatrons_is_prepared_once_each(tmp_path: Path, prepared: Path) -> None:
    """The .bin beside an .idx is Megatron's and not nanoGPT's."""
    for path in GOLDEN.glob("megatron-*"):
        shutil.copy(path, tmp_path)
    folder, manifest = prepare_with(
        "dataset=text",
        f"dataset.source={tmp_path}",
        f"dataset.tokenizer={prepared / 'tokenizer.json'}",
        "dataset.vocabulary_size=300",
        "dataset.validation_fraction=0.5",
        f"dataset.output={tmp_path / 'set'}",
    )
    tokenizer = Tokenizer(prepared / "tokenizer.json")
    texts = [tokenizer.decode(ids) for ids in ([5, 6, 7], [8, 9, 10, 11, 12], [40, 41])]
    assert documents_of(folder, manifest) == Counter(texts * 2)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda index: b"MMIDIDY" + index[7:], "is no index of Megatron's"),
        (lambda index: index[:9] + b"\x02" + index[10:], "version 2 with type code 8 is not known"),
        (lambda index: index[:17] + b"\x07" + index[18:], "version 1 with type code 7 is not known"),
        (lambda index: index[:-9], "is cut short"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, damage: Any, said: str) -> None:
    shutil.copy(GOLDEN / "megatron-uint16.bin", tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(damage((GOLDEN / "megatron-uint16.idx").read_bytes()))
    with pytest.raises(InputError, match=said):
        list(megatron_documents(_input(tmp_path / "a.idx"), 0, int))


def test_tokens_that_end_too_soon_and_ids_of_another_vocabulary_are_named(tmp_path: Path, prepared: Path) -> None:
    shutil.copy(GOLDEN / "megatron-uint16.idx", tmp_path / "a.idx")
    (tmp_path / "a.bin").write_bytes((GOLDEN / "megatron-uint16.bin").read_bytes()[:-4])
    with pytest.raises(InputError, match=r"a.bin ends within sequence 3 of .*a.idx"):
        list(megatron_documents(_input(tmp_path / "a.idx"), 0, int))
    np.array([5, 4000, 0], np.uint16).tofile(tmp_path / "b.bin")
    overrides = [
        "dataset=text",
        f"dataset.source={tmp_path / 'b.bin'}",
        f"dataset.tokenizer={prepared / 'tokenizer.json'}",
        "dataset.vocabulary_size=300",
    ]
    with pytest.raises(InputError, match="has the id 4000, and the tokenizer has 300"):
        prepare_with(*overrides)
    with pytest.raises(ConfigError, match="does not say of which vocabulary"):
        prepare_with(*overrides, "dataset.tokenizer=null")
