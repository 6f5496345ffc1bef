"""What training keeps in a device's memory, by kind, and how much of it at once: arithmetic on shapes alone.

The tensors are those that the compiled step asks its allocator for, as traced on CPUs in float32 and bfloat16
(docs/planning.md); `lm bench plan` holds the sum against what the allocator has in use at its peak.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Dict

from lm.schema import Config
from lm.shapes import feedforward_width, head_width, slice_tokens, weight_shapes

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
SLACK = 0.1  # TensorFlow's allocator hands out larger chunks than it is asked for: 3 to 20% more was measured
FUSION_BYTES = 128 * 2**20  # Horovod's buffer (horovodrun --fusion-threshold-mb); SDP's is taken to be as large
LOGITS_BYTES = {"float32": 12, "bfloat16": 14, "float16": 14}  # a logit, its gradient, and what XLA computes them in
OUTSIDE_BLOCKS = 6  # tensors of the model's width before the first block and after the last
UPDATE_COPIES = 3  # of the largest weight while it moves: its new value and its two moments


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by kind, each at its own peak. What frameworks take for themselves is not counted.

    total: the most that is there at once. It is less than the sum, because activations go while gradients come.
    """

    weights: int
    copies: int  # of weights in half precision; with model.recompute=block a block's at a time
    gradients: int  # with accumulation a set that is added to, and in a loop what the sum becomes
    optimizer: int
    activations: int
    logits: int
    temporaries: int  # of the block or the update at work; all that model.recompute=block computes again
    communication: int
    slack: int
    total: int

    def kinds(self) -> Dict[str, int]:
        """All but the total."""
        return {name: count for name, count in dataclasses.asdict(self).items() if name != "total"}

    @property
    def steady(self) -> int:
        """What no other batch and no recomputation makes less: weights, one set of gradients, moments."""
        return 2 * self.weights + self.optimizer


def memory(config: Config, parameters: int, microbatch_sequences: int, accumulation: int) -> Memory:
    """Of one device. Weights and gradients are float32 in every precision.

    Activations are the tensors that the backward pass reads, a block at a time: both norms' outputs, the residual sum
    after each branch, queries (twice, scaled and not), keys and values, the attention scores [heads, context, context]
    before and after their softmax, the attended values, the inner values before and after their activation.
    """
    model, optimizer, precision = config.model, config.optimizer, config.train.precision
    tokens, vocabulary = microbatch_sequences * model.context, config.dataset.vocabulary_size
    compute = BYTES_OF[precision]
    partitions = getattr(config.parallel, "partitions", 1)  # equal shares

    # --- a block, of one token -----------------------------------------------------------------------
    projected, inner = model.heads * head_width(model), feedforward_width(model)
    scores = model.heads * model.context
    queries = 7 if model.positions == "rotary" else 5
    inner_copies = 3 if model.activation == "swiglu" else 2
    block = compute * (4 * model.width + queries * projected + inner_copies * inner + 2 * scores)
    backward = compute * (scores + inner) + (0 if precision == "float32" else 8 * scores)  # XLA's softmax is float32

    # --- of all tokens -------------------------------------------------------------------------------
    all_at_once = getattr(config.parallel, "pipeline", "") == "simple"
    alive = accumulation if all_at_once else min(partitions, accumulation)  # microbatches
    kept = compute * model.width if model.recompute == "block" else block
    activations = tokens * (model.layers * kept * alive // partitions + OUTSIDE_BLOCKS * compute * model.width)
    logits = min(tokens, slice_tokens(vocabulary)) * vocabulary * LOGITS_BYTES[precision]
    logits += 2 * 4 * vocabulary * model.width  # the gradient of their matrix, of a slice and of all before
    recomputed = tokens * (backward + block) if model.recompute == "block" else 0

    # --- of all weights ------------------------------------------------------------------------------
    shapes = weight_shapes(model, vocabulary)
    moments = {"adamw": 2 * parameters, "sgd": parameters}.get(optimizer.name)
    if moments is None:  # Adafactor keeps a row and a column of each matrix, and vectors whole
        moments = sum(sum(shape) for part in shapes.values() for shape in part)
    largest = 4 * max(math.prod(shape) for part in shapes.values() for shape in part)
    one_set = 4 * parameters // partitions
    of_a_block = sum(math.prod(shape) for shape in shapes["blocks"]) // model.layers
    copied = of_a_block if model.recompute == "block" else parameters // partitions
    copies = 0 if precision == "float32" else compute * copied
    sets = 1 if accumulation == 1 else 2 if config.parallel.name == "smp" else 3  # a pipeline is no loop
    moments_bytes = BYTES_OF[optimizer.moments_dtype] * moments // partitions
    communication = FUSION_BYTES if config.cluster.processes > 1 else 0

    # --- at once: when the backward pass begins, or when it ends -------------------------------------
    begins = (sets - 1) * one_set + activations + max(logits, recomputed or tokens * backward)
    ends = sets * one_set + max(recomputed, UPDATE_COPIES * largest)
    at_once = one_set + copies + moments_bytes + communication + max(begins, ends)
    slack = int(SLACK * at_once)
    return Memory(
        weights=one_set,
        copies=copies,
        gradients=sets * one_set,
        optimizer=moments_bytes,
        activations=activations,
        logits=logits,
        temporaries=max(recomputed or tokens * backward, UPDATE_COPIES * largest),
        communication=communication,
        slack=slack,
        total=at_once + slack,
    )
