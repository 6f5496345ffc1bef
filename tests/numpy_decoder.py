"""The decoder again, in NumPy and float64, written from the papers and not from lm/model.py."""

from __future__ import annotations

import numpy as np


def norm(x, weights, place, kind, epsilon):
    scale = weights[f"{place}.scale"]
    if kind == "rmsnorm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * scale + weights[f"{place}.bias"]


def dense(x, weights, place):
    y = np.einsum("...i,io->...o", x, weights[f"{place}.kernel"])
    return y + weights[f"{place}.bias"] if f"{place}.bias" in weights else y


def turned(vector, position):
    """One head's vector turned by its position, pair by pair (Su et al. 2021)."""
    half = len(vector) // 2
    out = np.empty_like(vector)
    for pair in range(half):
        angle = position / 10000 ** (2 * pair / len(vector))
        a, b = vector[pair], vector[pair + half]
        out[pair] = a * np.cos(angle) - b * np.sin(angle)
        out[pair + half] = a * np.sin(angle) + b * np.cos(angle)
    return out


def attention(x, weights, place, heads, rotary):
    """One sequence, one head and one position at a time."""
    time = len(x)
    q, k, v = np.split(dense(x, weights, f"{place}.qkv"), 3, axis=-1)
    width = q.shape[-1] // heads
    out = np.zeros_like(q)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        queries, keys = q[:, part].copy(), k[:, part].copy()
        if rotary:
            queries = np.stack([turned(queries[t], t) for t in range(time)])
            keys = np.stack([turned(keys[t], t) for t in range(time)])
        for t in range(time):
            scores = np.array([queries[t] @ keys[s] / np.sqrt(width) for s in range(t + 1)])
            shares = np.exp(scores - scores.max())
            out[t, part] = (shares / shares.sum()) @ v[: t + 1, part]
    return dense(out, weights, f"{place}.output")


def feedforward(x, weights, place, activation):
    inner = dense(x, weights, f"{place}.input")
    if activation == "relu":
        inner = np.maximum(inner, 0)
    elif activation == "swiglu":
        gate = dense(x, weights, f"{place}.gate")
        inner = inner * gate / (1 + np.exp(-gate))
    else:
        inner = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
    return dense(inner, weights, f"{place}.output")


def decode(tokens, weights, settings):
    """Logits of one sequence of tokens."""
    weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    kind, epsilon = settings.norm, settings.norm_epsilon
    x = weights["embedding.tokens"][tokens]
    if settings.positions == "learned":
        x = x + weights["embedding.positions"][: len(tokens)]
    for layer in range(settings.layers):
        place = f"blocks.{layer}"

        def attend(y, place=place):
            return attention(y, weights, f"{place}.attention", settings.heads, settings.positions == "rotary")

        def feed(y, place=place):
            return feedforward(y, weights, f"{place}.feedforward", settings.activation)

        if settings.norm_placement == "pre":
            x = x + attend(norm(x, weights, f"{place}.norm_1", kind, epsilon))
            x = x + feed(norm(x, weights, f"{place}.norm_2", kind, epsilon))
        else:
            x = norm(x + attend(x), weights, f"{place}.norm_1", kind, epsilon)
            x = norm(x + feed(x), weights, f"{place}.norm_2", kind, epsilon)
    if settings.norm_placement == "pre":
        x = norm(x, weights, "final_norm", kind, epsilon)
    if settings.tied_head:
        return x @ weights["embedding.tokens"].T
    return dense(x, weights, "head")
