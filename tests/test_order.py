"""The order of the data: each sequence once an epoch, the same for any number of replicas, resumed anywhere."""

from __future__ import annotations

from typing import Any, List

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.order import Order

ORDERS = st.builds(
    Order,
    sequences=st.integers(1, 400),
    seed=st.integers(0, 2**31 - 1),
    chunk_sequences=st.integers(1, 50),
    window_chunks=st.integers(1, 6),
)


def window_sequences(order: Order, window: int) -> np.ndarray:
    """The sequences of a window, in the order in which they are consumed."""
    ranges = [np.arange(*order.chunk_range(int(chunk))) for chunk in order.window_chunk_ids(window)]
    lying = np.concatenate(ranges)
    return lying[order.within_window(window, len(lying))]


def epoch_of(order: Order, epoch: int) -> List[int]:
    first = epoch * order.windows_per_epoch
    windows = [window_sequences(order, first + window) for window in range(order.windows_per_epoch)]
    return [int(sequence) for sequence in np.concatenate(windows)]


@settings(max_examples=200, deadline=None)
@given(order=ORDERS, epoch=st.integers(0, 5))
def test_every_sequence_comes_once_an_epoch(order: Order, epoch: int) -> None:
    assert sorted(epoch_of(order, epoch)) == list(range(order.sequences))


@settings(max_examples=200, deadline=None)
@given(order=ORDERS, data=st.data())
def test_any_position_is_found_again(order: Order, data: Any) -> None:
    position = data.draw(st.integers(0, 3 * order.sequences - 1))
    window, offset = order.locate(position)
    epochs = [sequence for epoch in range(4) for sequence in epoch_of(order, epoch)]
    following: List[int] = []
    while len(following) < offset + 5 and window < 4 * order.windows_per_epoch:
        following += [int(sequence) for sequence in window_sequences(order, window)]
        window += 1
    assert following[offset : offset + 5][: len(epochs) - position] == epochs[position : position + 5][:5]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    order = Order(1000, seed=1, chunk_sequences=10)
    first, second = epoch_of(order, 0), epoch_of(order, 1)
    assert first != second
    assert first != epoch_of(Order(1000, seed=2, chunk_sequences=10), 0)
    assert first == epoch_of(Order(1000, seed=1, chunk_sequences=10), 0)


def test_the_order_is_frozen() -> None:
    """A run resumes under another NumPy, and in the training image, because these numbers never change."""
    assert epoch_of(Order(12, seed=3, chunk_sequences=2, window_chunks=2), 1) == GOLDEN


def test_neighbours_are_read_together_and_consumed_apart() -> None:
    order = Order(10_000, seed=0, chunk_sequences=100, window_chunks=16)
    consumed = epoch_of(order, 0)
    neighbours = sum(abs(a - b) == 1 for a, b in zip(consumed, consumed[1:]))
    assert neighbours < 100
    assert len({sequence // 100 for sequence in consumed[:1600]}) == 16


def test_a_position_among_a_billion_sequences_is_found_without_listing_them() -> None:
    order = Order(1_000_000_007, seed=0, chunk_sequences=512)
    position = 2 * 1_000_000_007 + 987_654_321
    window, offset = order.locate(position)
    assert window // order.windows_per_epoch == 2
    before = window % order.windows_per_epoch * 512 * 16
    short = 512 - 1_000_000_007 % 512  # the last chunk may lie in a window before
    assert before + offset - 987_654_321 in (0, short)
    assert len(window_sequences(order, window)) <= 512 * 16


GOLDEN = [2, 0, 1, 3, 10, 11, 4, 5, 6, 8, 9, 7]
