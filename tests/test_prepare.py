"""Preparing: token conservation (D08), small and empty sets (DL03), resuming, and what is never overwritten."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
from conftest import SMALL, dataset_overrides, make_texts, train_py
from inputs import ODDITIES, good_records, record, zst
from rich.console import Console

from lm.compose import compose
from lm.data import encode, parts, workers
from lm.data.files import InputError
from lm.data.fit import check_fits
from lm.data.prepare import BEGUN, prepare
from lm.data.shards import (
    DOCUMENT,
    PARTS,
    DatasetError,
    Manifest,
    documents_file,
    output_folder,
    read_manifest,
)
from lm.data.streams import TokenStream
from lm.data.tokenizer import Tokenizer
from lm.refusal import ConfigError
from lm.report import make_console


def prepare_with(*overrides: str) -> Any:
    config = compose(overrides)
    return prepare(config.dataset, config.prepare, make_console())


def prepared_from(texts: List[Any], folder: Path, *overrides: str) -> Any:
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prepare_with(*dataset_overrides(source, folder / "set"), *overrides)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a dataset with its content, by its name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- conservation --------------------------------------------------------------------------------------


def documents_of(folder: Path, manifest: Manifest) -> Counter[str]:
    """Every document's text, found by the tables; the separators checked on the way."""
    tokenizer = Tokenizer(folder / "tokenizer.json")
    found: Counter[str] = Counter()
    for part in manifest.parts:
        for name, split in part.splits.items():
            place = folder / PARTS / part.name
            tokens = np.concatenate([np.fromfile(place / shard.file, manifest.dtype) for shard in split.shards] or [[]])
            table = np.fromfile(place / documents_file(name), DOCUMENT)
            assert len(tokens) == split.tokens
            assert len(table) == split.documents
            for row, end in zip(table, [*table["first_token"][1:], split.tokens]):
                ids = tokens[int(row["first_token"]) : int(end)]
                assert ids[-1] == manifest.end_of_text
                assert manifest.end_of_text not in ids[:-1]
                text = tokenizer.decode(ids[:-1])
                assert len(text.encode()) == row["text_bytes"]
                found[text] += 1
    return found


@pytest.mark.parametrize("shard_bytes", [1000, 2**30])
@pytest.mark.parametrize("workers", [1, 2])
def test_every_token_of_every_document_is_there_with_one_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int, workers: int
) -> None:
    monkeypatch.setattr(parts, "SPLIT_BYTES", 30_000)
    monkeypatch.setattr(parts, "JOIN_BYTES", 1)
    texts = [text for text in [*make_texts(60), *ODDITIES] if text.strip()]
    texts.append(" ".join(f"w{number}" for number in range(30_000)))  # of many sequences
    folder, manifest = prepared_from(
        texts, tmp_path, f"dataset.shard_bytes={shard_bytes}", f"prepare.workers={workers}"
    )
    assert len(manifest.parts) > 3
    assert documents_of(folder, manifest) == Counter(texts)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    totals = [manifest.totals(name) for name in manifest.parts[0].splits]
    assert sum(total.tokens for total in totals) == sum(len(tokenizer.encode(text)) + 1 for text in texts)
    assert sum(total.documents for total in totals) == len(texts)
    assert sum(total.text_bytes for total in totals) == sum(len(text.encode()) for text in texts)
    sizes = [path.stat().st_size for path in folder.rglob("*-*.bin")]
    assert max(sizes) <= shard_bytes


def test_the_bytes_do_not_depend_on_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SPLIT_BYTES", 30_000)
    monkeypatch.setattr(parts, "JOIN_BYTES", 1)
    source = tmp_path / "source.jsonl"
    source.write_bytes(b"".join(record(text, f"set {n % 3}") for n, text in enumerate(make_texts(80))))
    found = []
    for count in (1, 2, 3):
        folder = tmp_path / str(count)
        prepare_with(*dataset_overrides(source, folder), f"prepare.workers={count}")
        found.append(files_of(folder))
    assert found[0] == found[1] == found[2]
    assert f"{PARTS}/00003/train-00000.bin" in found[0]


