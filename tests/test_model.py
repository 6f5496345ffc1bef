"""The decoder against GPT-2 by transformers, against a decoder in NumPy, and against its own plan."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import numpy as np
import numpy_decoder
import pytest
import tensorflow as tf
from conftest import ROOT
from safetensors.numpy import load_file

from lm import fused
from lm.compose import compose
from lm.fused import cross_entropy
from lm.model import Decoder, named_variables
from lm.schema import Model
from lm.shapes import count_parameters

KINDS: Dict[str, Dict[str, Any]] = {
    "gpt2": {},
    "llama": dict(positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, tied_head=False),
    "relu_post_untied": dict(norm_placement="post", activation="relu", tied_head=False),
    "wide_heads": dict(head_width=24, feedforward_width=40, bias=False),
}


def settings(**changes: Any) -> Model:
    return Model(name="test", **{**dict(layers=2, width=16, heads=2, context=8), **changes})


def randomised(decoder: Decoder) -> Dict[str, tf.Variable]:
    """Makes the weights and sets each, biases and scales too, to something that is not its initial value."""
    decoder(tf.zeros([1, 2], tf.int32))
    named = named_variables(decoder)
    for index, variable in enumerate(named.values()):
        variable.assign_add(0.3 * tf.random.stateless_normal(variable.shape, [7, index]))
    return named


# --- GPT-2 -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2() -> Tuple[Decoder, Dict[str, Any]]:
    golden = load_file(str(ROOT / "tests/golden/gpt2.safetensors"))
    decoder = Decoder(settings(width=32, heads=4, context=16), 61, seed=0, precision="float32")
    decoder(tf.zeros([1, 2], tf.int32))
    named = named_variables(decoder)
    stored = {name[len("weight.") :]: value for name, value in golden.items() if name.startswith("weight.")}
    assert set(stored) == set(named)
    for name, variable in named.items():
        variable.assign(stored[name])
    return decoder, golden


def test_logits_loss_and_gradients_are_gpt2s(gpt2: Tuple[Decoder, Dict[str, Any]]) -> None:
    """Both compute in float32; 1e-4 is some hundred roundings at logits of a few units."""
    decoder, golden = gpt2
    tokens = tf.constant(golden["tokens"])
    named = named_variables(decoder)
    with tf.GradientTape() as tape:
        logits = decoder(tokens[:, :-1])
        loss = tf.reduce_mean(cross_entropy(logits, tokens[:, 1:]))
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    np.testing.assert_allclose(loss, golden["loss"][0], atol=1e-4)
    gradients = tape.gradient(loss, list(named.values()))
    for name, gradient in zip(named, gradients):
        expected = golden[f"gradient.{name}"]
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, atol=1e-4, err_msg=name)
        assert np.abs(expected).max() > 1e-3, f"a gradient of {name} that could be zero proves nothing"


# --- NumPy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_block_is_the_numpy_decoders(kind: str) -> None:
    shape = settings(**KINDS[kind])
    decoder = Decoder(shape, 31, seed=1, precision="float32")
    weights = {name: variable.numpy() for name, variable in randomised(decoder).items()}
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [30, 0, 7, 7, 7, 12, 20, 28]])
    expected = np.stack([numpy_decoder.decode(row, weights, shape) for row in tokens])
    np.testing.assert_allclose(decoder(tf.constant(tokens)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_numpy_decoders_differences(kind: str) -> None:
    """Central differences of the float64 loss, along a random direction through all weights at once."""
    shape = settings(**KINDS[kind])
    decoder = Decoder(shape, 31, seed=2, precision="float32")
    named = randomised(decoder)
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(cross_entropy(decoder(tf.constant(tokens[None, :-1])), tf.constant(tokens[None, 1:])))
    gradients = tape.gradient(loss, list(named.values()))
    generator = np.random.RandomState(0)
    direction = {name: generator.standard_normal(variable.shape) for name, variable in named.items()}

    def loss_at(distance: float) -> float:
        moved = {name: variable.numpy() + distance * direction[name] for name, variable in named.items()}
        logits = numpy_decoder.decode(tokens[:-1], moved, shape)
        peak = logits.max(-1, keepdims=True)
        log_sum = np.log(np.exp(logits - peak).sum(-1)) + peak[:, 0]
        return float(np.mean(log_sum - logits[np.arange(len(logits)), tokens[1:]]))

    slope = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
    ours = sum(
        float(np.sum(tf.convert_to_tensor(gradient).numpy() * direction[name]))
        for name, gradient in zip(named, gradients)
    )
    assert ours == pytest.approx(slope, rel=1e-3)


# --- structure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_has_the_planned_number_of_parameters(kind: str) -> None:
    shape = settings(**KINDS[kind])
    decoder = Decoder(shape, 31, seed=0, precision="float32")
    decoder(tf.zeros([1, 2], tf.int32))
    made = sum(int(np.prod(variable.shape)) for variable in named_variables(decoder).values())
    assert made == sum(count_parameters(shape, 31).values())


def test_the_articles_block_is_its_text() -> None:
    shape = compose(["model=article"]).model
    assert (shape.positions, shape.norm, shape.norm_placement) == ("learned", "layernorm", "post")
    assert (shape.activation, shape.tied_head, shape.bias) == ("relu", False, True)
    assert shape.head_width == shape.width  # "key width is the embedding width"
    assert shape.dropout > 0
    assert shape.attention_dropout == shape.embedding_dropout == 0
    decoder = Decoder(shape, 31, seed=0, precision="float32")
    decoder(tf.zeros([1, 2], tf.int32))
    named = named_variables(decoder)
    assert named["blocks.0.attention.qkv.kernel"].shape == (shape.width, 3 * shape.heads * shape.width)
    assert named["head.kernel"].shape == (shape.width, 31)
    assert "final_norm.scale" not in named


@pytest.mark.parametrize("kind", KINDS)
def test_no_position_sees_the_future(kind: str) -> None:
    decoder = Decoder(settings(**KINDS[kind]), 31, seed=0, precision="float32")
    randomised(decoder)
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    other = tokens.copy()
    other[0, 5:] = [11, 12, 13]
    before, after = decoder(tf.constant(tokens)).numpy(), decoder(tf.constant(other)).numpy()
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert np.abs(before[0, 5:] - after[0, 5:]).max() > 1e-3


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_lower_precisions_are_near_float32_and_give_float32_logits(precision: str, tolerance: float) -> None:
    """bfloat16 keeps 8 bits and float16 11: some roundings of logits of one unit."""
    full = Decoder(settings(), 31, seed=0, precision="float32")
    half = Decoder(settings(), 31, seed=0, precision=precision)
    randomised(full), randomised(half)
    tokens = tf.constant([[3, 1, 4, 1, 5, 9, 2, 6]])
    assert half(tokens).dtype == tf.float32
    assert all(variable.dtype == tf.float32 for variable in named_variables(half).values())
    np.testing.assert_allclose(half(tokens), full(tokens), atol=tolerance)


def test_initial_weights_follow_the_seed_and_depth() -> None:
    deep = settings(layers=8, width=64, heads=4)
    first, again, other = (Decoder(deep, 31, seed=seed, precision="float32") for seed in (5, 5, 6))
    for decoder in (first, again, other):
        decoder(tf.zeros([1, 2], tf.int32))
    a, b, c = (named_variables(decoder) for decoder in (first, again, other))
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
    assert np.abs(a["embedding.tokens"].numpy() - c["embedding.tokens"].numpy()).max() > 0
    assert np.std(a["blocks.3.attention.qkv.kernel"]) == pytest.approx(0.02, rel=0.05)
    assert np.std(a["blocks.3.attention.output.kernel"]) == pytest.approx(0.02 / 4, rel=0.05)  # sqrt(2 x 8) = 4
    assert np.abs(a["blocks.0.attention.qkv.kernel"].numpy() - a["blocks.1.attention.qkv.kernel"].numpy()).max() > 0


# --- dropout -----------------------------------------------------------------------------------------


def test_dropout_is_a_function_of_its_seed() -> None:
    dropping = settings(dropout=0.5, attention_dropout=0.5, embedding_dropout=0.5)
    decoder = Decoder(dropping, 31, seed=0, precision="float32")
    randomised(decoder)
    tokens = tf.constant([[3, 1, 4, 1, 5, 9, 2, 6]])
    one, same, two = (decoder(tokens, tf.constant(seed, tf.int64)).numpy() for seed in ([0, 1], [0, 1], [0, 2]))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - two).max() > 1e-3
    np.testing.assert_array_equal(decoder(tokens), decoder(tokens))  # off without a seed


def test_dropout_keeps_the_mean_and_drops_the_rate() -> None:
    decoder = Decoder(settings(), 31, seed=0, precision="float32")
    ones = tf.ones([200, 200])
    dropped = decoder.head.drop(ones, 0.25, tf.constant([0, 0], tf.int64), 0).numpy()
    assert np.mean(dropped == 0) == pytest.approx(0.25, abs=0.01)
    np.testing.assert_allclose(np.unique(dropped), [0.0, 1 / 0.75], rtol=1e-6)
    assert dropped.mean() == pytest.approx(1.0, abs=0.02)


# --- compiled passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_the_same_with_and_without_xla(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To eight roundings of half precisions, to a hundred of float32, of the loss and each gradient's largest value."""
    decoder = Decoder(settings(**KINDS[kind]), 61, seed=0, precision=precision)
    named = randomised(decoder)
    tokens_BS = tf.random.stateless_uniform([3, 9], [1, 2], 0, 61, tf.int32)

    def loss_and_gradients() -> Tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(decoder(tokens_BS[:, :-1], labels_BT=tokens_BS[:, 1:]))
        return loss, [tf.convert_to_tensor(one) for one in tape.gradient(loss, list(named.values()))]

    compiled = tf.function(loss_and_gradients, autograph=False)()
    monkeypatch.setattr(fused, "_compiles", False)
    plain = tf.function(loss_and_gradients, autograph=False)()
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[precision]
    assert float(compiled[0]) == pytest.approx(float(plain[0]), rel=tolerance)
    for name, one, other in zip(named, compiled[1], plain[1]):
        largest = max(float(tf.reduce_max(tf.abs(other))), 1e-3)
        assert float(tf.reduce_max(tf.abs(one - other))) <= tolerance * largest, name
