"""Mixtures whose weights change at positions: shares, resumes on any topology, and changes at a resume."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from all_workers import AllWorkers, Shape
from given_shards import Given, again, first
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.data import Counts, Mapped, Mixture, Packed, Ramp, Repeated, Schedule, ShardLoader
from penstock.data.sharded.layers.mixture_weights import RAMP_PIECES, ScheduledOrder, Segment, segments_of
from penstock.proto.errors import InvalidArgumentError, StateMismatchError
from penstock.proto.state.counts import by_source

NAMES = ("a", "b", "c")
SHARDS = 6
SHAPES: list[Shape] = [(1, 1), (2, 1), (1, 3), (3, 2)]

weights_ = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    found: dict[int, Any] = {0: draw(weights_)}
    at = 0
    for _ in range(draw(st.integers(0, 3))):
        at += draw(st.integers(1, 60))
        found[at] = draw(weights_)
        if draw(st.booleans()):
            found[at] = Ramp(found[at], over=draw(st.integers(1, 50)))
            at += found[at].over
    return Schedule(found)


def corpus(mark: str, tokens: bool = False) -> Repeated:
    """Return samples like "a3.7"; or documents of 1 to 5 numbers, each 100 times the source's number plus a length."""
    if tokens:
        number = NAMES.index(mark)
        return Repeated(Given([[[100 * number + n] * n for n in range(1, 6)] for _ in range(SHARDS)]))
    return Repeated(Given([[f"{mark}{shard}.{at}" for at in range(20)] for shard in range(SHARDS)]))


def mixture(weights: Any, names: Any = NAMES, **options: Any) -> Mixture:
    return Mixture({name: corpus(name, options.get("by") == "tokens") for name in names}, weights, **options)


def loader(source: Any, **options: Any) -> ShardLoader:
    return ShardLoader(source, global_batch_size=6, partitions=3, seed=1, collate_fn=list, **options)


@settings(max_examples=20, deadline=None)
@given(schedules())
def test_each_segment_has_its_shares_at_every_prefix(schedule: Schedule) -> None:
    segments = segments_of(schedule, NAMES)
    order = ScheduledOrder(segments)
    ends = [segment.begin for segment in segments[1:]] + [segments[-1].begin + 200]
    positions = np.arange(ends[-1])
    numbers = order.many(positions)
    assert numbers.tolist() == [order.at(int(position)) for position in positions]
    for (begin, parts), end in zip(segments, ends, strict=True):
        counted = np.cumsum(numbers[begin:end, None] == np.arange(3), axis=0)
        wanted = np.arange(1, end - begin + 1)[:, None] * np.array(parts) / sum(parts)
        assert np.abs(counted - wanted).max() < 1


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    schedules(),
    schedules(),
    st.sampled_from(["samples", "tokens"]),
    st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_resumes_on_any_topology(outer: Schedule, inner: Schedule, by: Any, chain: list[Any]) -> None:
    """Of a nested mixture too, whose positions are its own."""

    def made() -> ShardLoader:
        nested = Mixture([mixture(inner, by=by), corpus("c", by == "tokens")], [1, 1], by=by)
        return loader(Mixture([nested, corpus("b", by == "tokens"), corpus("c", by == "tokens")], outer, by=by))

    run, got = None, []
    for shape, steps in chain:
        run = AllWorkers(made, shape, run)
        got += run.take(steps)
    assert got == AllWorkers(made, (1, 1)).take(len(got))


@settings(max_examples=20, deadline=None)
@given(schedules(), st.integers(0, 90), st.integers(0, 200))
def test_a_shard_goes_on_from_its_token(schedule: Schedule, at: int, skipped: int) -> None:
    for by in ("samples", "tokens"):
        source = mixture(schedule, by=by)
        samples = first(source, at + skipped + 5, shard=1)
        cursor = source.open(1, 0, 1)
        assert cursor.skip(at) == at
        cursor = again(source, cursor, shard=1)
        assert cursor.skip(skipped) == skipped
        assert [next(cursor) for _ in range(5)] == samples[-5:]


