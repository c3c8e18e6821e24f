"""The order in which a ShardLoader deals out a source: on any boxes and workers, through chains of rescales."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listed import Counting, Listed
from tests.datasets.sharded.contract import SEED, Fleet, Shape

from penstock.data.ordering.partition import Partition
from penstock.data.sharded.shard_loader import ShardLoader
from penstock.proto.errors import DatasetError, InvalidArgumentError

SHAPES: list[Shape] = [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (4, 1), (1, 11), (12, 1)]
UNEQUAL = [7, 0, 23, 1, 12]


def loader_of(source: Any, **options: Any) -> ShardLoader:
    return ShardLoader(source, **{"seed": 3, "collate_fn": list, **options})


def stream_of(lengths: list[int], epoch: int) -> list[int]:
    """An epoch of a Listed, in order."""
    lengths = lengths[:: -1 if epoch % 2 else 1]
    return [
        (epoch * 1000 + s) * 1000 + i for i in range(max(lengths)) for s, length in enumerate(lengths) if i < length
    ]


# ---- finite


def dealt(lengths: list[int], legs: list[tuple[Shape, int, int]], tail: Any) -> list[list[int]]:
    """Global batches of (shape, rows of a batch, batches) one after another, by Dealing on epochs laid out."""
    batches: list[list[int]] = []
    epoch = start = done = 0
    before: tuple[Shape, int] | None = None
    for (boxes, workers), rows, count in legs:
        if before != ((boxes, workers), rows) and before is not None:
            partition = Partition(sum(lengths), start, before[1], before[0][0], tail)
            start, done = partition.position(done), 0
        before = (boxes, workers), rows
        for _ in range(count):
            while True:
                partition = Partition(sum(lengths), start, rows, boxes, tail)
                if start < sum(lengths) and done < partition.batches:
                    break
                epoch, start, done = epoch + 1, 0, 0
            own = [partition.rows(done, box).tolist() for box in range(boxes)]
            stream = stream_of(lengths, epoch)
            size = sum(map(len, own))
            batches.append([stream[own[at % boxes][at // boxes]] for at in range(size)])
            done += 1
    return batches


@pytest.mark.filterwarnings("ignore:the epoch's last batch has fewer samples than there are boxes")
@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=7).filter(lambda lengths: sum(lengths) >= 9),
    st.booleans(),
    st.sampled_from(["emit", "pad", "drop"]),
    st.lists(st.tuples(st.sampled_from(SHAPES[:6]), st.integers(4, 9), st.integers(0, 9)), min_size=1, max_size=5),
    st.booleans(),
)
def test_finite_through_any_chain_of_topologies(
    lengths: list[int], known: bool, tail: Any, legs: list[tuple[Shape, int, int]], grows: bool
) -> None:
    if not grows:  # where lengths are not known, what "drop" leaves out shows only in the batch that is not made
        legs = [(shape, legs[0][1], count) for shape, _, count in legs]
    elif tail == "drop":
        known = True
    got: list[list[int]] = []
    fleet: Fleet | None = None
    for shape, rows, count in legs:
        fleet = Fleet(lambda: Listed(lengths, known=known), shape, fleet, global_batch_size=rows, tail=tail)
        got += fleet.take(count)
    assert got == dealt(lengths, legs, tail)


def test_others_rows_are_skipped_and_not_made() -> None:
    for known in (True, False):
        source = Listed(UNEQUAL, known=known)
        fleet = Fleet(lambda: source, (1, 3), batch_size=5)  # noqa: B023
        fleet.take(9)
        assert source.made == sum(UNEQUAL), "each sample was made by one worker alone"


def test_it_looks_ahead_only_as_far_as_needed() -> None:
    """Look ahead by one row for each box, because fewer rows than boxes are added to the batch before. One box needs no
    look-ahead."""
    source = Listed([50, 50], known=False)
    stream = iter(loader_of(source, batch_size=4))
    next(stream)
    assert source.made == 4
    source = Listed([50, 50], known=False)
    stream = iter(loader_of(source, global_batch_size=9, rank=(1, 3)))
    next(stream)
    assert source.made == 3 + 1
    for _ in range(5):
        next(stream)
    assert source.made == 6 * 3 + 1


# ---- endless


@settings(max_examples=15)
@given(
    st.sampled_from([(1, 1), (1, 4), (2, 3), (3, 2), (4, 1), (5, 1)]),
    st.lists(st.tuples(st.sampled_from(SHAPES[:6]), st.integers(4, 9), st.integers(0, 7)), min_size=1, max_size=5),
)
def test_endless_through_any_chain_of_topologies(
    endless_order: tuple[int, int], legs: list[tuple[Shape, int, int]]
) -> None:
    """Counting's samples say where the loader says that they come, and the order is that of the first batch."""
    partitions, columns = endless_order
    block = next((rows for _, rows, count in legs if count), None)
    alone = loader_of(Counting(partitions * columns), batch_size=1, block=block, partitions=partitions, seed=SEED)
    fleet: Fleet | None = None
    got: list[Any] = []
    for shape, rows, count in legs:
        fleet = Fleet(
            lambda: Counting(partitions * columns), shape, fleet, global_batch_size=rows, partitions=partitions
        )
        got += [row for batch in fleet.take(count) for row in batch]
    assert got == [row for (row,) in itertools.islice(alone, len(got))]
    assert [place for _, _, place, _ in got] == list(range(len(got)))
    for shard in range(partitions * columns):
        indices = [index for s, index, _, _ in got if s == shard]
        assert indices == list(range(len(indices)))


