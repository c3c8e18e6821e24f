"""States of a ShardLoader: what they hold and cost, failures between two of them, and which ones are refused."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from all_workers import saved
from listed import Counting, Listed
from tests.datasets.sharded.contract import Fleet, Shape

from penstock.data import (
    Chunked,
    Filtered,
    LogicalShards,
    Mapped,
    Mixture,
    Packed,
    Repeated,
    WindowShuffled,
)
from penstock.data.sharded.layers.layer import Layer
from penstock.data.sharded.protocol import Cursor
from penstock.data.sharded.shard_loader import ShardLoader
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    StateCorruptError,
    StateMismatchError,
)

UNEQUAL = [7, 0, 23, 1, 12]


def loader_of(source: Any, **options: Any) -> ShardLoader:
    return ShardLoader(source, **{"seed": 3, "collate_fn": list, "batch_size": 4, **options})


def marked(shard: int, index: Any, saved: Any) -> dict[str, Any]:
    """The part of a state that has one mark."""
    return {"shards": [shard], "indices": [index], "saved_positions": [saved]}


def test_a_state_does_not_change_once_it_is_given() -> None:
    loader = loader_of(Listed(UNEQUAL, known=False))
    stream = iter(loader)
    states = []
    for _ in range(8):
        states.append((loader.state_dict(), saved(loader.state_dict())))
        next(stream)
    assert all(given == copy for given, copy in states)


@pytest.mark.parametrize(("known", "tail"), [(True, "emit"), (False, "emit"), (False, "drop")])
def test_other_workers_skip_an_epochs_end(known: bool, tail: Any) -> None:
    """Begin the next epoch on other workers; the same workers would find out that this one is over."""
    fleet = Fleet(lambda: Listed([5, 4], known=known), (1, 2), global_batch_size=4, tail=tail)
    fleet.take(2 if tail == "drop" else 3)
    for shape, epoch in [((1, 2), 0), ((1, 3), 1), ((2, 1), 1)]:
        moved = Fleet(fleet.make, shape, fleet, global_batch_size=4, tail=tail)
        assert {worker.state_dict()["epoch"] for worker in moved.workers} == {epoch}
        assert moved.take(1)[0][0] == 1_000_000


def test_worker_still_in_the_previous_epoch() -> None:
    fleet = Fleet(lambda: Listed([10, 10], known=False), (1, 2), global_batch_size=5)
    whole = Fleet(fleet.make, (1, 1), global_batch_size=5).take(8)
    fleet.take(4)
    fleet.passes[0] = iter(fleet.workers[0])
    assert next(fleet.passes[0]) == whole[4]
    state = fleet.state()
    assert (state["epoch"], state["done"]) == (1, 1)
    again = [fleet._worker(number, state) for number in range(2)]
    assert next(iter(again[0])) == whole[6]
    assert list(again[1]) == [], "it finds out first that its epoch is over"
    assert next(iter(again[1])) == whole[5]
    assert Fleet(fleet.make, (2, 2), fleet, global_batch_size=5).take(3) == whole[5:]


def failing_once(known: bool, lengths: list[int], bad: set[int]) -> Mapped:
    """Fails once at each of these samples; the cursor has lost it then."""

    def function(sample: int) -> int:
        if sample in bad:
            bad.remove(sample)
            raise OSError(f"sample {sample}")
        return sample

    return Mapped(Listed(lengths, known=known), function)


@pytest.mark.parametrize(("known", "rank"), [(True, (0, 1)), (False, (1, 3))])
def test_unreadable_sample_is_retried(known: bool, rank: tuple[int, int]) -> None:
    expected = list(loader_of(Listed(UNEQUAL), rank=rank, batch_size=3))
    bad = {batch[-1] for batch in expected} | {batch[0] for batch in expected[1:]}
    loader = loader_of(failing_once(known, UNEQUAL, set(bad)), rank=rank, batch_size=3)
    stream, got, failures = iter(loader), [], 0
    while True:
        try:
            got.append(next(stream))
        except OSError:
            failures += 1
            other = loader_of(failing_once(known, UNEQUAL, set()), rank=rank, batch_size=3)
            other.load_state_dict(saved(loader.state_dict()))
            assert next(iter(other)) == expected[len(got)]
        except StopIteration:
            break
    assert got == expected
    assert failures == len(bad)


def test_workers_resume_at_their_own_positions() -> None:
    """Resume each worker exactly on the same topology; on another one, after the last batch that all of them have
    made."""
    for make in (lambda: Listed(UNEQUAL, known=False), lambda: Counting(6)):
        whole = Fleet(make, (1, 1), batch_size=3).take(12)
        fleet = Fleet(make, (1, 3), batch_size=3)
        got = [next(fleet.passes[number]) for number in (0, 0, 0, 1)]
        assert got == [whole[0], whole[3], whole[6], whole[1]]
        state = fleet.state()
        again = [iter(fleet._worker(number, state)) for number in range(3)]
        assert [next(stream) for stream in again] == [whole[9], whole[4], whole[2]]
        assert Fleet(make, (1, 2), fleet, batch_size=3).take(4) == whole[2:6]


# ---- refused


@pytest.mark.parametrize(
    ("was", "source", "changed", "says"),
    [
        (Listed([7, 3]), Listed([7, 3, 1]), {}, "shards was 2 and is 3"),
        (Counting(6), Counting(6), {"partitions": 2}, "partitions was 1 and is 2"),
    ],
)
def test_position_in_other_shards_is_refused(was: Any, source: Any, changed: dict[str, Any], says: str) -> None:
    state = loader_of(was).state_dict()
    other = loader_of(source, **changed)
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match=f"{says}.*the position depends on"):
            other.load_state_dict(state, strict=strict)


@pytest.mark.parametrize("source", [LogicalShards([partial(iter, range(40))] * 2, shards=2), Counting(4)])
def test_loader_is_pickled_in_mid_epoch(source: Any) -> None:
    """Without what it has open; one batch is often looked at before worker processes are started."""
    loader = ShardLoader(Repeated(source) if not source.endless else source, batch_size=4, seed=1)
    next(iter(loader))
    sent = pickle.loads(pickle.dumps(loader))
    assert sent.state_dict() == loader.state_dict()
    assert next(iter(sent)) is not None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"described": lambda: {"rate": float("nan")}}, "described.. of Listed must return a JSON value"),
        ({"lengths": lambda epoch: [5, -3, 0, 1, 2]}, "lengths.. of the source must be at least 0, got -3 in epoch 0"),
    ],
)
def test_a_source_that_says_what_cannot_be(changed: dict[str, Any], says: str) -> None:
    source = Listed(UNEQUAL)
    for name, method in changed.items():
        setattr(source, name, method)
    with pytest.raises((InvalidArgumentError, DatasetError), match=says):
        next(iter(loader_of(source)))


@pytest.mark.parametrize(
    ("spoilt", "error"),
    [
        (marked(9, 0, None), StateCorruptError),
        (marked(1, -1, None), StateCorruptError),
        (marked(1, 0, {"at": "x"}), StateCorruptError),
        ({**marked(1, 0, None), "saved_positions": []}, StateCorruptError),
        ({"ended": [2], "lengths": [3]}, StateCorruptError),
        ({"ended": [1], "lengths": []}, StateCorruptError),
        ({"ended": [0, 1], "lengths": [4, 4], "start": 9}, StateCorruptError),
        ({"start": 9}, DatasetError),
        (marked(1, 2, {"at": 2}), StateCorruptError),
    ],
)
def test_a_state_that_cannot_be_is_refused(spoilt: dict[str, Any], error: type[Exception]) -> None:
    loader = loader_of(Listed([4, 4], known=False))

    def load() -> None:
        loader.load_state_dict({**loader.state_dict(), **spoilt})
        next(iter(loader))  # a saved position is looked at by its source

    with pytest.raises(error) as caught:
        load()
    assert "Error(" not in str(caught.value)


def test_an_order_in_other_blocks_is_refused() -> None:
    loader = loader_of(Counting(4), block=8)
    next(iter(loader))
    state = loader.state_dict()
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match=r"block must be 8, .* got 4\. Leave block out"):
            loader_of(Counting(4), block=4).load_state_dict(state, strict=strict)
    with pytest.raises(StateCorruptError):
        loader.load_state_dict({**state, "block": None})


def language_model() -> Any:
    pieces = [[[10 * piece + at] * (1 + (7 * at + piece) % 9) for at in range(8)] for piece in range(6)]
    files = LogicalShards([partial(list, piece) for piece in pieces], shards=6, shuffle=True)
    lines = Packed(Chunked(Repeated(Mapped(files, jittered, random=True)), length=6, eos=-1), length=8)
    return WindowShuffled(lines, 4)


def jittered(document: Any, generator: np.random.Generator) -> Any:
    return np.asarray(document) + generator.integers(0, 100, len(document))


def numbers() -> Any:
    return LogicalShards([range(90)], shards=4, shuffle=True)


@pytest.mark.parametrize(
    ("make", "shape", "then"),
    [
        (numbers, (2, 3), (3, 1)),
        (language_model, (2, 3), (3, 1)),
    ],
)
def test_a_later_state_of_a_pass_is_arithmetic(make: Any, shape: Shape, then: Shape) -> None:
    """Compute a state between two snapshots without running user code; on any topology it leads to the same batches."""
    fleet = Fleet(make, shape, global_batch_size=6)
    earlier = None
    for step in range(6):
        if step in (0, 3):
            earlier = [loader.state_dict() for loader in fleet.workers]
        fleet.take(1)
        assert earlier is not None
        states = [
            ShardLoader.advance_state(state, loader.state_dict()["done"] - state["done"])
            for state, loader in zip(earlier, fleet.workers, strict=True)
        ]
        whole = saved(fleet.workers[0].aggregate_state_dict(saved(states)))
        advanced: Any = SimpleNamespace(topology=shape, step=fleet.step, state=lambda whole=whole: whole)
        there, again = (Fleet(make, then, before, global_batch_size=6) for before in (fleet, advanced))
        assert plain(again.take(4)) == plain(there.take(4))


def plain(batches: list[list[Any]]) -> list[list[Any]]:
    return [[np.asarray(row).tolist() for row in batch] for batch in batches]


def test_advance_state_needs_lengths_and_no_draws() -> None:
    numbers = LogicalShards([range(90)], shards=4)
    for source in (
        Filtered(numbers, bool, random=True),
        Mapped(numbers, str),
        Repeated(Mapped(numbers, str)),
        Listed(UNEQUAL),
        LogicalShards([range(90)], shards=4, capture_rng=False),
        Mixture([Repeated(numbers), Repeated(Mapped(numbers, str))], [1, 1]),
    ):
        assert loader_of(source).advance_state is None
    assert loader_of(Repeated(Filtered(numbers, bool, random=True))).advance_state is not None


class Doubled(Layer):
    """Layer of a user that yields what its source yields, unchanged."""

    def open(self, *args: Any) -> Cursor:
        return self.source.open(*args)

    def lengths(self, epoch: int) -> Sequence[int] | None:
        return self.source.lengths(epoch)


class Keyed(Doubled):
    keyed = True


class Inheriting(Keyed):
    pass


class Random(Doubled):
    @property
    def keyed(self) -> bool:
        return bool(self.source.num_shards == 4)


class Widened(Chunked):
    """A user's layer that may draw where ours does not."""


def test_a_users_layer_says_itself_that_it_is_keyed() -> None:
    numbers = LogicalShards([range(90)], shards=4)
    keyed: tuple[Any, ...] = (Keyed(numbers), Random(numbers), Keyed(Repeated(Keyed(numbers))))
    for source in keyed:
        loader = loader_of(source)
        assert loader.draws_nothing
        assert loader.advance_state is not None
    below = Keyed(Mapped(numbers, str))
    for source in (Doubled(numbers), Inheriting(numbers), Random(Listed(UNEQUAL)), below, Widened(numbers, length=4)):
        loader = loader_of(source)
        assert not loader.draws_nothing
        assert loader.advance_state is None
