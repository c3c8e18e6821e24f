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
from opaque_streams import Counter, Numbers
from shardsets import numbers

from penstock.data import LogicalShards, StreamingDataset
from penstock.data.ordering.permutation import Ints
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


@pytest.mark.parametrize("count", [511, 512])
def test_each_record_is_in_exactly_one_shard(count: int) -> None:
    """20,000 files of 100,000 documents: in fractions of 32 bits 463 of them belong to none of 512 shards."""
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


def test_position_is_a_number_and_skipping_adds() -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    piece = Counted(range(1000))
    source = LogicalShards([piece], shards=2)
    position = position_after(source, 250, shard=1)
    assert position == 250
    assert rest(source, position, shard=1, most=2) == [750, 751]
    assert piece.reads == 2
    for wrong in (-1, 501, 2.5, "3", [1]):
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


def test_a_torch_dataset_and_a_memmap(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(4))
    source = LogicalShards([lambda: np.load(tmp_path / "a.npy", mmap_mode="r"), lambda: Numbers(2)], shards=2)
    assert [int(record) for record in rest(source)] == [0, 1, 2]
    assert rest(source, shard=1)[1]["number"] == 0


# ---- streaming datasets as pieces


class Recording(StreamingDataset):
    """Keeps what it was to fetch, and which shards it read from."""

    def __init__(self, folder: Path) -> None:
        super().__init__(local=folder)
        self.asked: list[list[int]] = []
        self.touched: list[int] = []

    def fetch_ahead(self, units: Ints, *, needed: int = 0, group: str = "") -> int:
        self.asked.append(units.tolist())
        return super().fetch_ahead(units, needed=needed, group=group)

    def __getitem__(self, index: Any) -> Any:
        self.touched.append(int(index) // 10)
        return super().__getitem__(index)


def test_streaming_piece_is_local_and_prefetched(hundred: Path, tmp_path: Path) -> None:
    one, other = Recording(hundred), Recording(numbers(tmp_path / "more", 50, 100))
    source = LogicalShards([one, other, [{"number": 150}]], shards=3, shuffle=True, shuffle_block=20)
    cursors = [source.open(shard, 0, SEED) for shard in range(3)]
    first = next(cursors[0])["number"]
    for dataset in (one, other):
        last = dataset.asked[-1]
        if dataset.touched:
            assert dataset.touched[0] in last, "what is read now is asked for first"
        assert len(last) == len(set(last))
    assert 0 < len(one.asked[-1]) + len(other.asked[-1]) < 15, "no more than two blocks of one cursor"
    for cursor in cursors[1:]:
        next(cursor)
    for dataset in (one, other):
        assert set(dataset.touched) <= set(dataset.asked[-1]), "what one cursor needs does not push out another's"
    got = [first] + [record["number"] for cursor in cursors for record in cursor]
    assert one.asked[-1] == other.asked[-1] == [], "nobody reads any more"
    assert len(got) == 149  # two were read to see what is asked for
    for dataset in (one, other):
        changes = sum(a != b for a, b in itertools.pairwise(dataset.touched))
        assert changes < len(dataset.touched)
        windows = [set(dataset.touched[at : at + 15]) for at in range(0, len(dataset.touched) - 15, 15)]
        assert all(len(window) <= 6 for window in windows), "records of few shards at a time"
    one.close()
    other.close()


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


def test_skipped_pieces_are_not_opened() -> None:
    opened: list[int] = []

    def piece(number: int) -> Callable[[], Iterator[int]]:
        def records() -> Iterator[int]:
            opened.append(number)
            return iter(range(10 * number, 10 * number + 10))

        return records

    source = LogicalShards([piece(number) for number in range(5)], shards=1, counts=[10] * 5)
    opened.clear()
    cursor = source.open(0, 0, SEED)
    assert cursor.skip(33) == 33
    assert next(cursor) == 33
    assert opened == [3]
    assert cursor.skip(100) == 16
    assert opened == [3], "of the rest it is known that it is passed"
    cursor.close()


def test_piece_with_a_state_resumes_by_it() -> None:
    made: list[Counter] = []

    def piece() -> Counter:
        made.append(Counter(5000))
        return made[-1]

    source = LogicalShards([piece, lambda: Counter(3, 9000)], shards=1)
    position = position_after(source, 4000)
    made.clear()
    assert rest(source, position, most=1) == [4000]
    assert [counter.loaded for counter in made] == [1]
    assert made[0].made < 4000
    assert made[0].closed == 1


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
