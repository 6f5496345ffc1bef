"""Byte-level BPE: trained and stored as a tokenizer.json, encoded and decoded by tiktoken with the same ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Dict, Iterable, List

END_OF_TEXT = "<|endoftext|>"
# GPT-2's split into words, numbers, punctuation and spaces (openai/gpt-2, encoder.py): what the ByteLevel
# pre-tokenizer of a tokenizer.json does.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


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


def _byte_of_character() -> Dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (openai/gpt-2, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + i): byte for i, byte in enumerate(others)},
    }


class Tokenizer:
    """Encodes and decodes with a byte-level tokenizer.json.

    path: of the tokenizer.json. Raises ValueError for a file that is no byte-level BPE with an end-of-text id.
    """

    def __init__(self, path: Path) -> None:
        import tiktoken

        content = Path(path).read_bytes()
        self.sha256 = hashlib.sha256(content).hexdigest()
        stored: Dict[str, Any] = json.loads(content)
        special = {token["content"]: token["id"] for token in stored["added_tokens"]}
        if stored["model"].get("type") != "BPE" or END_OF_TEXT not in special:
            raise ValueError(f"{path} is not a byte-level BPE with {END_OF_TEXT}")
        byte_of = _byte_of_character()
        ranks = {
            bytes(byte_of[character] for character in token): rank
            for token, rank in stored["model"]["vocab"].items()
            if token not in special
        }
        self.end_of_text: int = special[END_OF_TEXT]
        self.vocabulary_size = max([*ranks.values(), *special.values()]) + 1
        self._encoding = tiktoken.Encoding(
            "lm", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str) -> List[int]:
        """Ids of a text. The literal text <|endoftext|> in it is text, never the separator."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: List[str], threads: int) -> List[List[int]]:
        """Ids of each text."""
        return self._encoding.encode_ordinary_batch(texts, num_threads=threads)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self._encoding.decode(list(ids))
