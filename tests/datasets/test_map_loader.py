"""A map-style dataset in one order: whatever the shape, however an epoch ends, whatever is left out, saved anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import chain, combinations, count, cycle, islice
from typing import Any, cast

import numpy as np
import pytest
import torch.utils.data
from all_workers import AllWorkers, Shape
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import MapLoader
from penstock.data.ordering.partition import Tail
from penstock.data.ordering.unsharded_order import UnshardedOrder
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateCorruptError, StateMismatchError
from penstock.proto.state.assignment import Assignment, assigned

SEED = 3
CHAINS: list[list[Shape]] = [
    [(2, 1), (3, 1), (5, 1)],
    [(12, 1), (11, 1), (12, 1)],
    [(1, 1), (16, 4), (1, 1)],
    [(1, 12), (1, 11), (1, 12)],
    [(3, 2), (3, 2), (2, 3), (3, 2)],
]


class Numbers(torch.utils.data.Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> int:
        assert type(number) is int
        if not 0 <= number < self.length:
            raise IndexError(number)
        return number


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


def loader_of(length: int, **changed: Any) -> MapLoader:
    # without reseed, because each loader would look for the generators of all modules
    options = {"shuffle": True, "seed": SEED, "collate_fn": as_it_is, "reseed": False, **changed}
    return MapLoader(Numbers(length), **options)


def cluster_of(length: int, shape: Shape, before: AllWorkers | None = None, **options: Any) -> AllWorkers:
    return AllWorkers(lambda: loader_of(length, **options), shape, before)


@cache
def epoch_of(length: int, samples: int, epoch: int) -> list[int]:
    order = UnshardedOrder(length, samples, seed=SEED, shuffle=True)
    rows: list[int] = order.ids(epoch, np.arange(samples)).tolist()
    return rows


def expected(length: int, samples: int, batch: int, tail: Tail, out: set[int], boxes: int = 1) -> Iterator[list[int]]:
    """Global batches as plain lists make them; `out`: numbers that are left out."""
    left: list[int] = []
    for epoch in count():
        rows = [row for at, row in enumerate(epoch_of(length, samples, epoch)) if epoch * samples + at not in out]
        left = [*left, *rows] if tail == "carry" else rows
        whole, rest = divmod(len(left), batch)
        batches = [left[at : at + batch] for at in range(0, whole * batch, batch)]
        left = left[whole * batch :]
        if rest and tail == "emit" and rest < boxes and whole:
            batches[-1] += left
        elif rest and tail in ("emit", "pad"):
            size = batch if tail == "pad" else rest
            batches.append([*left, *islice(cycle(rows), size - rest)])
        yield from batches


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


@settings(max_examples=10)
@given(
    st.integers(1, 40),
    st.integers(1, 60),
    st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 2), (5, 1)]),
    st.integers(0, 9),
    st.sampled_from(["emit", "pad", "drop", "carry"]),
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 40)), max_size=2),
)
def test_the_order_is_the_plain_one_for_any_shape(
    length: int, samples: int, shape: Shape, more: int, tail: Tail, out: list[tuple[int, int]]
) -> None:
    boxes = shape[0]
    batch = boxes + more
    skip = [range(first, first + many) for first, many in out]
    numbers = set(chain.from_iterable(skip))
    if tail in ("drop", "carry"):
        batch = min(batch, samples)
        if batch < boxes:
            return
    options: dict[str, Any] = {"global_batch_size": batch, "num_samples": samples, "tail": tail, "skip": skip}
    whole = list(islice(expected(length, samples, batch, tail, numbers, boxes), 12))
    assert cluster_of(length, shape, **options).take(12) == whole


@settings(max_examples=6)
@given(
    st.sampled_from(CHAINS),
    st.lists(st.integers(0, 13), min_size=4, max_size=4),
    st.integers(20, 130),
    st.sampled_from(["emit", "pad", "drop", "carry"]),
    st.booleans(),
)
def test_chains_of_rescales_saved_at_any_step(
    shapes: list[Shape], steps: list[int], samples: int, tail: Tail, fewer: bool
) -> None:
    length, batch = (samples + 7 if fewer else samples), 17
    if tail == "emit":
        samples -= samples % batch if samples % batch < 16 else 0
        samples = max(samples, batch)
    options: dict[str, Any] = {"global_batch_size": batch, "num_samples": samples, "tail": tail}
    got: list[list[int]] = []
    cluster: AllWorkers | None = None
    for shape, many in zip(shapes, steps, strict=False):
        cluster = cluster_of(length, shape, cluster, **options)
        got += cluster.take(many)
    got += cluster_of(length, (1, 1), cluster, **options).take(8)
    assert got == list(islice(expected(length, samples, batch, tail, set()), len(got)))


@settings(max_examples=8)
@given(
    st.integers(10, 30),
    st.lists(
        st.tuples(
            st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]),
            st.integers(3, 10),
            st.integers(0, 7),
            st.tuples(st.integers(0, 40), st.integers(0, 15)),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_carried_rows_survive_batches_and_skips(
    samples: int, legs: list[tuple[Shape, int, int, tuple[int, int]]]
) -> None:
    """Lose nothing at an epoch's end: the rows are those of all epochs laid end to end, except the skipped ones."""
    skip: list[range] = []
    place = 0
    got: list[int] = []
    wanted: list[int] = []
    cluster: AllWorkers | None = None
    for shape, batch, steps, (ahead, many) in [*legs, ((1, 1), 4, 5, (0, 0))]:
        skip = [*skip, range(place + ahead, place + ahead + many)]
        cluster = cluster_of(samples, shape, cluster, global_batch_size=batch, tail="carry", skip=skip)
        for row in flat(cluster.take(steps)):
            while any(place in piece for piece in skip):
                place += 1
            got.append(row)
            wanted.append(epoch_of(samples, samples, place // samples)[place % samples])
            place += 1
    assert got == wanted


def test_carried_epoch_can_be_begun_again() -> None:
    whole = [list(loader) for loader in [loader_of(23, batch_size=5, tail="carry")] for _ in range(4)]
    loader = loader_of(23, batch_size=5, tail="carry")
    for epoch in (0, 1, 3, 2):
        loader.set_epoch(epoch)
        assert len(loader) == len(whole[epoch])
        assert list(loader) == whole[epoch]
        loader.set_epoch(epoch)  # the same one again, as if it had not been begun
        assert next(iter(loader)) == whole[epoch][0]
    loader.set_epoch(1)
    again = loader_of(23, batch_size=5, tail="carry")
    for after in range(6):
        again.load_state_dict(json.loads(json.dumps(loader.state_after(after))))
        assert list(again) == (whole[1][after:] or whole[2])


@pytest.mark.parametrize(("length", "samples"), [(10, 25), (10, 4), (1, 5)])
def test_no_sample_again_before_all_have_come(length: int, samples: int) -> None:
    loader = loader_of(length, batch_size=3, num_samples=samples)
    rows = [row for _ in range(9) for batch in loader for row in batch]
    assert len(rows) == 9 * samples
    for at in range(0, len(rows) - length, length):
        assert sorted(rows[at : at + length]) == list(range(length))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more worker processes than processors
def test_one_workers_position_is_not_shared() -> None:
    """Worker processes get a copy of a loader that was loaded outside of them."""
    with assigned(Assignment(0, 1, 0, 2, 0, 1)):
        one = loader_of(50, batch_size=5)
        next(iter(one))
        other = loader_of(50, batch_size=5)
        other.load_state_dict(one.state_dict())
        with pytest.raises(StateMismatchError, match="in the processes that read"):
            next(iter(torch.utils.data.DataLoader(other, batch_size=None, num_workers=2)))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more worker processes than processors
def test_persistent_workers_begin_the_next_epoch() -> None:
    """Their copies were made where nobody shared the batches, and count for themselves from then on."""
    stays = torch.utils.data.DataLoader(
        loader_of(50, batch_size=5), batch_size=None, num_workers=2, persistent_workers=True
    )
    plain = loader_of(50, batch_size=5)
    assert [list(stays) for _ in range(2)] == [list(plain) for _ in range(2)]
    third = iter(stays)  # and torch ends processes that are at work sooner than those that are not
    assert next(third) == next(iter(plain))


@pytest.mark.parametrize("done", [3, 10])
def test_state_after_counts_from_the_loaded_state(done: int) -> None:
    """Count batches whether the loop makes them itself or not."""
    whole = [list(loader) for loader in [loader_of(50, batch_size=5)] for _ in range(3)]
    half = loader_of(50, batch_size=5)
    begun = iter(half)
    for _ in range(done):
        next(begun)
    again, after = loader_of(50, batch_size=5), loader_of(50, batch_size=5)
    again.load_state_dict(half.state_dict())
    stream = list(chain.from_iterable(whole))[done:]
    after.load_state_dict(again.state_after(2))
    assert list(after)[:2] == stream[2:4], "as with worker processes, of which this one sees nothing"
    rest = list(again)
    for steps in (2, len(rest)):
        after.load_state_dict(again.state_after(steps))
        assert list(after)[:2] == stream[steps:][:2]
    again.set_epoch(2)
    after.load_state_dict(again.state_after(1))
    assert list(after) == whole[2][1:]


# ---- what is left out


def test_skipping_keeps_the_order_of_the_rest() -> None:
    whole = [flat(list(loader)) for loader in [loader_of(20, batch_size=4)] for _ in range(3)]
    loader = loader_of(20, batch_size=4, skip=[range(6, 9), range(18, 40), range(45, 46)])
    assert flat(list(loader)) == whole[0][:6] + whole[0][9:18]
    assert flat(list(loader)) == whole[2][:5] + whole[2][6:], "of epoch 1 there is nothing left"
    loader.set_epoch(1)
    assert list(loader) == [], "who asks for it gets nothing, and not the next one"
    loader.set_epoch(2)
    assert flat(list(loader)) == whole[2][:5] + whole[2][6:]


def test_skips_may_be_added_ahead_only() -> None:
    """A run saved at sample 12 goes around 16 to 23; what it has seen it cannot unsee."""
    whole = flat(list(loader_of(40, batch_size=4)))
    loader = loader_of(40, batch_size=4)
    stream = iter(loader)
    for _ in range(3):
        next(stream)
    fresh = loader_of(40, batch_size=4)
    for state in (loader.state_dict(), loader.aggregate_state_dict([loader.state_dict()]), fresh.state_after(3)):
        ahead = loader_of(40, batch_size=4, skip=[range(16, 24)])
        ahead.load_state_dict(state)
        assert flat(list(ahead)) == whole[12:16] + whole[24:]
        behind = loader_of(40, batch_size=4, skip=[range(10, 24)])
        with pytest.raises(
            StateMismatchError, match=r"skip must not have samples .* sample 12, .* got 10 to 11\. Load"
        ):
            behind.load_state_dict(state)
        with pytest.warns(UserWarning, match=r"skip must not .* got 10 to 11"):
            behind.load_state_dict(state, strict=False)


@pytest.mark.parametrize(
    "spoilt",
    [*({"skip": bad} for bad in (3, [[1, 2, 3]], [[2, 1]])), {"done": 101}, {"start": 101}],
)
def test_position_that_cannot_be_is_refused(spoilt: dict[str, Any]) -> None:
    loader = loader_of(40, batch_size=4)
    with pytest.raises(StateCorruptError):
        loader.load_state_dict({**loader.state_dict(), **spoilt})


def test_old_skips_may_be_removed_behind() -> None:
    whole = flat(list(loader_of(40, batch_size=4)))
    loader = loader_of(40, batch_size=4, skip=[range(2, 6), range(30, 34)])
    stream = iter(loader)
    for _ in range(3):
        next(stream)  # up to sample 15
    plain = loader_of(40, batch_size=4)
    plain.load_state_dict(loader.state_dict())
    assert flat(list(plain)) == whole[16:]
    same = loader_of(40, batch_size=4, skip=[range(30, 34), range(2, 4), range(4, 6)])
    same.load_state_dict(loader.state_dict())
    assert flat(list(same)) == whole[16:30] + whole[34:]


# ---- the loader


@pytest.mark.parametrize(("tail", "shape"), [("emit", (2, 3)), ("carry", (1, 1)), ("carry", (2, 3))])
def test_a_later_state_of_a_pass_is_arithmetic(tail: Tail, shape: Shape) -> None:
    class Counted(MapLoader):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "more": 1}

    cluster = cluster_of(50, shape, global_batch_size=6, tail=tail, skip=[range(7, 9)])
    taken: list[list[Any]] = []
    for _ in range(24):
        taken.append([loader.state_dict() for loader in cluster.workers])
        cluster.take(1)
    for earlier, later in combinations(taken, 2):
        for first, second in zip(earlier, later, strict=True):
            if first["epoch"] == second["epoch"]:
                assert MapLoader.advance_state(first, second["done"] - first["done"]) == second
    assert Counted.advance_state is None


class Named(Numbers):
    fingerprint = "numbers, as of May"


@pytest.mark.parametrize(
    ("dataset", "changed", "says"),
    [
        (Numbers(11), {}, "length was 10 and is 11"),
        (Named(10), {}, "data was None and is 'numbers, as of May'"),
        (Numbers(10), {"shuffle_block": 5}, "shuffle_block was 'all' and is 5"),
    ],
)
def test_state_of_other_order_is_refused_by_name(dataset: Numbers, changed: dict[str, Any], says: str) -> None:
    state = loader_of(10, batch_size=4).state_dict()
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": SEED, **changed}
    other = MapLoader(dataset, **options)
    with pytest.raises(StateMismatchError, match=says):
        other.load_state_dict(state)


def test_state_of_a_ranks_only_worker_fits_any_ranks() -> None:
    """All ranks have made as many batches."""
    ranks = [loader_of(24, rank=(rank, 2), global_batch_size=6) for rank in range(2)]
    for stream in [iter(loader) for loader in ranks]:
        next(stream), next(stream)
    alone = loader_of(24, global_batch_size=6)
    whole = list(alone)
    for loader in ranks:
        alone.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert list(alone) == whole[2:]


def test_a_length_that_changes_is_an_error() -> None:
    dataset = Numbers(10)
    loader = MapLoader(dataset, batch_size=3)
    list(loader)
    dataset.length = 9
    with pytest.raises(DatasetError, match=r"Numbers must keep its 10 samples, got 9"):
        iter(loader)


def test_a_shuffle_without_a_seed_takes_the_run_s() -> None:
    def order(seed: int) -> list[Any]:
        with assigned(Assignment(0, 1, 0, 1, seed, 1)):
            return flat(list(loader_of(50, batch_size=5, seed=None)))

    assert sorted(order(3)) == list(range(50))
    assert order(3) == order(3) != order(4)


@pytest.mark.parametrize(
    ("dataset", "options", "error", "says"),
    [
        (Numbers(0), {}, DatasetError, "Numbers must have at least one sample"),
        ({1, 2}, {}, InvalidArgumentError, "dataset must be map-style, got set"),
        (Numbers(3), {"tail": "carry"}, DatasetError, "at most 3 rows .tail='carry'., got 4"),
        (Numbers(3), {"tail": "drop"}, DatasetError, "at most 3 rows .*got 4"),
        (Numbers(9), {"num_samples": 1 << 48}, DatasetError, "must have .* got 9 and 281474976710656"),
        (Numbers(9), {"skip": [range(0, 9, 2)]}, InvalidArgumentError, r"skip must hold ranges.* got range\(0, 9, 2\)"),
        (Numbers(9), {"collate_fn": None}, InvalidArgumentError, "collate_fn must be a function .* got None"),
        (Numbers(9), {"fetch_threads": 1, "reseed": True}, InvalidArgumentError, "must be 0 with reseed=True, got 1"),
    ],
)
def test_settings_that_cannot_be_meant(
    dataset: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        MapLoader(dataset, batch_size=4, **cast(Any, options))