def test_sources_are_neighbours_and_are_found(tmp_path: Path) -> None:
    texts = make_texts(90)
    source = tmp_path / "source.jsonl"
    source.write_bytes(b"".join(record(text, "ABC"[n % 3]) for n, text in enumerate(texts)))
    folder, manifest = prepare_with(*dataset_overrides(source, tmp_path / "set"))
    tokenizer = Tokenizer(folder / "tokenizer.json")
    for at, name in enumerate("ABC"):
        stream = TokenStream.of(folder, manifest, "train", [name])
        text = tokenizer.decode(i for i in stream.read(0, stream.tokens) if i != manifest.end_of_text)
        held_out = TokenStream.of(folder, manifest, "validation", [name])
        text += tokenizer.decode(i for i in held_out.read(0, held_out.tokens) if i != manifest.end_of_text)
        assert Counter(text.split("\n")) == Counter("".join(texts[at::3]).split("\n"))
    assert list(manifest.source_tokens("train")) == ["A", "B", "C"]


def test_gzips_size_is_gzips(tmp_path: Path) -> None:
    folder, manifest = prepared_from(make_texts(60), tmp_path)
    tokenizer = Tokenizer(folder / "tokenizer.json")
    held_out = TokenStream.of(folder, manifest, "validation")
    text = tokenizer.decode(i for i in held_out.read(0, held_out.tokens) if i != manifest.end_of_text)
    assert manifest.totals("validation").gzip_bytes == len(gzip.compress(text.encode(), 9))


def test_the_separators_literal_text_never_separates(tmp_path: Path) -> None:
    texts = [*make_texts(40), "one <|endoftext|> document"]
    folder, manifest = prepared_from(texts, tmp_path)
    assert documents_of(folder, manifest) == Counter(texts)


# --- the tokenizer -------------------------------------------------------------------------------------


def test_a_given_tokenizer_is_kept_and_checked(tmp_path: Path, prepared: Path, capsys: Any) -> None:
    given = prepared / "tokenizer.json"
    folder, manifest = prepared_from(make_texts(40), tmp_path, f"dataset.tokenizer={given}")
    assert (folder / "tokenizer.json").read_bytes() == given.read_bytes()
    assert "warning" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=f"dataset.vocabulary_size=299, and .* has {manifest.vocabulary_size} ids"):
        prepare_with("dataset=text", f"dataset.tokenizer={given}", "dataset.vocabulary_size=299")
    with pytest.raises(ConfigError, match=r"dataset\.tokenizer=nowhere\.json"):
        prepare_with("dataset=text", "dataset.tokenizer=nowhere.json")
    stored = json.loads(given.read_text())
    (tmp_path / "slow.json").write_text(json.dumps({**stored, "normalizer": {"type": "NFC"}}))
    (tmp_path / "b").mkdir()
    folder, manifest = prepared_from(make_texts(40), tmp_path / "b", f"dataset.tokenizer={tmp_path}/slow.json")
    assert "warning: the tokenizer has a normalizer (NFC), which tiktoken cannot express" in capsys.readouterr().out
    assert documents_of(folder, manifest) == Counter(make_texts(40))


# --- too small -----------------------------------------------------------------------------------------


def test_fewer_sequences_than_a_batch_are_refused_with_both_numbers(tmp_path: Path) -> None:
    folder, manifest = prepared_from(make_texts(30), tmp_path)
    tokens = manifest.totals("train").tokens

    def fits(context: int, batch: int) -> int:
        text = [f"model.context={context}", f"train.global_batch_sequences={batch}"]
        config = compose([*dataset_overrides(tmp_path / "source.jsonl", folder), *text])
        return sum(check_fits(config, folder, manifest).sequences().values())

    context = (tokens - 1) // 3
    with pytest.raises(ConfigError, match="3 sequences < batch 8"):
        fits(context, 8)
    assert fits(context, 3) == 3
    with pytest.raises(ConfigError, match=rf"model.context={tokens} is longer than the dataset text: {tokens}"):
        fits(tokens, 1)


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


def test_a_tiny_source_ends_in_a_refusal_and_not_in_zero_steps(tmp_path: Path) -> None:
    path = zst(tmp_path / "tiny.jsonl.zst", [record("hi")])
    done = train_py(*SMALL, "dataset=text", f"dataset.source={path}")
    assert done.returncode == 2
    assert "dataset.source=" in done.stderr
    assert "none of them is for validation" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dataset_without_its_source_says_what_to_type() -> None:
    done = train_py("dataset=text")
    assert done.returncode == 2
    assert "dataset.source=a folder, a file, a URL" in done.stderr


