"""The forward and backward passes that strategies share: one loss, whatever the number of microbatches."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import tensorflow as tf

from lm.model import named_variables
from lm.plan import Plan


def mean_loss(model: Any, tokens_BS: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Mean nats a token of one microbatch, dropout on. Each token but the first is predicted from those before."""
    return tf.reduce_mean(model(tokens_BS[:, :-1], seed, tokens_BS[:, 1:]))


def accumulated_loss(
    model: Any, plan: Plan, tokens_BS: tf.Tensor, seed: tf.Tensor, loss_scale: tf.Tensor
) -> tf.Tensor:
    """The scaled mean loss of a replica's sequences, of which only one microbatch is in memory at a time.

    To a tape it is one differentiable number: its gradient was accumulated while the microbatches passed. So a
    strategy's tape, Horovod's included, reduces once a step and not once a microbatch.
    """
    if plan.accumulation == 1:
        return mean_loss(model, tokens_BS, seed) * loss_scale
    variables = list(named_variables(model).values())
    shape = [plan.accumulation, plan.microbatch_sequences, plan.context_tokens + 1]
    tokens_ABS = tf.reshape(tokens_BS, shape)

    def one_pass(index: tf.Tensor, loss: tf.Tensor, sums: List[tf.Tensor]) -> Tuple[Any, ...]:
        with tf.GradientTape() as tape:
            offset = tf.stack([0, tf.cast(index, tf.int64) * plan.microbatch_sequences])
            microbatch_loss = mean_loss(model, tokens_ABS[index], seed + offset) * loss_scale
        gradients = dense(tape.gradient(microbatch_loss, variables), variables)
        sums = [total + gradient for total, gradient in zip(sums, gradients)]
        return index + 1, loss + microbatch_loss, sums

    def all_passes() -> Tuple[tf.Tensor, List[tf.Tensor]]:
        start = (tf.constant(0), tf.constant(0.0), [tf.zeros(v.shape, tf.float32) for v in variables])
        _, loss, sums = tf.while_loop(
            lambda index, *_: index < plan.accumulation, one_pass, start, parallel_iterations=1
        )
        return loss / plan.accumulation, [total / plan.accumulation for total in sums]

    @tf.custom_gradient
    def loss_of(*values: tf.Tensor) -> Any:
        loss, gradients = all_passes()

        def backward(upstream: tf.Tensor, variables: Optional[Any] = None) -> Any:
            of_values = [upstream * gradient for gradient in gradients]
            return of_values if variables is None else (of_values, [None] * len(variables))

        return loss, backward

    return loss_of(*[tf.convert_to_tensor(variable) for variable in variables])


def dense(gradients: List[Any], inputs: Sequence[Any]) -> List[tf.Tensor]:
    """Gradients as plain tensors: a lookup's sparse rows are summed into the shape of its table, and where it lies."""
    plain = []
    for gradient, one in zip(gradients, inputs):
        with tf.device(one.device):
            plain.append(tf.convert_to_tensor(gradient))
    return plain


def summed_loss(model: Any, tokens_BS: tf.Tensor, weights_BT: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    """Sum of nats over the tokens whose weight is 1, and their number. Padding has weight 0."""
    nats_BT = model(tokens_BS[:, :-1], labels_BT=tokens_BS[:, 1:])
    return tf.reduce_sum(nats_BT * weights_BT), tf.reduce_sum(weights_BT)
