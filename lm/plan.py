"""What a configuration amounts to, by arithmetic alone: parameters, batches, steps, bytes and FLOPs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

from lm.schema import Config, Model

SLICE_BYTES = 64 * 2**20  # of float32 logits that exist at once; a batch that has fewer is computed in one go
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes that training needs on one device, by kind. What frameworks take for themselves is not counted."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Plan:
    """The arithmetic of a run, done once. B sequences of T tokens; a step is an optimizer step."""

    parameters: int
    parameters_without_embeddings: int
    flops_per_token: int  # forward and backward
    replicas: int
    microbatch_sequences: int  # of one replica in one pass
    accumulation: int  # passes a replica makes for a step; under smp the microbatches that are pipelined
    evaluation_sequences: int  # of one replica at once
    global_batch_sequences: int
    context_tokens: int
    tokens_per_step: int
    steps: int
    tokens: int
    peak_learning_rate: float
    memory_per_device: Memory

    def as_dict(self) -> Dict[str, Any]:
        """Plain values for JSON, the total of the memory included."""
        values = dataclasses.asdict(self)
        values["memory_per_device"]["total"] = self.memory_per_device.total
        return values

    def rows(self) -> List[Tuple[str, str]]:
        """The plan as people read it: a name and a value a row."""
        memory = self.memory_per_device
        kinds = ", ".join(f"{name} {human_bytes(n)}" for name, n in dataclasses.asdict(memory).items())
        batch = f"{self.replicas} replica{'s' * (self.replicas > 1)} x {self.accumulation} x "
        return [
            ("parameters", f"{self.parameters:,} ({self.parameters_without_embeddings:,} without embeddings)"),
            ("batch", f"{self.global_batch_sequences:,} sequences = {batch}{self.microbatch_sequences}"),
            ("tokens", f"{self.steps:,} steps x {self.tokens_per_step:,} = {self.tokens:,}"),
            ("work", f"{self.flops_per_token:,} FLOP a token, {self.flops_per_token * self.tokens:.3g} in all"),
            ("learning rate", f"{self.peak_learning_rate:g} at its peak"),
            ("memory a device", f"{human_bytes(memory.total)}: {kinds}"),
        ]


def human_bytes(count: float) -> str:
    """A number of bytes in the binary unit that suits it: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


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


def _memory(config: Config, parameters: int, microbatch_sequences: int, accumulation: int) -> Memory:
    """Bytes on a device. Weights and gradients are float32 in every precision; accumulation keeps a second set.

    Activations are the tensors that the backward pass reads, counted a block at a time: both norms' inputs and
    outputs, queries, keys and values, the attention weights [heads, context, context] before and after their
    softmax, the attended values, the feed-forward layer's inner values before and after its activation. With
    model.recompute=block they are one block's, and every block's input besides.
    """
    model, optimizer = config.model, config.optimizer
    tokens, vocabulary = microbatch_sequences * model.context, config.dataset.vocabulary_size
    compute_bytes = BYTES_OF[config.train.precision]
    projected = model.heads * head_width(model)
    inner_copies = 3 if model.activation == "swiglu" else 2
    per_token = (
        model.width * (2 * 4 + 2 * compute_bytes)  # norms compute in float32
        + (4 * projected + inner_copies * feedforward_width(model)) * compute_bytes
        + model.heads * model.context * (4 + compute_bytes)  # the softmax computes in float32
    )
    moments_bytes = BYTES_OF[optimizer.moments_dtype]
    moments = {"adamw": 2 * parameters, "sgd": parameters}.get(optimizer.name)
    if moments is None:  # Adafactor keeps a row and a column of each matrix, and vectors whole
        shapes = weight_shapes(model, vocabulary)
        moments = sum(sum(shape) for part in shapes.values() for shape in part)
    logits = min(tokens, slice_tokens(vocabulary)) * vocabulary * 4 * 2  # and their gradient
    partitions = getattr(config.parallel, "partitions", 1)  # equal shares
    all_at_once = getattr(config.parallel, "pipeline", "") == "simple"
    alive = accumulation if all_at_once else min(partitions, accumulation) if partitions > 1 else 1
    if model.recompute == "block":
        activations = tokens * (per_token + model.layers * model.width * compute_bytes * alive // partitions)
    else:
        activations = model.layers * tokens * per_token * alive // partitions
    return Memory(
        weights=4 * parameters // partitions,
        gradients=4 * parameters * (2 if accumulation > 1 else 1) // partitions,
        optimizer=moments_bytes * moments // partitions,
        activations=activations,
        logits=logits,
    )


def make_plan(config: Config) -> Plan:
    """The plan of a checked configuration."""
    train, replicas = config.train, config.cluster.processes
    per_replica = train.global_batch_sequences // replicas
    pipelined = config.parallel.name == "smp"
    microbatch = per_replica // config.parallel.microbatches if pipelined else train.microbatch_sequences or per_replica
    parts = count_parameters(config.model, config.dataset.vocabulary_size)
    parameters = sum(parts.values())
    tokens_per_step = train.global_batch_sequences * config.model.context
    scaling = {"none": 1.0, "linear": float(replicas), "sqrt": math.sqrt(replicas)}
    return Plan(
        parameters=parameters,
        parameters_without_embeddings=parameters - parts["embeddings"],
        flops_per_token=flops_per_token(config.model, config.dataset.vocabulary_size),
        replicas=replicas,
        microbatch_sequences=microbatch,
        accumulation=per_replica // microbatch,
        evaluation_sequences=per_replica if pipelined else microbatch,
        global_batch_sequences=train.global_batch_sequences,
        context_tokens=config.model.context,
        tokens_per_step=tokens_per_step,
        steps=train.steps,
        tokens=train.steps * tokens_per_step,
        peak_learning_rate=config.optimizer.learning_rate
        * scaling[getattr(config.parallel, "lr_scaling", "none")],
        memory_per_device=_memory(config, parameters, microbatch, per_replica // microbatch),
    )
