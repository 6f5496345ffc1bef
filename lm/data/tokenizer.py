"""Byte-level BPE: trained and stored as a tokenizer.json, encoded and decoded by tiktoken with the same ids.

A tokenizer.json of another making (GPT-2's, GPT-NeoX's) is taken too. What tiktoken cannot express, such as a
normalizer or added tokens that are no separators, is encoded by Hugging Face's own library, a sixth as fast.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List

import numpy as np

END_OF_TEXT = "<|endoftext|>"
# GPT-2's split into words, numbers, punctuation and spaces (openai/gpt-2, encoder.py): what the ByteLevel
# pre-tokenizer of a tokenizer.json does.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class TokenizerError(Exception):
    """A tokenizer.json that cannot be used; the message says why."""


def train(texts: Iterable[str], vocabulary_size: int, path: Path) -> None:
    """Trains a byte-level BPE of at most vocabulary_size ids, end-of-text included, and writes tokenizer.json."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


class Tokenizer:
    """Encodes and decodes with a byte-level tokenizer.json.

    path: of the tokenizer.json. slow: why it is not encoded by tiktoken; nothing where it is.
    Raises TokenizerError for a file that is no byte-level BPE with an end-of-text id.
    """

    def __init__(self, path: Path) -> None:
        content = Path(path).read_bytes()
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            self._stored: Dict[str, Any] = json.loads(content)
            model, added = self._stored["model"], self._stored["added_tokens"]
            vocabulary = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
            if model.get("type", "BPE") != "BPE" or END_OF_TEXT not in vocabulary:
                raise TokenizerError(f"{path} is not a byte-level BPE with {END_OF_TEXT}")
            for token in added:  # the separator is special whatever the file says: its literal text is text
                token["special"] = token["content"] == END_OF_TEXT or bool(token.get("special"))
            self.slow = _beyond_tiktoken(self._stored)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(f"{path} is no tokenizer.json ({type(error).__name__}: {error})") from None
        self.end_of_text: int = vocabulary[END_OF_TEXT]
        self.vocabulary_size = max(vocabulary.values()) + 1
        self._bytes_of = _bytes_of_ids(model["vocab"], added)

    def encode(self, text: str) -> np.ndarray[Any, Any]:
        """Ids of a text. The literal text <|endoftext|> in it is text, never the separator."""
        if self.slow:
            return self._hugging_face(text)
        try:
            return self._tiktoken(text)
        except ValueError:  # its regular expressions have a stack that a million spaces in a row overflow
            return self._hugging_face(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids; nothing for an id that the vocabulary does not use."""
        return b"".join(self._bytes_of.get(int(i), b"") for i in ids)

    @functools.cached_property
    def _tiktoken(self) -> Callable[[str], np.ndarray[Any, Any]]:
        import tiktoken

        vocabulary = self._stored["model"]["vocab"]
        special = {token["content"]: token["id"] for token in self._stored["added_tokens"]}
        special.setdefault(END_OF_TEXT, self.end_of_text)
        ranks = {self._bytes_of[rank]: rank for token, rank in vocabulary.items() if token not in special}
        pattern = _pattern(self._stored["pre_tokenizer"])
        encoding = tiktoken.Encoding("lm", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        if not hasattr(encoding, "encode_to_numpy"):  # in the training image, which encodes prompts alone
            return lambda text: np.array(encoding.encode_ordinary(text), np.uint32)
        return lambda text: encoding.encode_to_numpy(text, disallowed_special=())

    @functools.cached_property
    def _hugging_face(self) -> Callable[[str], np.ndarray[Any, Any]]:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self._stored))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # as ordinary text
        return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)


def check_encodes(tokenizer: Tokenizer) -> None:
    """Makes the encoder, and encodes a word. Raises TokenizerError where the library does not take the file."""
    try:
        ids = tokenizer.encode(f"a word {END_OF_TEXT}")
    except Exception as error:  # tokenizers has no class of its own for it
        raise TokenizerError(f"it cannot encode: {error}") from None
    if tokenizer.end_of_text in ids:
        raise TokenizerError(f"it takes the text {END_OF_TEXT} for the separator")


def _bytes_of_ids(vocabulary: Dict[str, int], added: List[Dict[str, Any]]) -> Dict[int, bytes]:
    """The bytes of each id: a byte a character in the vocabulary, plain text in what was added."""
    byte_of = _byte_of_character()
    bytes_of = {
        rank: bytes(byte_of[character] for character in token)
        for token, rank in vocabulary.items()
        if all(character in byte_of for character in token)
    }
    return {**bytes_of, **{token["id"]: token["content"].encode() for token in added}}


def _beyond_tiktoken(stored: Dict[str, Any]) -> str:
    """What of a tokenizer.json tiktoken cannot express; nothing where it can do all."""
    model = stored["model"]
    if stored.get("normalizer"):
        return f"a normalizer ({stored['normalizer'].get('type')})"
    added = [token["content"] for token in stored["added_tokens"] if not token.get("special")]
    if added:
        return f"{len(added)} added tokens that are not special ({added[0]!r})"
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            return f"the model's {key}"
    if _pattern(stored.get("pre_tokenizer")) is None:
        return "a pre-tokenizer other than ByteLevel, or Split and ByteLevel"
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    ids = [model["vocab"].get(first + second, -1) for first, second in merges]
    if any(a >= b for a, b in zip(ids, ids[1:])):
        return "merges in another order than their ids"
    single = set(_byte_of_character())
    made = {first + second for first, second in merges} | single
    special = {token["content"] for token in stored["added_tokens"]} | {END_OF_TEXT}
    if any(token not in made and token not in special for token in model["vocab"]):
        return "tokens that no merge makes"
    if not single <= set(model["vocab"]):
        return "bytes without an id"
    try:
        import tiktoken
    except ImportError:
        return ""  # asked for only by who encodes
    try:
        tiktoken.Encoding("lm", pat_str=_pattern(stored["pre_tokenizer"]), mergeable_ranks={b"a": 0}, special_tokens={})
    except ValueError:
        return "a split that tiktoken's regular expressions do not take"
    return ""


def _pattern(pre_tokenizer: Any) -> Any:
    """The regular expression that cuts a text into words, or None for another kind of pre-tokenizer."""
    steps = pre_tokenizer or {}
    steps = steps.get("pretokenizers", [steps])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1 and steps[0].get("use_regex", True):
        return PATTERN
    split = steps[0]
    plain = split.get("type") == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    if len(steps) == 2 and plain and not steps[1].get("use_regex", True):
        return split["pattern"].get("Regex")
    return None


def _byte_of_character() -> Dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (openai/gpt-2, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + i): byte for i, byte in enumerate(others)},
    }
