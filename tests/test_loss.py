"""Memory for time: the loss in slices and recomputed blocks have the losses and gradients of doing neither."""

from __future__ import annotations

import dataclasses
from typing import Any, List

import numpy as np
import pytest
import tensorflow as tf

from lm.model import Decoder, named_variables
from lm.schema import Model


def settings(layers: int, **changes: Any) -> Model:
    return Model(name="test", layers=layers, width=16, heads=2, context=16, **changes)


def loss_and_gradients(decoder: Any, tokens: np.ndarray) -> List[Any]:
    @tf.function(autograph=False)
    def step(tokens: tf.Tensor) -> Any:
        weights = named_variables(decoder)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(decoder(tokens[:, :-1], tf.constant([1, 2], tf.int64), tokens[:, 1:]))
        return [loss, *(tf.convert_to_tensor(g) for g in tape.gradient(loss, list(weights.values())))]

    return [tensor.numpy() for tensor in step(tf.constant(tokens))]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("at_once", [1, 7, 16, 30])
def test_a_loss_in_slices_is_the_loss(monkeypatch: pytest.MonkeyPatch, tied: bool, at_once: int) -> None:
    """30 tokens, so the last slice is filled up or not; gradients differ by the order of the sums alone."""
    tokens = np.random.RandomState(0).randint(0, 50, (2, 16)).astype(np.int32)
    decoder = Decoder(settings(1, tied_head=tied), 50, 0, "float32")
    whole = loss_and_gradients(decoder, tokens)
    monkeypatch.setattr("lm.shapes.SLICE_BYTES", 4 * 50 * at_once)
    for found, expected in zip(loss_and_gradients(decoder, tokens), whole):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_no_more_logits_exist_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.shapes.SLICE_BYTES", 4 * 50 * 8)
    decoder = Decoder(settings(1), 50, 0, "float32")

    @tf.function(autograph=False)
    def step(tokens: tf.Tensor) -> Any:
        loss = tf.reduce_mean(decoder(tokens[:, :-1], None, tokens[:, 1:]))
        return tf.gradients(loss, list(named_variables(decoder).values()))

    concrete = step.get_concrete_function(tf.TensorSpec([4, 17], tf.int32))
    graphs, largest = [concrete.graph, *concrete.graph._functions.values()], 0
    for graph in graphs:
        for operation in getattr(graph, "graph", graph).get_operations():
            for tensor in operation.outputs:
                if tensor.shape.rank and tensor.shape[-1] == 50:
                    largest = max(largest, int(np.prod(tensor.shape.as_list())))
    assert largest == 8 * 50


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_recomputed_blocks_have_the_same_gradients(placement: str) -> None:
    """Dropout on: the masks are drawn again from the same seed."""
    tokens = np.random.RandomState(0).randint(0, 50, (2, 17)).astype(np.int32)
    found = []
    for recompute in ("none", "block"):
        shape = settings(2, norm_placement=placement, dropout=0.2, attention_dropout=0.1)
        decoder = Decoder(dataclasses.replace(shape, recompute=recompute), 50, 0, "float32")
        found.append(loss_and_gradients(decoder, tokens))
    for ours, expected in zip(found[1], found[0]):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
