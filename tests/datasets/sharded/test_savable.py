"""Streams that only know what is next: saved at any sample, and gone on with; and what is said when that cannot be."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from all_workers import saved
from given_shards import position_after, rest
from opaque_streams import Counter, CountsLate, drawing, rows_of

from penstock.data import Savable
from penstock.data.sharded.sources import opaque
from penstock.data.sharded.sources.opaque import SampleDigests
from penstock.proto.errors import (
    DatasetError,
    ReplayMismatchError,
    StateCorruptError,
    UnsupportedStateError,
)
from penstock.proto.state import snapshot_cadence
from penstock.proto.state.codec import encode_state

SEED = 1


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are taken whenever they may be, whatever they cost: by count alone."""
    monkeypatch.setattr(snapshot_cadence, "SHARE", 1.0)


class Clock:
    """Seconds, which epoch when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (snapshot_cadence, opaque):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


# ---- going on


def test_a_state_needs_no_sample_and_no_stream() -> None:
    """Elsewhere saving after `iter` and before `next` waits for ever."""
    made: list[int] = []
    source = Savable(lambda shard: made.append(shard) or Counter(5), shards=1)  # type: ignore[func-returns-value]
    cursor = source.open(0, 0, SEED)
    position = saved(cursor.saved_position())
    cursor.close()
    restored = source.open(0, 0, SEED, position)
    assert saved(restored.saved_position()) == position
    restored.close()
    assert made == []
    assert rest(source, position) == list(range(5))


@pytest.mark.parametrize("every", [1, 1000])
def test_parked_stream_reads_little_again(every: int, eager: None) -> None:
    made: list[Counter] = []

    def make() -> Counter:
        made.append(Counter(100))
        return made[-1]

    stream = opaque.OpaqueStream(make, "stream", digests=SampleDigests(), snapshot_every=every)
    got = []
    for _ in range(10):
        got += [next(stream), next(stream)]
        stream.park()
        opaque.StreamMark.of(saved(stream.saved_position()), "stream")  # refuses a snapshot at the position itself
        assert not stream.is_open
        stream.park()
    assert got == list(range(20))
    assert max(counter.made for counter in made) <= 4


def test_wrong_state_is_detected_and_not_used(eager: None) -> None:
    place = 5
    source = Savable(lambda shard: CountsLate(12), shards=1, snapshot_every=1)
    position = position_after(source, place)
    cursor = source.open(0, 0, SEED, position)
    with pytest.warns(UserWarning, match=r"stream 0 of 1: its state_dict after \d+ samples does not restore"):
        assert list(cursor) == list(range(place, 12))
    assert cursor.saved_position()["snapshot"] is None, "another one would be of no use either"
    cursor.close()


# ---- snapshots


def test_slow_samples_are_saved_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    source = Savable(lambda shard: Counter(100), shards=1, snapshot_s=60.0)
    cursor = source.open(0, 0, SEED)
    for _ in range(100):
        clock.now += 7.0
        next(cursor)
    position = cursor.saved_position()
    assert position["passed"] - position["snapshot"]["passed"] <= 60 // 7 + 1
    cursor.close()


def test_slow_states_are_taken_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot every step of 100 KiB costs others nine tenths of their throughput."""
    clock = Clock(monkeypatch)
    taken = []

    class Slow(Counter):
        def state_dict(self) -> dict[str, int]:
            clock.now += 0.006
            taken.append(self.state["next"])
            return super().state_dict()

    source = Savable(lambda shard: Slow(10_000), shards=1, snapshot_every=1)
    cursor = source.open(0, 0, SEED)
    for _ in range(10_000):
        clock.now += 0.0006
        next(cursor)
    cursor.close()
    assert 5 <= len(taken) <= 0.01 * clock.now / 0.006 + 3
    assert len(taken) * 0.006 < 0.05 * 10_000 * 0.0006


def test_unsavable_state_is_an_early_error() -> None:
    class Held(Counter):
        def state_dict(self) -> Any:
            return {"file": object()}

    cursor = Savable(lambda shard: Held(3), shards=2).open(1, 0, SEED)
    assert next(cursor) == 0
    for _ in range(2):
        with pytest.raises(UnsupportedStateError, match=r"stream 1 of 2.*state_dict.*\['file'\] is a"):
            next(cursor)
    assert cursor.saved_position()["passed"] == 1
    cursor.close()


# ---- randomness


@pytest.mark.parametrize(
    "draw",
    [
        lambda: (random.gauss(0, 1), float(np.random.normal())),  # each second one was drawn with the one before
        lambda: (random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), float(torch.rand(()))),
    ],
)
def test_stream_and_caller_draw_for_themselves(draw: Callable[[], tuple[float, ...]]) -> None:
    def draws(between: Callable[[], object]) -> list[tuple[float, ...]]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        return [(draw(), between(), between())[0] for _ in range(7)]

    source, got = Savable(lambda shard: drawing(100), shards=1), list[Any]()
    cursor = source.open(0, 0, SEED)
    assert draws(lambda: got.append(next(cursor))) == draws(lambda: None)
    cursor.close()
    assert encode_state(got) == encode_state(rest(source, most=14))


