"""Feeding: the same global batches for any number of replicas, from any position, nothing lost at the edges."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, ClassVar, List, Tuple

import numpy as np
import pytest

from lm.data.loader import READERS, Feed, evaluation_batches, training_batches
from lm.data.mixture import Component, Mixture
from lm.data.order import Order
from lm.data.shards import DatasetError, Extent
from lm.data.streams import TokenStream

CONTEXT = 8


def stream_of(tokens: int, folder: Path, first: int = 0, kind: Any = TokenStream) -> TokenStream:
    """A stream whose token i is first + i, in several shards of which it has the middle."""
    folder.mkdir(exist_ok=True)
    extents = []
    for start in range(0, tokens, 50):
        path = folder / f"train-{start // 50:05d}.bin"
        count = min(50, tokens - start)
        np.arange(first + start - 3, first + start + count + 3).astype("<u2").tofile(path)
        extents.append(Extent(path, 3, count))
    return kind(extents, np.dtype("<u2"), 2**16)


def mixture_of(*streams: Tuple[TokenStream, int], context: int = CONTEXT, block: int = 7) -> Mixture:
    """Streams with their draws; 0: as many as they have sequences."""
    components = []
    for number, (stream, draws) in enumerate(streams):
        sequences = (stream.tokens - 1) // context
        components.append(Component(str(number), stream, Order(sequences, 5, number, 3), draws or sequences))
    return Mixture(components, 5, block)


def two(folder: Path) -> Mixture:
    return mixture_of((stream_of(203, folder / "a", 10), 0), (stream_of(120, folder / "b", 1000), 30))


def batches(mixture: Mixture, position: int, count: int, replica: int = 0, replicas: int = 1) -> List[Any]:
    data = training_batches(mixture, CONTEXT, position, 4, replica, replicas)
    return [batch.numpy() for batch, _ in zip(data, range(count))]


def test_extents_are_read_as_one_stream(tmp_path: Path) -> None:
    stream = stream_of(333, tmp_path, 5)
    np.testing.assert_array_equal(stream.read(0, 333), np.arange(5, 338))
    np.testing.assert_array_equal(stream.read(49, 103), np.arange(54, 157))
    assert len(stream.read(333, 0)) == 0


def test_every_batch_is_of_whole_neighbouring_tokens(tmp_path: Path) -> None:
    for batch in batches(two(tmp_path), 0, 40):
        assert batch.dtype == np.int32
        np.testing.assert_array_equal(np.diff(batch, axis=1), 1)


def test_two_epochs_bring_every_sequence_twice(tmp_path: Path) -> None:
    mixture = mixture_of((stream_of(20 * CONTEXT + 1, tmp_path, 3), 0))
    starts = np.concatenate(batches(mixture, 0, 10))[:, 0] - 3
    assert sorted(starts[:20]) == sorted(starts[20:]) == list(range(0, 160, CONTEXT))
    assert list(starts[:20]) != list(starts[20:])


def test_what_is_fed_has_the_shares_that_the_mixture_tells(tmp_path: Path) -> None:
    mixture = two(tmp_path)
    fed = np.concatenate(batches(mixture, 0, 30))
    from_second = int((fed[:, 0] >= 1000).sum())
    assert mixture.realised(120) == {"0": 120 - from_second, "1": from_second}
    assert from_second == pytest.approx(120 * 30 / 55, abs=3)


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_share_the_very_batches_of_one_process(tmp_path: Path, replicas: int) -> None:
    mixture = two(tmp_path)
    whole = batches(mixture, 8, 40)
    shares = [batches(mixture, 8, 40, replica, replicas) for replica in range(replicas)]
    for number, batch in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([share[number] for share in shares]), batch)


def test_any_position_goes_on_where_the_run_was(tmp_path: Path) -> None:
    mixture = two(tmp_path)
    straight = np.concatenate(batches(mixture, 0, 60))
    for position in range(0, 200, 4):
        np.testing.assert_array_equal(np.concatenate(batches(mixture, position, 3)), straight[position : position + 12])


def test_a_batch_larger_than_several_blocks_is_filled(tmp_path: Path) -> None:
    mixture = two(tmp_path)
    feed = Feed(mixture, CONTEXT, 0, 50, 0, 50)
    straight = np.concatenate(batches(mixture, 0, 50))
    np.testing.assert_array_equal(np.concatenate([feed.batch(number) for number in range(4)]), straight)


class Slow(TokenStream):
    """As a network file system: every read takes 5 ms, however many there are at once."""

    reads: ClassVar[List[int]] = []
    at_once = most_at_once = 0
    lock = threading.Lock()

    def _read_file(self, path: Path, first: int, tokens: Any) -> None:
        with Slow.lock:
            Slow.at_once += 1
            Slow.most_at_once = max(Slow.most_at_once, Slow.at_once)
            Slow.reads.append(tokens.nbytes)
        time.sleep(0.005)
        super()._read_file(path, first, tokens)
        with Slow.lock:
            Slow.at_once -= 1


def test_reads_are_of_a_chunk_and_many_at_once(tmp_path: Path) -> None:
    """64 chunks of 1 MiB, as make_mixture makes them. `lm bench loader` measures what that is worth."""
    from lm.data.mixture import BLOCK_BYTES
    from lm.data.order import CHUNK_BYTES

    path = tmp_path / "train-00000.bin"
    np.zeros(BLOCK_BYTES + 1, "<u2").tofile(path)
    stream = Slow([Extent(path, 0, BLOCK_BYTES + 1)], np.dtype("<u2"), 1)
    sequences = BLOCK_BYTES // 1024
    order = Order(sequences, 0, 0, CHUNK_BYTES // 2048)
    feed = Feed(Mixture([Component("a", stream, order, sequences)], 0, BLOCK_BYTES // 2048), 1024, 0, 8, 0, 8)
    feed.batch(0)
    feed.batch(BLOCK_BYTES // 2048 // 8)  # of the second block, which is complete when this returns
    assert Slow.most_at_once == READERS
    assert np.mean([size >= CHUNK_BYTES for size in Slow.reads]) > 0.95


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("tokens", [2, 9, 10, 100, 137])
def test_evaluation_weighs_every_label_once_in_equal_numbers_of_steps(
    tmp_path: Path, tokens: int, replicas: int
) -> None:
    stream = stream_of(tokens, tmp_path)
    labels: List[int] = []
    counts = set()
    for replica in range(replicas):
        steps = 0
        for tokens_BS, weights_BT in evaluation_batches(stream, CONTEXT, 2, replica, replicas):
            labels += list(tokens_BS.numpy()[:, 1:][weights_BT.numpy() == 1])
            steps += 1
        counts.add(steps)
    assert sorted(labels) == list(range(1, tokens))
    assert len(counts) == 1


@pytest.mark.parametrize(("batch", "replicas"), [(2, 1), (3, 2)])
def test_part_of_an_evaluation_is_spread_over_the_split(tmp_path: Path, batch: int, replicas: int) -> None:
    """The same sequences however they are batched."""
    stream = stream_of(2000, tmp_path)
    sequences = -(-1999 // CONTEXT)
    firsts = []
    for replica in range(replicas):
        for tokens_BS, weights_BT in evaluation_batches(stream, CONTEXT, batch, replica, replicas, at_most=9):
            firsts += [int(row[0]) for row, weights in zip(tokens_BS.numpy(), weights_BT.numpy()) if weights.any()]
    assert sorted(firsts) == [number * sequences // 9 * CONTEXT for number in range(9)]


def test_a_shard_that_is_too_short_is_named(tmp_path: Path) -> None:
    stream = stream_of(333, tmp_path)
    shard = tmp_path / "train-00003.bin"
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.raises(DatasetError, match=r"train-00003\.bin ends at token 20"):
        stream.read(0, 333)


def test_a_token_beyond_the_vocabulary_is_named_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train-00000.bin"
    np.array([5, 6, 7, 400, 8], "<u2").tofile(path)
    stream = TokenStream([Extent(path, 1, 4)], np.dtype("<u2"), 300)
    assert list(stream.read(0, 2)) == [6, 7]
    with pytest.raises(DatasetError, match=r"train-00000.bin is damaged: token 3 \(byte 6\) is 400, .* has 300 ids"):
        stream.read(1, 2)


def test_a_fault_in_a_block_reaches_the_run(tmp_path: Path) -> None:
    mixture = mixture_of((stream_of(203, tmp_path), 0))
    (tmp_path / "train-00002.bin").write_bytes(b"")
    feed = Feed(mixture, CONTEXT, 0, 4, 0, 4)
    with pytest.raises(DatasetError, match=r"train-00002\.bin ends at token"):
        np.concatenate([feed.batch(number) for number in range(10)])
    with pytest.raises(DatasetError, match=r"train-00002\.bin ends at token"):
        batches(mixture, 0, 10)
    with pytest.raises(DatasetError, match=r"train-00002\.bin ends at token"):
        list(evaluation_batches(mixture.components[0].stream, CONTEXT, 2, 0, 1))
