"""The loss from the last hidden states, with the logits of a slice of the tokens in memory at a time.

Logits [B, T, V] in float32 and their gradient are by far the largest tensors of a model with a usual vocabulary: 8 x
1,024 tokens x 50,257 ids are 1.5 GiB each.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import tensorflow as tf

from lm.fused import cross_entropy

# rows [N, D] and the head's weights -> logits [N, V]
Logits = Callable[..., tf.Tensor]


def nats(logits: Logits, rows_ND: tf.Tensor, weights: Sequence[tf.Tensor], labels_N: tf.Tensor, at_once: int) -> Any:
    """Negative log-likelihood of each label, [N], at_once rows at a time (lm.plan.slice_tokens).

    The backward pass computes each slice's logits again, which is one more product with the head's matrix, and sums the
    slices' gradients in float32.
    """
    tokens = rows_ND.shape[0]
    if tokens is None or tokens <= at_once:
        return cross_entropy(logits(rows_ND, *weights), labels_N)
    slices = -(-tokens // at_once)

    def sliced(values: tf.Tensor) -> tf.Tensor:
        """[N, ...] as [slices, at_once, ...], the last slice filled up with zeros."""
        filled = tf.pad(values, [[0, slices * at_once - tokens]] + [[0, 0]] * (values.shape.rank - 1))
        return tf.reshape(filled, tf.concat([[slices, at_once], tf.shape(values)[1:]], 0))

    @tf.custom_gradient
    def nats_of(rows_ND: tf.Tensor, *weights: tf.Tensor) -> Tuple[tf.Tensor, Any]:
        rows_SND, labels_SN = sliced(rows_ND), sliced(labels_N)
        nats_SN = tf.map_fn(
            lambda one: cross_entropy(logits(one[0], *weights), one[1]),
            (rows_SND, labels_SN),
            fn_output_signature=tf.float32,
            parallel_iterations=1,
        )

        def backward(upstream_N: tf.Tensor, variables: Optional[Any] = None) -> Any:
            upstream_SN = sliced(upstream_N)

            def one_slice(index: tf.Tensor, of_rows: tf.TensorArray, sums: List[tf.Tensor]) -> Tuple[Any, ...]:
                inputs = [tf.identity(value) for value in (rows_SND[index], *weights)]
                nats_N = cross_entropy(logits(*inputs), labels_SN[index])
                of_row, *of_weights = tf.gradients(nats_N, inputs, upstream_SN[index])
                sums = [total + tf.cast(one, tf.float32) for total, one in zip(sums, of_weights)]
                return index + 1, of_rows.write(index, of_row), sums

            start = (
                tf.constant(0),
                tf.TensorArray(rows_ND.dtype, slices),
                [tf.zeros(weight.shape, tf.float32) for weight in weights],
            )
            _, of_rows, sums = tf.while_loop(
                lambda index, *_: index < slices, one_slice, start, parallel_iterations=1
            )
            gradients = [of_rows.concat()[:tokens]]
            gradients += [tf.cast(total, weight.dtype) for total, weight in zip(sums, weights)]
            return gradients if variables is None else (gradients, [None] * len(variables))

        return tf.reshape(nats_SN, [-1])[:tokens], backward

    return nats_of(rows_ND, *weights)