def test_no_document_for_validation_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of them is for validation"):
        prepared_from(make_texts(3), tmp_path, "dataset.validation_fraction=0.001")
    assert not (tmp_path / "set").exists()


def test_a_wrong_text_key_is_an_error_and_no_empty_dataset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0 of 5 records .* have text in dataset.text_key=content"):
        prepared_from(make_texts(5), tmp_path, "dataset.text_key=content")
    with pytest.raises(ConfigError, match=r"0 of 5 records .* have text in dataset.text_key=text"):
        prepared_from([None, 1, [], "", " "], tmp_path)
    assert not (tmp_path / "set").exists()


# --- the folder ----------------------------------------------------------------------------------------


def test_a_set_is_prepared_once_and_another_one_is_refused_its_folder(tmp_path: Path) -> None:
    folder, manifest = prepared_from(make_texts(40), tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again, same = prepared_from(make_texts(40), tmp_path)
    assert (again, same.fingerprint()) == (folder, manifest.fingerprint())
    assert {path.name: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
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
    assert len(small.parts[0].splits["train"].shards) > len(large.parts[0].splits["train"].shards)
    assert small.fingerprint() == large.fingerprint()


def test_files_that_are_no_dataset_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="it is no dataset, and nothing there is overwritten"):
        prepared_from(make_texts(40), tmp_path)
    assert (tmp_path / "set" / "thesis.txt").read_text() == "mine"


def test_a_damaged_file_keeps_the_parts_that_are_done_and_no_manifest(
    tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "JOIN_BYTES", 1)
    records = good_records(200)
    for name in ("a", "b", "c"):
        zst(tmp_path / f"{name}.jsonl.zst", [b"".join(records)])
    whole = (tmp_path / "b.jsonl.zst").read_bytes()
    (tmp_path / "b.jsonl.zst").write_bytes(whole[:-9])
    overrides = [*dataset_overrides(tmp_path / "*.zst", tmp_path / "set"), "prepare.workers=1"]
    overrides.append(f"dataset.tokenizer={prepared / 'tokenizer.json'}")
    with pytest.raises(InputError, match=r"b\.jsonl\.zst is cut short"):
        prepare_with(*overrides)
    assert sorted(path.name for path in (tmp_path / "set" / PARTS).iterdir()) == ["00000"]
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path / "set")
    (tmp_path / "b.jsonl.zst").write_bytes(whole)
    with pytest.raises(ConfigError, match="have changed since"):
        prepare_with(*overrides)


def test_an_interrupted_preparation_goes_on_with_what_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "JOIN_BYTES", 1)
    for name in ("a", "b", "c"):
        zst(tmp_path / f"{name}.jsonl.zst", [b"".join(map(record, make_texts(50, seed=ord(name))))])
    overrides = [*dataset_overrides(tmp_path / "*.zst", tmp_path / "set"), "prepare.workers=1"]
    reference, _ = prepare_with(*overrides, f"dataset.output={tmp_path / 'reference'}")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(encode, "_sync", lambda folder: killed() if ".00001" in folder.name else None)
        with pytest.raises(KeyboardInterrupt):
            prepare_with(*overrides)
    assert (tmp_path / "set" / BEGUN).exists()
    with pytest.raises(ConfigError, match=r"dataset\.vocabulary_size=301, and the set in"):
        prepare_with(*overrides, "dataset.vocabulary_size=301")
    done = tmp_path / "set" / PARTS / "00000" / "part.json"
    before = done.stat().st_mtime_ns
    (tmp_path / "set" / PARTS / ".00001.left").mkdir()
    prepare_with(*overrides)
    assert done.stat().st_mtime_ns == before
    assert files_of(tmp_path / "set") == files_of(reference)


