"""A model's shapes by arithmetic alone: widths, weights, parameters, FLOPs."""

from __future__ import annotations

import math
from typing import Dict, List, Tuple

from lm.schema import Model

SLICE_BYTES = 64 * 2**20  # of float32 logits that exist at once; a batch that has fewer is computed in one go


def head_width(model: Model) -> int:
    """The width of one attention head's queries, keys and values."""
    return model.head_width or model.width // model.heads


def feedforward_width(model: Model) -> int:
    """The width between the two matrices of a feed-forward layer."""
    return model.feedforward_width or 4 * model.width


def slice_tokens(vocabulary_size: int) -> int:
    """How many tokens' logits exist at once: the loss is computed a slice at a time (lm.loss)."""
    return max(1, SLICE_BYTES // (4 * vocabulary_size))


def weight_shapes(model: Model, vocabulary_size: int) -> Dict[str, List[Tuple[int, ...]]]:
    """The shape of every weight, by part: embeddings, blocks, final_norm, head. `lm.model` makes exactly these."""
    width, inner = model.width, feedforward_width(model)
    projected = model.heads * head_width(model)
    norm: List[Tuple[int, ...]] = [(width,)] * (2 if model.norm == "layernorm" else 1)

    def dense(rows: int, columns: int) -> List[Tuple[int, ...]]:
        return [(rows, columns), (columns,)] if model.bias else [(rows, columns)]

    attention = dense(width, 3 * projected) + dense(projected, width)
    feedforward = dense(width, inner) * (2 if model.activation == "swiglu" else 1) + dense(inner, width)
    positions = [(model.context, width)] if model.positions == "learned" else []
    return {
        "embeddings": [(vocabulary_size, width), *positions],
        "blocks": (norm * 2 + attention + feedforward) * model.layers,
        "final_norm": norm if model.norm_placement == "pre" else [],
        "head": [] if model.tied_head else dense(width, vocabulary_size),
    }


def count_parameters(model: Model, vocabulary_size: int) -> Dict[str, int]:
    """Parameters by part."""
    shapes = weight_shapes(model, vocabulary_size)
    return {part: sum(math.prod(shape) for shape in of_part) for part, of_part in shapes.items()}


def flops_per_token(model: Model, vocabulary_size: int) -> int:
    """FLOPs of a token's forward and backward pass.

    Six for each weight that a matrix product uses, the head's included, and 12 x layers x heads x head width
    x context for attention (Chowdhery et al. 2022, PaLM, appendix B; the causal half is not deducted).
    """
    inner = feedforward_width(model) * (3 if model.activation == "swiglu" else 2)
    projected = model.heads * head_width(model)
    matrices = model.layers * model.width * (4 * projected + inner) + model.width * vocabulary_size
    return 6 * matrices + 12 * model.layers * projected * model.context