def test_first_state_leaves_the_block_to_loader() -> None:
    """Load a state that was taken in the training process, as by one box with one worker; batch_size is that of each
    box."""
    state = loader_of(Counting(8), batch_size=4).state_dict()
    loaded = loader_of(Counting(8), batch_size=4, rank=(0, 2))
    loaded.load_state_dict(state)
    assert next(iter(loaded)) == next(iter(loader_of(Counting(8), batch_size=4, rank=(0, 2))))


def test_endless_worker_opens_only_its_own_shards() -> None:
    sources: list[Counting] = []

    def make() -> Counting:
        sources.append(Counting(24))
        return sources[-1]

    fleet = Fleet(make, (2, 3), global_batch_size=8, partitions=4)
    fleet.take(30)
    opened = [{shard for shard, _ in source.opened} for source in sources]
    assert sum(map(len, opened)) == len(set().union(*opened)) == 24
    got = Fleet(make, (4, 2), fleet, global_batch_size=8, partitions=4)
    got.take(30)
    again = [opening for source in sources[6:] for opening in source.opened]
    assert {shard for shard, _ in again} == set(range(24))
    assert {index for _, index in again} == {10}, "each was opened where it was left"


def test_epoch_after_an_endless_one_differs(caplog: pytest.LogCaptureFixture) -> None:
    """Warn once in the log, because the iterators of other systems would continue."""
    loader = loader_of(Counting(4), batch_size=2)
    first = next(iter(loader))
    assert not caplog.records
    second = next(iter(loader))
    next(iter(loader))
    assert [record.getMessage()[:44] for record in caplog.records] == ["a second epoch of an endless source begins, "]
    assert (first[0][:3], second[0][:3]) == ((0, 0, 0), (0, 0, 0))
    assert first[0][3] == 3
    assert second[0][3] != 3
    loader.set_epoch(0)
    assert next(iter(loader)) == first
    loader.set_epoch(1)
    assert next(iter(loader)) == second


def test_an_endless_source_that_ends_is_an_error() -> None:
    stream = iter(loader_of(Counting(4, empty=2), batch_size=3, partitions=4))
    with pytest.raises(DatasetError, match=r"shard 2 must have sample 0"):
        next(stream)


# ---- passes


def test_padding_is_read_again() -> None:
    source = Listed([9], known=False)
    assert list(loader_of(source, batch_size=8, tail="pad"))[1] == [8, 0, 1, 2, 3, 4, 5, 6]
    assert source.opened == [(0, 0), (0, 0)]
    few = list(loader_of(Listed([1, 1], known=False), batch_size=5, tail="pad"))
    assert few == [[0, 1000, 0, 1000, 0]], "again and again, if need be"


@pytest.mark.parametrize("known", [True, False])
def test_an_epoch_without_a_batch_is_an_error(known: bool) -> None:
    def first(source: Listed, **options: Any) -> Any:
        return next(iter(loader_of(source, **options)))

    with pytest.raises(DatasetError, match=r"epoch 0 must have enough samples.* got 0"):
        first(Listed([0, 0], known=known), batch_size=1)
    with pytest.raises(DatasetError, match="one batch of 6 rows, got 5"):
        first(Listed([2, 3], known=known), batch_size=6, tail="drop")


def test_shared_epochs_end_is_an_epoch_of_its_own() -> None:
    """A box counts its epochs: a worker that stands at the end yields nothing, once."""
    for known in (True, False):
        fleet = Fleet(lambda: Listed([10, 10], known=known), (1, 2), batch_size=5)  # noqa: B023
        fleet.take(4)
        state = fleet.state()
        for number in range(2):
            loader = fleet._worker(number, state)
            assert list(loader) == []
            assert next(iter(loader))[0] >= 1_000_000


# ---- in other hands


def test_batches_of_the_source_s_own() -> None:
    """Give each box one batch of the source at each step."""
    for known in (True, False):
        fleet = Fleet(lambda: Listed([4, 3], known=known), (3, 2), unbatched=True, tail="pad")  # noqa: B023
        steps = []
        while (rows := fleet.step_rows()) is not None:
            steps.append(rows)
        assert steps == [[0, 1000, 1], [1001, 2, 1002], [3, 0, 1000]]
    with pytest.raises(InvalidArgumentError, match="must be None with unbatched=True"):
        ShardLoader(Listed([4]), unbatched=True, batch_size=1)


def test_its_length_where_that_is_known() -> None:
    assert len(loader_of(Listed(UNEQUAL), batch_size=5)) == 9
    for source, why in ((Listed(UNEQUAL, known=False), "does not report"), (Counting(3), "is endless")):
        with pytest.raises(TypeError, match=why):
            len(loader_of(source, batch_size=5))
    assert list(loader_of(Listed([3], known=False), batch_size=5)) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (Listed([3]), {"batch_size": 1, "partitions": 2}, "partitions must be 1 for a finite source, got 2"),
        (Counting(4), {"batch_size": 1, "partitions": 3}, "partitions must divide the source's 4 shards, got 3"),
        (Listed([]), {"batch_size": 1}, "num_shards of the source must be at least 1, got 0"),
        ([1, 2, 3], {"batch_size": 1}, "needs a source in logical shards, got list. Use LogicalShards"),
    ],
)
def test_settings_that_cannot_be_meant(source: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        ShardLoader(source, **options)
