"""The order of an epoch: every sample as often as its share says, evenly mixed, near in shards, the same for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.data.ordering.interleave import MAX_DEVIATION, Interleaving
from penstock.data.ordering.permutation import Ints
from penstock.data.ordering.sharded_order import Interleave, ShardedOrder
from penstock.proto.errors import DatasetError

INTERLEAVES: list[Interleave] = ["shards", "samples", "batches"]


def order(*sizes: list[int], shares: list[int] | None = None, **settings: Any) -> ShardedOrder:
    streams = [np.array(stream) for stream in sizes]
    settings = {"seed": 5, "shuffle": True, "block": 20} | settings
    return ShardedOrder(streams, shares or [int(stream.sum()) for stream in streams], **settings)


def epoch_of(order: ShardedOrder, epoch: int = 0) -> Ints:
    return order.ids(epoch, np.arange(len(order)))


streams_of_shards = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any), min_size=1, max_size=4)


@settings(max_examples=10)
@given(
    streams_of_shards,
    st.data(),
    st.booleans(),
    st.sampled_from([None, 1, 10, 50]),
    st.integers(1, 6),
    st.sampled_from(INTERLEAVES),
    st.integers(0, 99),
)
def test_samples_come_as_often_as_their_share(
    streams: list[list[int]],
    data: st.DataObject,
    shuffle: bool,
    block: int | None,
    partitions: int,
    interleave: Interleave,
    seed: int,
) -> None:
    shares = [data.draw(st.integers(1, 3 * sum(stream))) for stream in streams]
    found = order(
        *streams,
        shares=shares,
        shuffle=shuffle,
        block=block,
        partitions=partitions,
        interleave=interleave,
        batch=2 * partitions,
        seed=seed,
    )
    seen = np.zeros(sum(map(sum, streams)), np.int64)
    for epoch in range(3):
        ids = epoch_of(found, epoch)
        assert len(ids) == sum(shares)
        seen += np.bincount(ids, minlength=len(seen))
        # The shards that are fetched ahead are those that are needed.
        shards = found.shards(epoch, np.arange(len(ids))).tolist()
        assert set(np.searchsorted(found.starts, ids, side="right") - 1) <= set(shards)
        assert len(set(shards)) == len(shards)
        # A position is a place of its own, in whatever company it is asked for.
        some = data.draw(st.permutations(range(len(ids))))[:7]
        assert found.ids(epoch, some).tolist() == ids[some].tolist()
        begin = 0
        for stream, share in zip(streams, shares, strict=True):
            times = seen[begin : begin + sum(stream)]
            assert times.sum() == share * (epoch + 1)
            assert times.max() - times.min() <= 1, "some sample came again before all had come"
            begin += sum(stream)


def test_without_a_shuffle_it_is_as_stored() -> None:
    assert epoch_of(order([3, 0, 4], [2], shuffle=False)).tolist() == list(range(9))
    assert epoch_of(order([3, 4], shares=[5], shuffle=False), 1).tolist() == [5, 6, 0, 1, 2], "it goes on, and round"


weights = st.one_of(st.integers(0, 3), st.integers(0, 300), st.sampled_from([1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144]))


@settings(max_examples=12)
@given(st.lists(weights, min_size=1, max_size=30).filter(any) | st.lists(weights, min_size=2, max_size=2).filter(any))
@example([70, 30])
@example([997, 2, 1])
@example([1, 10**5])
@example([50, *[1] * 50])
def test_turns_keep_each_share_at_every_prefix(units: list[int]) -> None:
    total = sum(units)
    sequence, place = np.full(total, -1), np.full(total, -1)
    for number, which, places in Interleaving(units).split(np.arange(total)):
        sequence[which], place[which] = number, places
    for number, own in enumerate(units):
        chosen = sequence == number
        assert place[chosen].tolist() == list(range(own)), "its units, each once and in order"
        off = np.cumsum(chosen) - np.arange(1, total + 1) * own / total
        assert np.abs(off).max() <= (0.5 if np.count_nonzero(units) <= 2 else MAX_DEVIATION)


@pytest.mark.parametrize(
    "units",
    [[(1 << 47) - 12345, (1 << 46) + 987], [3, (1 << 48) - 7], [1 << 46, 1 << 46]],
)
def test_turns_are_exact_where_floats_are_not(units: list[int]) -> None:
    total, large = sum(units), max(units)
    turns = np.random.default_rng(1).integers(0, total, 2000)
    found = np.empty((2000, 2), np.int64)
    for number, which, places in Interleaving(units).split(turns):
        found[which] = np.stack([np.full(len(which), units[number] == large), places], axis=1)
    for turn, (is_large, place) in zip(turns.tolist(), found.tolist(), strict=True):
        before, behind = ((2 * at * large + total) // (2 * total) for at in (turn, turn + 1))
        goes_large = behind > before
        if units[0] != units[1]:
            assert bool(is_large) == goes_large
        assert place == (before if goes_large else turn - before)


def test_batches_of_one_stream_each() -> None:
    found = order([40], [25], [7], interleave="batches", batch=8, partitions=2)
    stream = np.searchsorted([0, 40, 65, 72], epoch_of(found), side="right") - 1
    whole = stream[: 5 * 8 + 3 * 8].reshape(-1, 8)
    assert (whole == whole[:, :1]).all()
    assert np.bincount(whole[:, 0]).tolist() == [5, 3]
    assert stream[64:].tolist() == [1, *[2] * 7], "what is less than a batch comes at the end"


@pytest.mark.parametrize("partitions", [4, 8])
def test_each_partition_reads_its_own_shards(partitions: int) -> None:
    found = order([10] * 64, partitions=partitions, block=40)
    ids = epoch_of(found)
    shards = [set((ids[number::partitions] // 10).tolist()) for number in range(partitions)]
    assert sum(map(len, shards)) == 64, "partitions have shards in common"
    assert max(map(len, shards)) == 64 // partitions


def test_a_block_needs_its_shards_and_no_others() -> None:
    found = order([10] * 100, block=50)
    ids = epoch_of(found)
    for begin in range(0, 1000, 50):
        shards = set((ids[begin : begin + 50] // 10).tolist())
        assert len(shards) == 5
        assert set(found.shards(0, np.arange(begin, begin + 50)).tolist()) == shards


def test_large_epochs_need_wide_numbers() -> None:
    large = order([1 << 31] * 4, block=1 << 31)
    at = np.concatenate([np.arange(1000) + shard * (1 << 31) for shard in range(4)])
    ids = large.ids(0, at)
    assert len(np.unique(ids)) == 4000
    assert sorted({*(ids >> 31).tolist()}) == [0, 1, 2, 3], "a block is a shard here"
    assert all(len(np.unique(part >> 31)) == 1 for part in ids.reshape(4, -1))


def test_it_is_the_same_for_ever() -> None:
    """A saved state is a position in this order."""
    assert epoch_of(order([5, 4, 6], block=10), 3).tolist() == GOLDEN[0]
    assert epoch_of(order([5], [4], shares=[3, 6], interleave="samples", partitions=2), 1).tolist() == GOLDEN[1]


@pytest.mark.parametrize("shares", [[0], [1 << 48]])
def test_an_epoch_has_samples_and_not_too_many(shares: list[int]) -> None:
    with pytest.raises(DatasetError, match=f"an epoch must have .* got {shares[0]}"):
        order([3], shares=shares)


GOLDEN = [[8, 5, 0, 3, 1, 6, 2, 4, 7, 11, 13, 10, 9, 12, 14], [6, 7, 5, 8, 0, 4, 5, 6, 4]]
