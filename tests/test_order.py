"""The order of the data: each sequence once an epoch, in the same shares everywhere, resumed anywhere."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, Tuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.mixture import Component, Mixture
from lm.data.order import Order
from lm.data.streams import TokenStream

NOTHING = TokenStream([], np.dtype("<u2"), 1)


def mixture(counts: Dict[str, Tuple[int, int]], seed: int = 0, chunk: int = 8, block: int = 50) -> Mixture:
    """A mixture by name: sequences and draws a cycle."""
    components = [
        Component(name, NOTHING, Order(sequences, seed, number, chunk), draws)
        for number, (name, (sequences, draws)) in enumerate(counts.items())
    ]
    return Mixture(components, seed, block)


def natural(sizes: List[int], **settings: int) -> Mixture:
    return mixture({str(number): (size, size) for number, size in enumerate(sizes)}, **settings)


def consumed(mix: Mixture, first_block: int, blocks: int) -> List[Tuple[int, int]]:
    """Component and sequence of all that some blocks bring, in the order in which they are consumed."""
    found: List[Tuple[int, int]] = []
    for block in range(first_block, first_block + blocks):
        runs, permutation = mix.block(block)
        lying = [(number, run.first + at) for number, run in runs for at in range(run.length)]
        found += [lying[place] for place in permutation]
    return found


def epoch_of(mix: Mixture, epoch: int) -> List[Tuple[int, int]]:
    return consumed(mix, epoch * mix.blocks_per_cycle, mix.blocks_per_cycle)


SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=6)
SETTINGS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**31 - 1), "chunk": st.integers(1, 50), "block": st.integers(1, 300)}
)


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, options=SETTINGS, epoch=st.integers(0, 4))
def test_every_sequence_comes_once_an_epoch(sizes: List[int], options: Dict[str, int], epoch: int) -> None:
    expected = [(number, sequence) for number, size in enumerate(sizes) for sequence in range(size)]
    assert sorted(epoch_of(natural(sizes, **options), epoch)) == expected


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, options=SETTINGS, data=st.data())
def test_any_position_is_found_again(sizes: List[int], options: Dict[str, int], data: Any) -> None:
    mix = natural(sizes, **options)
    position = data.draw(st.integers(0, 3 * mix.cycle - 1))
    straight = [one for epoch in range(4) for one in epoch_of(mix, epoch)]
    block, offset = mix.locate(position)
    assert consumed(mix, block, mix.blocks_per_cycle)[offset : offset + 5] == straight[position : position + 5][
        : mix.start(block + mix.blocks_per_cycle) - position
    ]
    counts = Counter(str(number) for number, _ in straight[:position])
    assert {name: count for name, count in mix.realised(position).items() if count} == counts


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 2**40)), min_size=1, max_size=6),
    options=SETTINGS,
    blocks=st.integers(1, 20),
)
def test_shares_are_kept_to_one_sequence_a_block(
    groups: List[Tuple[int, int]], options: Dict[str, int], blocks: int
) -> None:
    mix = mixture({str(number): group for number, group in enumerate(groups)}, **options)
    position = mix.start(blocks)
    for number, (name, count) in enumerate(mix.realised(position).items()):
        assert str(number) == name
        exact = groups[number][1] / mix.blocks_per_cycle * blocks
        assert abs(count - exact) < 1 + 1e-9 * exact
    in_blocks = Counter(number for number, _ in consumed(mix, 0, blocks))
    assert [in_blocks[number] for number in range(len(groups))] == list(mix.realised(position).values())


def test_a_component_goes_through_its_own_epochs_whatever_its_share() -> None:
    """Drawn three times as often as it has sequences: each comes three times a cycle, an epoch after the other."""
    mix = mixture({"often": (20, 60), "once": (100, 100)}, block=13)
    often = [sequence for number, sequence in epoch_of(mix, 0) if number == 0]
    assert Counter(often) == dict.fromkeys(range(20), 3)


def test_epochs_and_seeds_differ_and_repeat() -> None:
    first, second = epoch_of(natural([1000]), 0), epoch_of(natural([1000]), 1)
    assert first != second
    assert first != epoch_of(natural([1000], seed=2), 0)
    assert first == epoch_of(natural([1000]), 0)


def test_the_order_is_frozen() -> None:
    """A run resumes under another NumPy, and in the training image, because these numbers never change."""
    assert epoch_of(mixture({"a": (7, 7), "b": (3, 5)}, seed=3, chunk=2, block=4), 1) == GOLDEN


def test_neighbours_are_read_together_and_consumed_apart() -> None:
    mix = natural([10_000], chunk=100, block=1600)
    runs, _ = mix.block(0)
    assert len(runs) <= 18  # 1,600 sequences in runs of 100, and two that the block's borders cut
    order = [sequence for _, sequence in epoch_of(mix, 0)]
    assert sum(abs(a - b) == 1 for a, b in zip(order, order[1:])) < 100


def test_a_position_among_a_billion_sequences_is_found_without_listing_them() -> None:
    """Two sources and three epochs in. The seek's time is measured by `lm bench loader`; a list would not fit."""
    mix = natural([1_000_000_007, 123_456_789], chunk=512, block=32768)
    position = 2 * mix.cycle + 987_654_321
    block, offset = mix.locate(position)
    runs, permutation = mix.block(block)
    assert mix.start(block) + offset == position
    assert len(permutation) == sum(run.length for _, run in runs) == mix.start(block + 1) - mix.start(block)


GOLDEN = [(0, 3), (0, 2), (1, 2), (1, 1), (0, 4), (0, 5), (1, 0), (1, 0), (1, 2), (0, 6), (0, 1), (0, 0)]