def test_tokens_have_their_shares_in_each_segment() -> None:
    source = mixture(Schedule({0: [1, 0, 0], 600: [1, 2, 1]}), by="tokens")
    documents = first(source, 300)
    assert {document[0] // 100 for document in documents[:100]} == {0}
    tokens: Counter[int] = Counter()
    for document in documents[100:]:
        tokens[document[0] // 100] += len(document)
        assert all(abs(tokens[n] - share * tokens.total()) <= 5 for n, share in enumerate([0.25, 0.5, 0.25]))


def test_ramps_go_in_equal_steps() -> None:
    assert segments_of(Schedule({0: [1, 0], 10: Ramp([0, 1], over=3)}), "ab") == (
        Segment(0, (1, 0)),
        Segment(10, (3072, 1024)),
        Segment(11, (2048, 2048)),
        Segment(12, (1024, 3072)),
        Segment(13, (0, 1)),
    )
    long = segments_of(Schedule({0: {"a": 1}, 10: Ramp({"a": 1, "b": 1}, over=1000), 1010: {"b": 1}}), "ab")
    assert len(long) == 1 + RAMP_PIECES + 1
    assert long[-1] == (1010, (0, 1))
    shares = [parts[1] / sum(parts) for _, parts in long[:-1]]
    assert shares == sorted(shares)


# ---- changes at a resume


def run_to(step: int, source: Any) -> AllWorkers:
    run = AllWorkers(lambda: loader(source), (2, 1))
    run.take(step)
    return run


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_weights_may_change_after_what_was_delivered(by: Any, mapped: bool) -> None:
    """A source may be added and another one retired: the cursors of the others stay where they are."""

    def source(weights: Any, names: Any = NAMES) -> Any:
        mixed = mixture(weights, names, by=by)
        return Mapped(mixed, list, name="list") if mapped else mixed

    schedule = Schedule({0: {"a": 1, "b": 1}, 60: {"b": 1, "c": 3}})
    before = run_to(10, source([1, 1], "ab"))
    after = AllWorkers(lambda: loader(source(schedule)), (3, 1), before)
    rows = after.take(8)
    assert rows == AllWorkers(lambda: loader(source(schedule)), (1, 1)).take(18)[10:]
    again_after = AllWorkers(lambda: loader(source(schedule)), (1, 2), after)
    assert again_after.take(2) == AllWorkers(lambda: loader(source(schedule)), (1, 1)).take(20)[18:]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (mixture(Schedule({0: [1, 1, 0], 59: [0, 1, 0]})), "change at position 59, but samples up to position 60 were"),
        (mixture([1, 1, 2]), "change at position 0, but .* weights change at position 60 or later"),
        (mixture([1, 1, 0], by="tokens"), "source.by was absent and is 'tokens' now"),
        (mixture(Schedule({0: [1, 1], 60: [1, 2]}), "ab"), "another order of samples: source.* was .* and is"),
    ],
)
def test_weights_may_not_change_before(source: Any, words: str) -> None:
    before = run_to(10, mixture([1, 1, 0]))
    with pytest.raises(StateMismatchError, match=words):
        AllWorkers(lambda: loader(source), (1, 1), before)


def test_weights_below_packed_cannot_change() -> None:
    """How many documents were read for the delivered lines is not known."""

    def made(weights: Any) -> ShardLoader:
        return loader(Packed(mixture(weights, by="tokens"), length=4))

    before = AllWorkers(lambda: made([1, 1, 0]), (1, 1))
    before.take(3)
    with pytest.raises(StateMismatchError, match="another order of samples"):
        AllWorkers(lambda: made(Schedule({0: [1, 1, 0], 10_000: [1, 1, 1]})), (1, 1), before)


def test_counts_say_what_is_wanted_now() -> None:
    source = mixture(Schedule({0: {"a": 1}, 12: {"a": 1, "b": 3}, 24: {"b": 1}}))
    reader = loader(source, counts=Counts())
    batches = iter(reader)
    seen = []
    for _ in range(6):
        next(batches)
        assert reader.tally is not None
        seen.append({name: own.wanted for name, own in by_source(reader.tally.rows).items()})
    assert seen[1] == {"a": (1.0, "samples")}
    assert seen[3] == {"a": (0.25, "samples"), "b": (0.75, "samples")}
    assert seen[5] == {"a": None, "b": (1.0, "samples")}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (Schedule({}), "Schedule needs a dict from positions to weights"),
        (Schedule([1, 2]), "Schedule needs a dict"),  # type: ignore[arg-type]
        (Schedule({5: [1, 1, 1]}), "must have weights at position 0"),
        (Schedule({0: Ramp([1, 1, 1], over=3)}), "must have weights at position 0"),
        (Schedule({0: [1, 1, 1], -1: [1, 1, 1]}), "a position must be an int >= 0, got -1"),
        (Schedule({0: [1, 1, 1], True: [1, 1, 1]}), "a position must be an int >= 0, got True"),
        (Schedule({0: [1, 1, 1], 7: [1, -1, 1]}), r"Schedule, position 7: weights\[1\] must be at least 0, got -1"),
        (Schedule({0: [1, 1, 1], 7: [1, 1, float("nan")]}), r"position 7: weights\[2\] must be a finite number"),
        (Schedule({0: [1, 1, 1], 7: {"d": 1}}), "position 7: weights must be of the Mixture's sources, a, b, c, got"),
        (Schedule({0: [1, 1, 1], 7: [0, 0, 0]}), "position 7: at least one weight must be above 0"),
        (Schedule({0: [1, 1]}), "position 0: Mixture needs one weight for each source, got 3 sources and 2 weights"),
        (Schedule({0: [1, 1, 1], 7: Ramp([1, 1, 1], over=0)}), "position 7: over= of a Ramp must be an int >= 1"),
        (
            Schedule({0: [1, 1, 1], 7: Ramp([1, 2, 1], over=9), 12: [1, 1, 1]}),
            "position 7: the ramp must end before the next weights begin, at position 12, got over=9, which ends at 16",
        ),
        ({"a": 1, "z": 1}, "weights must be of the Mixture's sources, a, b, c, got one of 'z'"),
    ],
)
def test_invalid_schedules_name_the_position(weights: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        mixture(weights)


def test_a_schedule_needs_sources_that_are_repeated() -> None:
    with pytest.raises(InvalidArgumentError, match="a Schedule needs sources that are repeated, stop='never'"):
        Mixture([Given([[1]])], Schedule({0: [1]}), stop="last")