def test_files_that_change_under_a_preparation_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same names and sizes, other contents: what was done and what is to come would not belong together."""
    monkeypatch.setattr(parts, "JOIN_BYTES", 1)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(map(record, make_texts(30))))
    overrides = [*dataset_overrides(tmp_path / "*.jsonl", tmp_path / "set"), "prepare.workers=1"]

    def killed(folder: Path) -> None:
        if ".00001" in folder.name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(encode, "_sync", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare_with(*overrides)
    (tmp_path / "a.jsonl").rename(tmp_path / "c")
    (tmp_path / "b.jsonl").rename(tmp_path / "a.jsonl")
    (tmp_path / "c").rename(tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match="have changed since"):
        prepare_with(*overrides)


@pytest.mark.parametrize("output", ["a_file", "a_file/set", "/proc/nowhere/set"])
def test_an_output_that_cannot_be_is_refused(tmp_path: Path, output: str) -> None:
    Path("a_file").write_text("x")
    with pytest.raises(ConfigError, match=f"dataset.output={output} cannot be written"):
        prepared_from(make_texts(3), tmp_path, f"dataset.output={output}")


def test_memory_does_not_grow_with_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that do not fit in memory wait in a file, and the set has the same bytes."""
    from lm.data import writer

    source = tmp_path / "source.jsonl"
    source.write_bytes(b"".join(record(text, f"set {n % 30}") for n, text in enumerate(make_texts(300))))
    found = []
    for budget in (2**26, 5_000):
        monkeypatch.setattr(writer, "IN_MEMORY_BYTES", budget)
        folder, _ = prepare_with(*dataset_overrides(source, tmp_path / str(budget)))
        found.append(files_of(folder))
    assert found[0] == found[1]


def test_progress_reaches_the_display_from_dasks_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "JOIN_BYTES", 1)
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_bytes(b"".join(map(record, make_texts(30))) + b"[]\n")
    told: List[Any] = []
    monkeypatch.setattr(workers.Display, "update", lambda self, progress: told.append(progress))
    prepare_with(*dataset_overrides(tmp_path / "*.jsonl", tmp_path / "set"), "prepare.workers=2")
    done = {progress.part: progress for progress in told if progress.done}
    assert sorted(done) == ["00000", "00001", "00002"]
    assert all(progress.rejected == {"not a JSON object": 1} for progress in done.values())
    assert sum(progress.documents for progress in done.values()) == 90


def test_progress_is_told_in_numbers(tmp_path: Path) -> None:
    console = Console(width=200, file=io.StringIO(), force_terminal=True)
    with workers.Display(console, 1000) as display:
        display.update(encode.Progress("00000", 400, 2_000_000, 12, {"not JSON": 3}))
        display.update(encode.Progress("00001", 600, 2_000_000, 8, {"not JSON": 1, "empty text": 2}, done=True))
        shown = display._numbers(list(display._tasks.values()))
    assert "MB/s of text, 20 documents, 4 not JSON, 2 empty text" in shown
    assert "encoding" in console.file.getvalue()


def test_files_that_the_manifest_does_not_match_are_refused(tmp_path: Path) -> None:
    folder, manifest = prepared_from(make_texts(40), tmp_path)
    shard = folder / PARTS / "00000" / manifest.parts[0].splits["train"].shards[0].file
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    with pytest.raises(DatasetError, match=rf"has {len(content) - 2:,} bytes; the manifest says {len(content):,}"):
        read_manifest(folder)
    shard.unlink()
    with pytest.raises(DatasetError, match="is missing"):
        read_manifest(folder)


@pytest.mark.parametrize("content", ["", "{}", '{"format": 2, "parts": {}}', "[]"])
def test_a_damaged_manifest_is_told_without_a_traceback(tmp_path: Path, content: str) -> None:
    folder, _ = prepared_from(make_texts(40), tmp_path)
    (folder / "manifest.json").write_text(content)
    with pytest.raises(DatasetError, match=r"manifest\.json cannot be read"):
        read_manifest(folder)


def test_a_set_of_another_format_says_so(tmp_path: Path) -> None:
    folder, _ = prepared_from(make_texts(40), tmp_path)
    stored = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**stored, "format": 1}))
    with pytest.raises(DatasetError, match="has format 1, this program reads 2"):
        read_manifest(folder)


def test_the_default_folder_is_named_by_what_is_in_it() -> None:
    one, other = (compose([f"dataset.vocabulary_size={size}"]).dataset for size in (4096, 8192))
    assert output_folder(one) != output_folder(other)
    assert output_folder(one).parent == Path("outputs/datasets")
