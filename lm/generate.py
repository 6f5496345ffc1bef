"""Text from a model: the next token again and again, in one compiled loop over a window of fixed length."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Tuple

import tensorflow as tf

from lm.data.shards import TOKENIZER, Manifest
from lm.data.streams import TokenStream
from lm.data.tokenizer import Tokenizer
from lm.schema import Config

PROMPT_TOKENS = 32
TEMPERATURE = 0.8
TOP_K = 40


def generate(model: Any, context: int, usable_ids: int, prompt: List[int], count: int, seed: int) -> List[int]:
    """Samples up to count ids after a prompt, as many as the context has room for.

    usable_ids: the tokenizer's; a model may have more rows, and those are never sampled.
    """
    prompt = prompt[-(context - 1) :]
    count = min(count, context - len(prompt))
    window = prompt + [0] * (context - len(prompt))
    tokens = _sample(model, usable_ids)(
        tf.constant([window], tf.int32), tf.constant(len(prompt)), tf.constant(count), tf.constant(seed, tf.int64)
    )
    return tokens.numpy()[0, len(prompt) : len(prompt) + count].tolist()


def continue_text(model: Any, config: Config, data: Path, manifest: Manifest) -> str:
    """What the model writes after the beginning of the held-out text; ">>>" marks where it takes over."""
    tokenizer = Tokenizer(data / TOKENIZER)
    held_out = TokenStream.of(data, manifest, "validation")
    context = config.model.context
    prompt = held_out.read(0, min(held_out.tokens, context // 2, PROMPT_TOKENS)).tolist()
    ids = generate(
        model, context, tokenizer.vocabulary_size, prompt, config.train.sample_tokens, config.run.seed
    )
    return f"{tokenizer.decode(prompt)}>>>{tokenizer.decode(ids)}\n"


def _sample(model: Any, usable_ids: int) -> Any:
    @tf.function(autograph=False)
    def sample(tokens_1T: tf.Tensor, length: tf.Tensor, count: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        end = length + count

        def one_more(tokens_1T: tf.Tensor, length: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
            # positions from length on are padding, which no earlier position sees
            logits_V = model(tokens_1T)[0, length - 1, :usable_ids] / TEMPERATURE
            best, ids = tf.math.top_k(logits_V, min(TOP_K, usable_ids))
            seeds = tf.stack([seed, tf.cast(length, tf.int64)])
            choice = tf.random.stateless_categorical(best[None, :], 1, seeds, tf.int32)[0, 0]
            return tf.tensor_scatter_nd_update(tokens_1T, [[0, length]], [ids[choice]]), length + 1

        tokens_1T, _ = tf.while_loop(lambda _, length: length < end, one_more, (tokens_1T, length))
        return tokens_1T

    return sample
