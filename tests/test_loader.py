"""Feeding: the same global batches for any number of replicas, from any position, nothing lost at the edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from lm.data.loader import SequenceReader, evaluation_batches, overlapping, training_batches
from lm.data.shards import DatasetError, Manifest, SplitWriter, TokenStream

CONTEXT = 8


def stream_of(tokens: int, folder: Path, shard_bytes: int = 100) -> TokenStream:
    """A split whose token i is i, in several shards."""
    writer = SplitWriter(folder, "train", np.dtype("<u2"), shard_bytes)
    writer.add(np.arange(tokens), text_bytes=tokens, source=0)
    manifest = Manifest({}, 60000, 0, "<u2", "", "", [""], {}, {"train": writer.close()})
    return TokenStream(folder, manifest, "train")


def small_chunks(reader: SequenceReader) -> SequenceReader:
    """Several chunks and windows, which a real set has after 16 MiB."""
    from lm.data.order import Order

    reader.order = Order(reader.order.sequences, seed=5, chunk_sequences=3, window_chunks=2)
    return reader


def batches(reader: SequenceReader, position: int, count: int, replica: int = 0, replicas: int = 1) -> List[Any]:
    data = training_batches(reader, position, 4, replica, replicas)
    return [batch.numpy() for batch, _ in zip(data, range(count))]


def test_shards_are_no_larger_than_asked_and_read_as_one_stream(tmp_path: Path) -> None:
    stream = stream_of(333, tmp_path)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("train-*.bin"))]
    assert sizes == [100] * 6 + [66]
    np.testing.assert_array_equal(stream.read(0, 333), np.arange(333))
    np.testing.assert_array_equal(stream.read(49, 103), np.arange(49, 152))


def test_inputs_and_labels_overlap_and_no_label_is_lost() -> None:
    sequences = overlapping(np.arange(25), 8)
    np.testing.assert_array_equal(sequences[:, 0], [0, 8, 16])
    np.testing.assert_array_equal(sequences[:, 1:].reshape(-1), np.arange(1, 25))


def test_two_epochs_bring_every_sequence_twice(tmp_path: Path) -> None:
    reader = small_chunks(SequenceReader(stream_of(20 * CONTEXT + 1, tmp_path), CONTEXT, seed=5))
    starts = np.concatenate(batches(reader, 0, 10))[:, 0]
    assert sorted(starts[:20]) == sorted(starts[20:]) == list(range(0, 160, CONTEXT))
    assert list(starts[:20]) != list(starts[20:])


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_share_the_very_batches_of_one_process(tmp_path: Path, replicas: int) -> None:
    reader = small_chunks(SequenceReader(stream_of(203, tmp_path), CONTEXT, seed=5))
    whole = batches(reader, 8, 6)
    shares = [batches(reader, 8, 6, replica, replicas) for replica in range(replicas)]
    for number, batch in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([share[number] for share in shares]), batch)


def test_any_position_goes_on_where_the_run_was(tmp_path: Path) -> None:
    reader = small_chunks(SequenceReader(stream_of(203, tmp_path), CONTEXT, seed=5))
    straight = np.concatenate(batches(reader, 0, 20))
    for position in range(0, 60, 4):
        resumed = np.concatenate(batches(reader, position, 3))
        np.testing.assert_array_equal(resumed, straight[position : position + 12])


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


def test_a_shard_that_is_too_short_is_named(tmp_path: Path) -> None:
    stream = stream_of(333, tmp_path)
    shard = tmp_path / "train-00003.bin"
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.raises(DatasetError, match=r"train-00003\.bin ends at token 20"):
        stream.read(0, 333)
