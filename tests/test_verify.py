"""A prepared set against its manifest: every kind of damage is told with shard and place (DL01)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from conftest import make_texts

from lm.cli import main
from lm.compose import compose
from lm.data.prepare import prepare
from lm.data.shards import DOCUMENT, PARTS
from lm.report import make_console

MIB = 2**20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of several shards, the first of them of several checked blocks."""
    folder = tmp_path_factory.mktemp("whole")
    texts = make_texts(400) * 6
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n, text in enumerate(texts)))
    overrides = [
        "dataset=text",
        f"dataset.source={folder / 'a.jsonl'}",
        f"dataset.output={folder / 'set'}",
        "dataset.vocabulary_size=300",
        f"dataset.shard_bytes={3 * MIB}",
    ]
    config = compose(overrides)
    prepare(config.dataset, config.prepare, make_console())
    return folder / "set"


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage: its part's folder."""
    shutil.copytree(whole, tmp_path / "set")
    return tmp_path / "set" / PARTS / "00000"


def test_a_whole_set_is_told_to_be_whole(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(whole)]) == 0
    assert "whole: 3 shards, 2,400 documents, " in capsys.readouterr().out


def flip(name: str, at: int) -> Callable[[Path], None]:
    def work(part: Path) -> None:
        content = bytearray((part / name).read_bytes())
        content[at] ^= 1
        (part / name).write_bytes(content)

    return work


def resize(name: str, by: int) -> Callable[[Path], None]:
    def work(part: Path) -> None:
        content = (part / name).read_bytes()
        (part / name).write_bytes(content[:by] if by < 0 else content + b"\0" * by)

    return work


def swap(first: str, second: str) -> Callable[[Path], None]:
    def work(part: Path) -> None:
        (part / first).rename(part / "aside")
        (part / second).rename(part / first)
        (part / "aside").rename(part / second)

    return work


def edit_manifest(part: Path) -> None:
    path = part.parent.parent / "manifest.json"
    stored = json.loads(path.read_text())
    stored["parts"][0]["splits"]["train"]["sources"][0]["text_bytes"] += 1
    path.write_text(json.dumps(stored))


def move_a_document(part: Path) -> None:
    """A table and its checksum that agree, and tokens that say otherwise."""
    import hashlib

    table = np.fromfile(part / "train.documents.bin", DOCUMENT)
    table["first_token"][7] += 1
    table.tofile(part / "train.documents.bin")
    path = part.parent.parent / "manifest.json"
    stored = json.loads(path.read_text())
    stored["parts"][0]["splits"]["train"]["documents_sha256"] = hashlib.sha256(table.tobytes()).hexdigest()
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip("train-00000.bin", MIB + 5), "train-00000.bin is damaged between bytes 1,048,576 and 2,097,152"),
        (flip("train-00000.bin", 0), "train-00000.bin is damaged between bytes 0 and 1,048,576"),
        (resize("train-00000.bin", -MIB), "train-00000.bin has 2,097,152 bytes; the manifest says 3,145,728 bytes"),
        (resize("train-00001.bin", -3), "train-00001.bin has "),
        (resize("train-00001.bin", 2), "train-00001.bin has "),
        (resize("train-00001.bin", -10 * MIB), "train-00001.bin has 0 bytes; the manifest says "),
        (flip("train.documents.bin", 40), "train.documents.bin has another SHA-256 than the manifest says"),
        (lambda part: (part / "validation-00000.bin").unlink(), "validation-00000.bin is missing"),
        (flip("../../tokenizer.json", 100), "tokenizer.json is missing, or is not the tokenizer that the tokens"),
        (edit_manifest, "bytes of text, the manifest says"),
        (move_a_document, "they part at row 7"),
    ],
)
def test_every_kind_of_damage_is_named(
    damaged: Path, damage: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(damaged)
    assert main(["verify", str(damaged.parent.parent)]) == 1
    assert said in capsys.readouterr().err


def test_a_changed_shard_without_its_crcs_is_still_found(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip("train-00000.bin", 5)(damaged)
    (damaged / "train-00000.bin.crc32").unlink()
    assert main(["verify", str(damaged.parent.parent)]) == 1
    said = capsys.readouterr().err
    assert "train-00000.bin has another SHA-256 than the manifest says, and train-00000.bin.crc32 does not tell" in said


def test_damaged_crcs_are_not_a_damaged_shard(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip("train-00000.bin.crc32", 0)(damaged)
    (damaged / "train-00001.bin.crc32").unlink()
    assert main(["verify", str(damaged.parent.parent)]) == 1
    said = capsys.readouterr().err
    for shard in ("train-00000.bin", "train-00001.bin"):
        assert f"{shard}.crc32 is damaged or cut short; the shard itself is whole" in said


def test_another_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "is no prepared dataset: it has no manifest.json" in capsys.readouterr().err
