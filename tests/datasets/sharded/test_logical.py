"""Any pieces as logical shards: each record in one shard, in one order, gone on with from any place."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch.utils.data
from given_shards import position_after, rest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import LogicalShards, StreamingDataset
from penstock.data.sharded.protocol import ShardedSource
from penstock.data.sharded.sources.indexed_pieces import shard_range
from penstock.data.sharded.sources.sequential_pieces import assign_pieces
from penstock.proto.errors import StateCorruptError

SEED = 1


def shards(source: ShardedSource, epoch: int = 0) -> list[list[Any]]:
    return [list(source.open(shard, epoch, SEED)) for shard in range(source.num_shards)]


def lists(*lengths: int) -> list[list[tuple[int, int]]]:
    return [[(number, index) for index in range(length)] for number, length in enumerate(lengths)]


def opening(records: Any) -> Callable[[], Iterator[Any]]:
    return lambda: iter(records)


# ---- by position


class File:
    """File of 100,000 documents, none of which is read."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        raise AssertionError("to pass over it is not to read it")


def test_each_record_is_in_exactly_one_shard() -> None:
    """20,000 files of 100,000 documents: in fractions of 32 bits 463 of them belong to none of 512 shards."""
    count = 511
    total = 20_000 * 100_000
    bounds = [shard_range(total, count, shard) for shard in range(count)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
    lengths = [end - begin for begin, end in bounds]
    assert {length - total // count for length in lengths} <= {0, 1}
    source = LogicalShards([File()] * 20_000, shards=count, shuffle=True)
    assert source.lengths(0) == lengths
    cursor = source.open(count - 1, 0, SEED)
    assert cursor.skip(1 << 40) == lengths[-1]
    cursor.close()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([1, 5, None]),
    st.booleans(),
)
def test_every_record_is_in_one_shard(
    lengths: list[int], count: int, shuffle: bool, block: int | None, iterable: bool
) -> None:
    pieces: list[Any] = lists(*lengths)
    if iterable:
        pieces[0] = opening(pieces[0])
    source = LogicalShards(pieces, shards=count, shuffle=shuffle, shuffle_block=block)
    whole = sorted(itertools.chain(*lists(*lengths)))
    epochs = [shards(source, epoch) for epoch in range(2)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == whole
    if not iterable:
        assert max(map(len, epochs[0])) - min(map(len, epochs[0])) <= 1
        if not shuffle:
            assert list(itertools.chain(*epochs[0])) == whole


def test_records_are_shuffled_anew_in_each_epoch() -> None:
    source = LogicalShards(lists(40, 40, 40), shards=2, shuffle=True)
    one, other = (list(itertools.chain(*shards(source, epoch))) for epoch in range(2))
    third = [record for shard in range(2) for record in source.open(shard, 0, SEED + 1)]
    assert one != other
    assert third not in (one, other), "another seed"
    assert sorted(one) == sorted(other) == sorted(third) == list(itertools.chain(*lists(40, 40, 40)))


def test_damaged_position_is_refused() -> None:
    source = LogicalShards([list(range(1000))], shards=2)
    for wrong in (-1, 501, 2.5, [1]):
        with pytest.raises(StateCorruptError, match="the saved position in a shard of 500 records is damaged"):
            source.open(1, 0, SEED, wrong)


@pytest.mark.parametrize(
    ("piece", "wanted"),
    [
        (np.arange(6).reshape(3, 2), [[0, 1], [2, 3], [4, 5]]),
        (torch.arange(3), [0, 1, 2]),
        (pa.table({"text": ["a", "b", "c"], "n": [1, None, 3]}), [{"text": "a", "n": 1}, {"text": "b", "n": None}]),
        (range(5, 8), [5, 6, 7]),
    ],
    ids=["array", "tensor", "table", "range"],
)
def test_what_can_be_a_piece(piece: Any, wanted: list[Any]) -> None:
    records = rest(LogicalShards([piece, piece], shards=1))
    assert len(records) == 6
    plain = [record if isinstance(record, dict) else np.asarray(record).tolist() for record in records]
    assert plain[: len(wanted)] == wanted


# ---- whole pieces


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 8), st.integers(0, 5))
def test_pieces_are_dealt_evenly_by_their_counts(counts: list[int], count: int, epoch: int) -> None:
    runs = assign_pieces(len(counts), counts, count, epoch=epoch, shuffle=True)
    assert sorted(itertools.chain(*runs)) == list(range(len(counts)))
    sums = [sum(counts[number] for number in run) for run in runs]
    assert max(sums) - min(sums) <= max(counts)


def test_pieces_of_unknown_length_go_in_turn() -> None:
    source = LogicalShards([opening(own) for own in lists(3, 1, 2, 4, 1)], shards=2)
    assert shards(source) == [[*lists(3)[0], (2, 0), (2, 1), (4, 0)], [(1, 0), *[(3, i) for i in range(4)]]]
    assert source.lengths(0) is None


def test_piece_order_follows_seed_and_epoch() -> None:
    source = LogicalShards([opening(own) for own in lists(*[1] * 12)], shards=2, shuffle=True)
    orders = [shards(source, 0), shards(source, 1), [list(source.open(shard, 0, 8)) for shard in range(2)]]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert [sorted(shard) for shard in orders[0]] == [sorted(shard) for shard in orders[2]]


def test_users_object_is_not_loaded_nor_closed() -> None:
    class Words:
        closed = False

        def __iter__(self) -> Iterator[str]:
            return iter("abcdef")

        def state_dict(self) -> dict[str, int]:
            raise AssertionError("others may be reading it")

        load_state_dict = None

        def close(self) -> None:
            self.closed = True

    words = Words()
    source = LogicalShards([words], shards=1)
    assert rest(source, position_after(source, 2)) == list("cdef")
    assert not words.closed


class Lines(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


def test_iterable_with_length_is_sequential() -> None:
    assert shards(LogicalShards([Lines(), [7, 8]], shards=2)) == [[0, 1, 2, 3], [7, 8]]


class Locked:
    """Piece that can be opened in another process, but not sent to it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return list(range(3))[index]


def test_source_is_pickled_after_reading(hundred: Path) -> None:
    """Pickle a source without its open pieces."""
    for pieces in ([Lines(), [5, 6]], [[1, 2, 3], [4]], [StreamingDataset(local=hundred)], [partial(Locked), Locked]):
        source = LogicalShards(pieces, shards=2, shuffle=True)
        cursor = source.open(1, 0, SEED)
        next(cursor)
        copy = pickle.loads(pickle.dumps(source))
        assert shards(copy) == shards(source)
        cursor.close()
