"""Mixtures whose weights change with the position: shares, topologies, resumes, counts, bad input."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from all_workers import AllWorkers
from given_shards import Given, first
from hypothesis import given, settings
from layer_stacks import changes_of, schedule, weights_of
from tests.datasets.sharded.test_mixture import worst
from tests.datasets.sharded.test_mixture_tokens import within_one_document

from penstock.data import Counts, Mapped, Mixture, Packed, Ramp, Schedule, ShardLoader
from penstock.data.sharded.layers.mixture_order import order_of
from penstock.data.sharded.layers.mixture_schedule import segments_of
from penstock.proto.errors import InvalidArgumentError, StateMismatchError
from penstock.proto.state.counts import by_source

WEIGHTS, CHANGES = weights_of(3), changes_of(3)


def order(weights: Any, count: int, sources: int = 3) -> np.ndarray[Any, Any]:
    return order_of(segments_of(weights, [*map(str, range(sources))])).many(np.arange(count))


def mixed(weights: Any, by: Any = "samples", shards: int = 6) -> Mixture:
    """Return a mixture of three sources of documents, whose first tokens are the source, the shard and the number."""
    sources = {
        name: Given([[[n, shard, at] + [n] * ((at * 7 + n) % 5) for at in range(40)] for shard in range(shards)])
        for n, name in enumerate("abc")
    }
    return Mixture(sources, weights, by=by)


# ---- shares


@settings(max_examples=8, deadline=None)
@given(WEIGHTS, CHANGES)
def test_shares_hold_in_every_segment(begin: list[int], changes: list[tuple[int, list[int], int]]) -> None:
    weights = schedule(begin, changes)
    segments, sources = segments_of(weights, "abc"), order(weights, 700)
    ends = [segment.start for segment in segments[1:]] + [700]
    for segment, end in zip(segments, ends, strict=True):
        part = sources[segment.start : end]
        if segment.over:
            assert deviation(segment.begin, segment.parts, segment.over, part) < 2.25
        else:
            assert worst(segment.parts, part) < 1


def deviation(begin: Sequence[int], end: Sequence[int], over: int, part: Any) -> float:
    """The largest distance of a count from the integral of its share over a ramp, at any prefix."""
    at = np.arange(1, len(part) + 1)
    found = 0.0
    for source, (was, to) in enumerate(zip(begin, end, strict=True)):
        low, high = was / sum(begin), to / sum(end)
        found = max(found, np.abs(np.cumsum(part == source) - low * at - (high - low) * at**2 / (2 * over)).max())
    return found


@pytest.mark.parametrize("over", [1, 20_000])
def test_ramps_follow_their_line(over: int) -> None:
    begin, end = [9, 1, 0, 0, 30], [0, 1, 40, 2, 3]
    part = order(Schedule({0: Ramp(end, over, start=begin)}), over, 5)
    assert deviation(begin, end, over, part) < 2.25


def test_scheduled_orders_are_the_same_for_ever() -> None:
    """A saved state is a position in this order."""
    found = order(Schedule({0: [7, 2, 1], 1000: Ramp([1, 1, 1], 3000), 5000: [0, 1, 1]}), 8000)
    assert hashlib.sha256(found.astype("<u2").tobytes()).hexdigest()[:16] == "d58a0b43a2034d63"


def test_positions_may_be_steps() -> None:
    """Also where a ramp ends at the next position."""
    steps = Schedule({0: [1, 0, 0], 3: Ramp([0, 0, 1], 2), 5: [0, 1, 0]}, rows_per_step=50)
    rows = Schedule({0: [1, 0, 0], 150: Ramp([0, 0, 1], 100), 250: [0, 1, 0]})
    assert mixed(steps).described() == mixed(rows).described()


def test_source_of_weight_0_does_not_move() -> None:
    """A source that is left out of some segments continues where it stopped."""
    source = mixed(Schedule({0: [1, 1, 0], 30: {"b": 1}, 90: [1, 0, 1]}), shards=1)
    samples = first(source, 150)
    assert {sample[0] for sample in samples[30:90]} == {1}
    for n in range(3):
        assert [sample[2] for sample in samples if sample[0] == n][:40] == list(range(40))[
            : sum(s[0] == n for s in samples)
        ]


@settings(max_examples=8, deadline=None)
@given(WEIGHTS, CHANGES)
def test_token_shares_hold_in_every_segment(begin: list[int], changes: list[tuple[int, list[int], int]]) -> None:
    weights = schedule(begin, changes)
    segments = segments_of(weights, "abc")
    documents = first(mixed(weights, "tokens", shards=1), 400)
    for segment, end in zip(segments, [*(segment.start for segment in segments[1:]), 400], strict=True):
        if not segment.over:
            within_one_document(documents[segment.start : end], list(segment.parts))


def test_token_shares_follow_a_ramp() -> None:
    """Steps of a ramp do not begin their counts again: sources of long documents would get less than their share."""
    sources = [Given([[[n] * length] * 40 for _ in range(8)]) for n, length in enumerate((3, 200))]
    documents = [
        document
        for shard in range(8)
        for document in first(
            Mixture(sources, Schedule({0: Ramp([1, 9], 4000, start=[1, 9])}), by="tokens"), 500, shard=shard
        )
    ]
    tokens = np.bincount([document[0] for document in documents], [len(document) for document in documents])
    assert abs(tokens[1] / tokens.sum() - 0.9) < 0.01


def test_ramps_of_many_sources_meet_deadlines() -> None:
    """A step that took the sources in their order could not end with each share rounded up or down."""
    begin = [30, 30, 1, 30, 0, 1, 1, 1, 30, 30, 0, 2, 1, 0, 0, 1, 0, 30, 0, 0, 2, 0, 0, 1, 1, 30, 2, 1, 0, 2]
    end = [1, 1, 1, 0, 2, 2, 30, 1, 30, 1, 2, 1, 0, 1, 1, 0, 0, 0, 1, 30, 1, 2, 2, 1, 2, 0, 0, 1, 30, 2]
    assert deviation(begin, end, 20, order(Schedule({0: Ramp(end, 20, start=begin)}), 20, 30)) < 2.25


# ---- other weights after a resume


@pytest.mark.parametrize(("by", "nested"), [("samples", True), ("tokens", False)])
def test_run_resumes_with_later_weights(by: Any, nested: bool) -> None:
    """Weights that change where the run has not been, and a source that is added there, continue the same order."""

    def made(weights: Any, more: int = 0) -> ShardLoader:
        sources = [Given([[[n, shard, at, 0] for at in range(30 + n)] for shard in range(4)]) for n in range(2 + more)]
        source: Any = Mixture(sources, weights, by=by)
        if nested:
            source = Mixture([source, mixed([1, 1, 1], shards=4)], [2, 1], by=by)
        return ShardLoader(Mapped(source, list), global_batch_size=8, block=8, partitions=2, seed=3, collate_fn=list)

    later = Schedule({0: [2, 1], 48: [1, 3]})
    latest = Schedule({0: [2, 1, 0], 48: {"0": 1, "1": 3}, 96: Ramp({"0": 1, "2": 3}, 20), 200: {"2": 1}})
    first_leg = AllWorkers(lambda: made([2, 1]), (1, 2))
    got = first_leg.take(6)
    second_leg = AllWorkers(lambda: made(later), (2, 1), first_leg)
    got += second_leg.take(6)
    got += AllWorkers(lambda: made(latest, 1), (2, 2), second_leg).take(30)
    assert got == AllWorkers(lambda: made(latest, 1), (1, 1)).take(42)
    for weights, more in (
        (Schedule({0: [2, 1], 40: [1, 3]}), 0),
        ([1, 1, 1], 1),
        (Schedule({0: [1, 1], 96: [1, 3]}), 0),
    ):
        loader = made(weights, more)
        with pytest.raises(StateMismatchError, match=r"saved with another order of samples.*(schedule|parts|sources)"):
            loader.load_state_dict(second_leg.state())
        assert next(iter(loader)) == next(iter(made(weights, more)))


def test_deeper_source_would_change_what_is_drawn() -> None:
    """What a random function draws depends on the depth of its stack: an added source must not change it unnoticed."""

    def made(weights: Any, *more: Any) -> ShardLoader:
        source = Mixture([Given([range(50)] * 4), *more], weights)
        drawing = Mapped(source, lambda sample, generator: (sample, int(generator.integers(1 << 30))), random=True)
        return ShardLoader(drawing, global_batch_size=4, seed=1, collate_fn=list)

    before = AllWorkers(lambda: made([1]), (1, 1))
    got, later = before.take(10), Schedule({0: [1, 0], 60: [1, 1]})
    got += AllWorkers(lambda: made(later, Given([range(50)] * 4)), (1, 1), before).take(10)
    assert got == AllWorkers(lambda: made(later, Given([range(50)] * 4)), (1, 1)).take(20)
    with pytest.raises(StateMismatchError, match="saved with another order of samples"):
        AllWorkers(lambda: made(later, Mapped(Given([range(50)] * 4), list)), (1, 1), before)


def test_positions_do_not_depend_on_later_weights() -> None:
    """A change that a run had ahead of it may be taken back: counts of tokens go on as if it had never been there."""
    plain, ahead = mixed([5, 2, 1], "tokens"), mixed(Schedule({0: [5, 2, 1], 60: [1, 1, 1]}), "tokens")
    for count in range(11):  # samples of shard 0 before position 60; after 10 the next one lies behind it
        cursor, other = ahead.open(0, 0, 1), plain.open(0, 0, 1)
        assert cursor.skip(count) == other.skip(count) == count
        assert {
            name: value for name, value in cursor.saved_position().items() if name != "piece"
        } == other.saved_position()


def test_weights_below_packing_cannot_change() -> None:
    """Positions of the mixture are unknown there."""

    def made(weights: Any) -> ShardLoader:
        return ShardLoader(Packed(mixed(weights, "tokens"), length=16), batch_size=4, block=4, collate_fn=list)

    loader = made([1, 1, 1])
    next(iter(loader))
    with pytest.raises(StateMismatchError, match=r"source\.schedule was absent and is"):
        made(Schedule({0: [1, 1, 1], 10**6: [1, 0, 0]})).load_state_dict(loader.state_dict())


# ---- counts


def test_wanted_shares_change_with_the_position() -> None:
    inner = mixed(Schedule({0: {"a": 1}, 60: {"b": 1, "c": 3}}))
    source = Mixture({"x": Mapped(inner, list), "y": mixed([1, 0, 0])}, Schedule({0: {"x": 1}, 96: Ramp([1, 1], 48)}))
    loader = ShardLoader(Mapped(source, tuple), batch_size=12, block=12, partitions=2, counts=Counts(), collate_fn=list)
    assert wanted(loader) == {}
    stream = iter(loader)
    next(stream)
    assert wanted(loader) == {"x/a": 1.0}
    for _ in range(19):
        next(stream)
    assert wanted(loader) == {"x/a": None, "x/b": 0.125, "x/c": 0.375, "y/a": 0.5}
    state = loader.state_dict()
    resumed = ShardLoader(
        Mapped(source, tuple), batch_size=12, block=12, partitions=2, counts=Counts(), collate_fn=list
    )
    resumed.load_state_dict(state)
    iter(resumed)
    assert wanted(resumed) == wanted(loader)


def wanted(loader: ShardLoader) -> dict[str, float | None]:
    assert loader.tally is not None
    return {name: counts.wanted and counts.wanted[0] for name, counts in by_source(loader.tally.rows).items()}


# ---- bad input


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Schedule({5: [1]}), r"first position of a Schedule must be 0, got 5"),
        (lambda: Schedule({0: [1], 9: [1], 4: [1]}), r"must ascend, got 4 after 9"),
        (lambda: mixed(Schedule({0: {"a": 0}})), r"at position 0: at least one weight must be above 0"),
        (lambda: mixed(Schedule({0: {"a": 1}, 4: {"web": 1}})), r"position 4 must name sources .*a, b, c.*got 'web'"),
        (
            lambda: mixed(Schedule({0: {"a": 1}, 4: [1, 2]})),
            r"position 4 must be one weight for each of 3 .* 2 weights",
        ),
        (lambda: mixed(Schedule({0: Ramp([1, 1, 1], 5)})), r"Ramp at position 0 .* Give Ramp\(..., start=\)"),
        (
            lambda: mixed(Schedule({0: [1, 1, 1], 5: Ramp([1, 0, 0], 6), 10: [1, 1, 1]}, rows_per_step=3)),
            r"Ramp at position 5 must end at most at 10, got over=6",
        ),
        (
            lambda: Mixture([Given([[1]])] * 2, Schedule({0: [1, 1], 5: [1, 0]}), stop="last"),
            r"a Schedule needs stop='never', got 'last'",
        ),
    ],
)
def test_invalid_schedules_are_refused(made: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        made()
