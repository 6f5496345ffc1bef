"""Preparing: what is read, rejected and split; the tokenizer; the manifest; small and empty sets (DL03)."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
from conftest import dataset_overrides, make_texts, train_py

from lm.compose import compose
from lm.config import ConfigError
from lm.data.prepare import check_fits, output_folder, prepare
from lm.data.shards import DOCUMENT, DatasetError, TokenStream, read_manifest
from lm.data.sources import BadRecord, documents, find_files
from lm.data.tokenizer import Tokenizer, train
from lm.report import make_console

ODDITIES = [
    "y is ?\r\n\ta  b \u200b e\u0301 \u00e9 \U0001f336 trailing  ",
    "def f(x):\n    return x  # don't\n\n\n",
    "<|endoftext|> in a text is text",
    "",
    " ",
    "日本語のテキスト и кириллица",
    "a" * 5000,
    "\x00\x01\x7f control",
]


def prepared_from(texts: List[Any], folder: Path, *overrides: str) -> Any:
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    dataset = compose([*dataset_overrides(source, folder / "set"), *overrides]).dataset
    return prepare(dataset, make_console())


# --- tokenizer ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train([*make_texts(20), *ODDITIES], 400, path)
    return path


def test_ids_are_hugging_faces_and_decode_to_the_same_bytes(tokenizer_file: Path) -> None:
    import tokenizers

    ours, theirs = Tokenizer(tokenizer_file), tokenizers.Tokenizer.from_file(str(tokenizer_file))
    for text in [*ODDITIES, *make_texts(5, seed=9)]:
        ids = ours.encode(text)
        if "<|endoftext|>" not in text:  # theirs would make it the separator
            assert ids == theirs.encode(text).ids
        assert ours.decode(ids) == text
        assert ours.end_of_text not in ids
    assert ours.encode_batch(ODDITIES, threads=2) == [ours.encode(text) for text in ODDITIES]
    assert ours.vocabulary_size == theirs.get_vocab_size()


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "WordPiece", "vocab": {}}, "added_tokens": []}))
    with pytest.raises(ValueError, match="not a byte-level BPE"):
        Tokenizer(path)


# --- conservation ------------------------------------------------------------------------------------


def test_every_token_of_every_document_is_there_in_order_with_one_separator(tmp_path: Path) -> None:
    texts = [text for text in [*make_texts(30), *ODDITIES] if text.strip()]
    folder, manifest = prepared_from(texts, tmp_path, "dataset.shard_bytes=1000")
    tokenizer = Tokenizer(folder / "tokenizer.json")
    found: Counter[str] = Counter()
    for name, split in manifest.splits.items():
        assert all(shard.tokens * 2 <= 1000 for shard in split.shards)
        stream = TokenStream(folder, manifest, name).read(0, split.tokens)
        table = np.fromfile(folder / split.documents_file, DOCUMENT)
        ends = [*table["first_token"][1:], split.tokens]
        for row, end in zip(table, ends):
            ids = stream[int(row["first_token"]) : int(end)]
            assert ids[-1] == manifest.end_of_text
            assert manifest.end_of_text not in ids[:-1]
            text = tokenizer.decode(ids[:-1].tolist())
            assert len(text.encode()) == row["text_bytes"]
            found[text] += 1
    assert found == Counter(texts)
    accepted = sum(len(tokenizer.encode(text)) + 1 for text in texts)
    assert sum(split.tokens for split in manifest.splits.values()) == accepted


def test_gzips_size_is_gzips(tmp_path: Path) -> None:
    folder, manifest = prepared_from(make_texts(60), tmp_path)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    split = manifest.splits["validation"]
    ids = TokenStream(folder, manifest, "validation").read(0, split.tokens)
    text = tokenizer.decode([int(i) for i in ids if i != manifest.end_of_text])
    assert split.gzip_bytes == len(gzip.compress(text.encode(), 9))


def test_a_split_depends_on_the_place_of_a_document_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    _, first = prepared_from(make_texts(60), tmp_path / "a")
    _, again = prepared_from(make_texts(60), tmp_path / "b")
    assert first.fingerprint() == again.fingerprint()
    assert 1 <= first.splits["validation"].documents <= 15


def test_a_few_text_files_are_split_within(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(f"line {i} of the only file\n" for i in range(2000)))
    config = compose([*dataset_overrides(tmp_path / "one.txt", tmp_path / "set")])
    folder, manifest = prepare(config.dataset, make_console())
    whole = (tmp_path / "one.txt").read_text()
    tokenizer = Tokenizer(folder / "tokenizer.json")
    parts = [
        tokenizer.decode(TokenStream(folder, manifest, name).read(0, manifest.splits[name].tokens - 1).tolist())
        for name in ("train", "validation")
    ]
    assert "".join(parts) == whole
    assert parts[1].startswith("line ")
    assert len(parts[1]) == pytest.approx(0.1 * len(whole), rel=0.05)


# --- bad records -------------------------------------------------------------------------------------

BAD_LINES = [
    '{"text": null}',
    '{"meta": {}}',
    '{"text": 3}',
    '{"text": ["a"]}',
    '{"text": ""}',
    '{"text": "   "}',
    "",
    "   ",
    '["a"]',
    '{"text": "unterminated',
    '{"text": NaN}',
]


def test_bad_records_are_counted_by_reason_and_never_become_text(tmp_path: Path) -> None:
    source = tmp_path / "bad.jsonl"
    good = [json.dumps({"text": f"good document {i}"}) for i in range(3)]
    source.write_text("\n".join([good[0], *BAD_LINES, good[1], '{"text": "lone \\ud83d"}', good[2]]))
    dataset = compose(dataset_overrides(source, tmp_path / "set")).dataset
    rejected: Counter[str] = Counter()
    texts = [document.text for document in documents(dataset, find_files(dataset), rejected)]
    assert texts == ["good document 0", "good document 1", "lone \ufffd", "good document 2"]
    assert rejected == {
        "text is not a string": 4,
        "no key text": 1,
        "empty text": 2,
        "not a JSON object": 1,
        "not JSON": 1,
        "lone surrogate replaced by U+FFFD (kept)": 1,
    }


def test_strict_mode_names_file_and_line(tmp_path: Path) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text('{"text": "good"}\n\n{"text": 3}\n')
    dataset = compose([*dataset_overrides(source, tmp_path / "set"), "dataset.on_bad_record=error"]).dataset
    with pytest.raises(BadRecord, match=r"bad\.jsonl:3: text is not a string"):
        list(documents(dataset, find_files(dataset), Counter()))


def test_a_wrong_text_key_is_an_error_and_no_empty_dataset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0 of 5 records .* have text in dataset.text_key=content"):
        prepared_from(make_texts(5), tmp_path, "dataset.text_key=content")
    assert not (tmp_path / "set").exists()


# --- too small (DL03) --------------------------------------------------------------------------------


def test_fewer_sequences_than_a_batch_are_refused_with_both_numbers(tmp_path: Path) -> None:
    folder, manifest = prepared_from(make_texts(30), tmp_path)
    dataset = compose(dataset_overrides(tmp_path / "source.jsonl", folder)).dataset
    tokens = manifest.splits["train"].tokens
    context = (tokens - 1) // 3
    with pytest.raises(ConfigError, match="3 sequences < batch 8"):
        check_fits(dataset, manifest, context, global_batch_sequences=8)
    assert check_fits(dataset, manifest, context, global_batch_sequences=3) == 3
    with pytest.raises(ConfigError, match=rf"model.context={tokens} is longer than the dataset text: {tokens}"):
        check_fits(dataset, manifest, tokens, global_batch_sequences=1)


@pytest.mark.parametrize(("name", "said"), [("empty", "matches no file"), ("nothing/*.txt", "matches no file")])
def test_an_empty_folder_and_a_glob_of_nothing_are_refused_before_anything(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    done = train_py("dataset=text", f"dataset.source={tmp_path / name}")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(Path("outputs").rglob("checkpoints"))


def test_a_dataset_without_its_source_says_what_to_type() -> None:
    done = train_py("dataset=text")
    assert done.returncode == 2
    assert "dataset.source=FOLDER" in done.stderr


def test_no_document_for_validation_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of them is for validation"):
        prepared_from(make_texts(3), tmp_path, "dataset.validation_fraction=0.001")


# --- the folder --------------------------------------------------------------------------------------


def test_a_set_is_prepared_once_and_another_one_is_refused_its_folder(tmp_path: Path) -> None:
    folder, manifest = prepared_from(make_texts(40), tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again, same = prepared_from(make_texts(40), tmp_path)
    assert (again, same.fingerprint()) == (folder, manifest.fingerprint())
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with pytest.raises(ConfigError, match=r"dataset.vocabulary_size=301, and the set in .* was prepared with 300"):
        prepared_from(make_texts(40), tmp_path, "dataset.vocabulary_size=301")


def test_text_that_has_changed_since_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared_from(make_texts(40), tmp_path)
    assert "warning" not in capsys.readouterr().out
    prepared_from(make_texts(41), tmp_path)
    assert "are not those that" in capsys.readouterr().out


def test_the_fingerprint_is_of_the_tokens_and_not_of_the_shards(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    _, large = prepared_from(make_texts(40), tmp_path / "a")
    _, small = prepared_from(make_texts(40), tmp_path / "b", "dataset.shard_bytes=1000")
    assert len(small.splits["train"].shards) > len(large.splits["train"].shards)
    assert small.fingerprint() == large.fingerprint()


def test_files_that_are_no_dataset_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="it is no dataset, and nothing there is overwritten"):
        prepared_from(make_texts(40), tmp_path)
    assert (tmp_path / "set" / "thesis.txt").read_text() == "mine"


def test_a_half_written_set_is_never_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm.data.prepare as module

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.Manifest, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            prepared_from(make_texts(40), tmp_path)
    assert not (tmp_path / "set").exists()
    folder, _ = prepared_from(make_texts(40), tmp_path)
    assert read_manifest(folder).splits["train"].documents > 0
    assert not list(tmp_path.glob("*.partial"))


def test_files_that_the_manifest_does_not_match_are_refused(tmp_path: Path) -> None:
    folder, manifest = prepared_from(make_texts(40), tmp_path)
    shard = folder / manifest.splits["train"].shards[0].file
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    with pytest.raises(DatasetError, match=rf"has {len(content) - 2:,} bytes; the manifest says {len(content):,}"):
        read_manifest(folder)
    shard.unlink()
    with pytest.raises(DatasetError, match="is missing"):
        read_manifest(folder)


@pytest.mark.parametrize("content", ["", "{}", '{"format": 1, "splits": {}}', "[]"])
def test_a_damaged_manifest_is_told_without_a_traceback(tmp_path: Path, content: str) -> None:
    folder, _ = prepared_from(make_texts(40), tmp_path)
    (folder / "manifest.json").write_text(content)
    with pytest.raises(DatasetError, match=r"manifest\.json cannot be read"):
        read_manifest(folder)


def test_the_default_folder_is_named_by_what_is_in_it() -> None:
    one, other = (compose([f"dataset.vocabulary_size={size}"]).dataset for size in (4096, 8192))
    assert output_folder(one) != output_folder(other)
    assert output_folder(one).parent == Path("outputs/datasets")


def test_the_standard_library_is_found() -> None:
    files = find_files(compose([]).dataset)
    assert len(files) > 300
    assert not any("site-packages" in path.parts for path in files)
