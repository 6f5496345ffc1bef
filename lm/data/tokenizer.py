"""Byte-level BPE: trained and stored as a tokenizer.json, encoded and decoded by tiktoken with the same ids.

A tokenizer.json of another making (GPT-2's, GPT-NeoX's) is taken too. What tiktoken cannot express, such as a
normalizer or added tokens that are no separators, is encoded by Hugging Face's own library, a sixth as fast.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Dict, Iterable, List, Union

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
            stored: Dict[str, Any] = json.loads(content)
            vocabulary = {**stored["model"]["vocab"], **{t["content"]: t["id"] for t in stored["added_tokens"]}}
            kind = stored["model"].get("type", "BPE")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(f"{path} is no tokenizer.json ({type(error).__name__}: {error})") from None
        if kind != "BPE" or END_OF_TEXT not in vocabulary:
            raise TokenizerError(f"{path} is not a byte-level BPE with {END_OF_TEXT}")
        self.end_of_text: int = vocabulary[END_OF_TEXT]
        self.vocabulary_size = max(vocabulary.values()) + 1
        self.slow = _beyond_tiktoken(stored)
        self._encoding: Union[_Tiktoken, _HuggingFace]
        if not self.slow:
            self._encoding = _Tiktoken(stored)
        else:
            try:
                self._encoding = _HuggingFace(content.decode())
            except Exception as error:  # the library has no class of its own for it
                raise TokenizerError(f"{path} is no tokenizer.json ({error})") from None

    def encode(self, text: str) -> np.ndarray[Any, Any]:
        """Ids of a text. The literal text <|endoftext|> in it is text, never the separator."""
        return self._encoding.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids."""
        return self._encoding.decode_bytes([int(i) for i in ids])


class _Tiktoken:
    """tiktoken over the merges of a tokenizer.json."""

    def __init__(self, stored: Dict[str, Any]) -> None:
        import tiktoken

        byte_of = _byte_of_character()
        special = {token["content"]: token["id"] for token in stored["added_tokens"]}
        special.setdefault(END_OF_TEXT, stored["model"]["vocab"].get(END_OF_TEXT))
        ranks = {
            bytes(byte_of[character] for character in token): rank
            for token, rank in stored["model"]["vocab"].items()
            if token not in special
        }
        self.encoding = tiktoken.Encoding(
            "lm", pat_str=_pattern(stored["pre_tokenizer"]), mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str) -> np.ndarray[Any, Any]:
        if hasattr(self.encoding, "encode_to_numpy"):  # not in the training image, which encodes prompts alone
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        return np.array(self.encoding.encode_ordinary(text), np.uint32)

    def decode_bytes(self, ids: List[int]) -> bytes:
        return self.encoding.decode_bytes(ids)


class _HuggingFace:
    """Hugging Face's tokenizers."""

    def __init__(self, content: str) -> None:
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_str(content)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # as ordinary text

    def encode(self, text: str) -> np.ndarray[Any, Any]:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode_bytes(self, ids: List[int]) -> bytes:
        return self.tokenizer.decode(ids, skip_special_tokens=False).encode()


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