def test_callers_other_bit_generator_is_kept() -> None:
    before, own = np.random.mtrand.get_bit_generator(), np.random.PCG64(4)
    alone = np.random.Generator(np.random.PCG64(4)).integers(1 << 40, size=4).tolist()
    source = Savable(lambda shard: drawing(4), shards=1)
    wanted = rest(source)
    np.random.mtrand.set_bit_generator(own)
    try:
        assert encode_state(rest(source)) == encode_state(wanted)
        assert np.random.mtrand.get_bit_generator() is own
        assert np.random.Generator(own).integers(1 << 40, size=4).tolist() == alone
    finally:
        np.random.mtrand.set_bit_generator(before)


def test_same_stream_twice_has_two_orders() -> None:
    """A mixture gives each of its sources a seed of its own; elsewhere a dataset that is in it twice comes twice."""
    source = Savable(lambda shard: iter(random.sample(range(100), 100)), shards=2)
    orders = [rest(source, seed=1), rest(source, seed=2), rest(source, seed=1, shard=1)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    cursor = source.open(0, 1, 1)
    assert list(cursor) != orders[0], "another epoch"


class Drawing(Counter):
    """Draws when it begins, for each sample, and, as it should not, when its state is taken and loaded."""

    def __iter__(self) -> Iterator[Any]:
        salt = random.random()
        return ((salt, number, random.random()) for number in super().__iter__())

    def state_dict(self) -> dict[str, int]:
        random.random()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        random.random()
        super().load_state_dict(state)


def test_saving_does_not_change_the_draws(eager: None) -> None:
    seldom, often = (Savable(lambda shard: Drawing(20), shards=1, snapshot_every=every) for every in (1000, 1))
    whole = rest(seldom)
    assert rest(often) == whole
    assert rest(often, position_after(often, 12)) == whole[12:]


def test_without_capture_generators_are_untouched() -> None:
    source = Savable(lambda shard: drawing(3), shards=1, capture_rng=False)
    random.seed(7)
    first = rest(source)
    assert rest(source) != first
    random.seed(7), np.random.seed(7)
    assert rest(source)[0]["python"] == first[0]["python"]


# ---- a replay that is not the same


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Row:
    number: int


@pytest.mark.parametrize("sample", [lambda n: [n] * 50, lambda n: Pair(n, 0), Row, lambda n: {"x": torch.tensor([n])}])
def test_other_samples_of_any_kind_are_found(sample: Callable[[int], Any]) -> None:
    def source(last: int) -> Savable:
        return Savable(lambda shard: (sample(n) for n in [0, 1, 2, last, 4]), shards=1)

    position = position_after(source(3), 4)
    assert rest(source(3), position) == [sample(4)]
    with pytest.raises(ReplayMismatchError):
        rest(source(33), position)


@pytest.mark.parametrize("stateful", [False, True])
def test_stream_ending_early_names_both_numbers(stateful: bool) -> None:
    def source(count: int) -> Savable:
        return Savable(lambda shard: Counter(count) if stateful else iter(range(count)), shards=1)

    position = position_after(source(20), 15)
    cursor = source(7).open(0, 0, SEED, position)
    for _ in range(2):
        with (
            pytest.warns(UserWarning, match="does not restore that position") if stateful else nullcontext(),
            pytest.raises(DatasetError, match=r" must have the 15 samples .* but the stream ends after 7 samples"),
        ):
            next(cursor)
        assert saved(cursor.saved_position()) == position, "what failed changed nothing"
    cursor.close()


def test_a_stream_that_yields_nothing_is_an_error() -> None:
    once = iter([1, 2])
    source = Savable(lambda shard: once, shards=1)
    assert rest(source) == [1, 2]
    with pytest.raises(DatasetError, match=r"each stream must have at least one sample, got none"):
        rest(source)


def test_failed_stream_is_retried_at_its_position() -> None:
    """A generator that raised only ends, which would lose what is left of it."""
    failures = 2
    left = [failures]

    def flaky(shard: int) -> Iterator[int]:
        for number in range(6):
            if number == 4 and left[0]:
                left[0] -= 1
                raise OSError("the disk is away")
            yield number

    cursor = Savable(flaky, shards=1).open(0, 0, SEED)
    assert cursor.skip(4) == 4
    position = saved(cursor.saved_position())
    for _ in range(failures):
        with pytest.raises(OSError, match="the disk is away"):
            next(cursor)
        assert saved(cursor.saved_position()) == position
    assert list(cursor) == [4, 5]


# ---- settings


def test_what_decides_the_samples_is_recorded() -> None:
    """Elsewhere a changed shuffle buffer is taken silently."""
    described = Savable(rows_of, shards=2, config={"buffer": 100, "files": ("a", "b")}).described()
    assert described["config"] == {"buffer": 100, "files": ["a", "b"]}
    assert Savable(rows_of, shards=2, config={"buffer": 50, "files": ("a", "b")}).described() != described


@pytest.mark.parametrize(
    "changed",
    [
        {"passed": -1},
        {"digest": "x"},
        {"snapshot": {}},
        {"snapshot": {"passed": 9, "digest": 1, "state": b"", "rng": None}},
        {"snapshot": {"passed": 1, "digest": 1, "state": b"none", "rng": None}},
    ],
)
def test_damaged_position_is_refused(changed: dict[str, Any]) -> None:
    source = Savable(lambda shard: Counter(9), shards=1)
    position = position_after(source, 4)
    with pytest.raises(StateCorruptError):
        rest(source, {**position, **changed})
    with pytest.raises(StateCorruptError):
        source.open(0, 0, SEED, [1, 2])
