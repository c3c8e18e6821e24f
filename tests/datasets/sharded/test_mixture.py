"""Shares, turns, seeds and ends of mixtures."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
from given_shards import Given, again, first, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import Mixture, Repeated, ShardedSource, WindowShuffled
from penstock.data.sharded.layers import mixture, mixture_order
from penstock.data.sharded.layers.mixture import Stop
from penstock.data.sharded.layers.mixture_order import shares_of
from penstock.data.sharded.layers.mixture_schedule import MAX_PARTS, parts_of
from penstock.data.sharded.protocol import Cursor, PositionOf
from penstock.proto.errors import InvalidArgumentError, StateCorruptError

# --- weights


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([0.1 + 0.2, 0.7], None),
        ([1 / 3, 2 / 3], (1, 2)),
        ([Fraction(1, 3), Fraction(1, 6), Decimal("0.5")], (2, 1, 3)),
        ([np.float32(0.7), np.float64(0.3)], (7, 3)),
        ([0, 3, 0.0, 1], (0, 3, 0, 1)),
    ],
)
def test_weights_are_what_their_text_says(weights: list[Any], parts: tuple[int, ...] | None) -> None:
    if parts is None:  # 0.30000000000000004
        assert sum(parts_of(weights)) <= MAX_PARTS
        assert abs(parts_of(weights)[0] / sum(parts_of(weights)) - 0.3) < 1e-5
    else:
        assert parts_of(weights) == parts


@given(st.lists(st.floats(0.5, 1000, allow_nan=False), min_size=2, max_size=20))
def test_odd_weights_are_rounded_to_parts(weights: list[float]) -> None:
    parts = parts_of(weights)
    assert sum(parts) <= MAX_PARTS
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part / sum(parts) - weight / sum(weights)) < 1.001 / MAX_PARTS


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0, 0.0], r"at least one weight must be above 0"),
        ([1, float("inf")], r"weights\[1\] must be a finite number, got inf"),
        ([1, 1e-6], r"weights\[1\] must be 0, or at least 1/65,536 .*, got 1e-06"),
    ],
)
def test_invalid_weights_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parts_of(weights)


# --- turns


def worst(parts: Sequence[int], order: Any) -> Fraction:
    """The largest distance of a count from its share, at any prefix."""
    places = np.arange(1, len(order) + 1)
    period = sum(parts)
    return max(
        Fraction(int(np.abs(np.cumsum(order == source) * period - part * places).max()), period)
        for source, part in enumerate(parts)
    )


@settings(max_examples=12)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any), st.integers(0, 3))
def test_shares_are_exact_to_one_sample(parts: list[int], block: int) -> None:
    order = shares_of(tuple(parts)).many(np.arange((block + 2) * mixture_order.POSITIONS))
    assert worst(parts, order) < 1


@pytest.mark.parametrize(
    "weights",
    [[65_535, 1], [0.9, 0.05, 0.03, 0.0199, 0.0001], [3.14159, 2.71828, 0.57721]],
    ids=["most parts", "rare", "odd"],
)
def test_shares_of_harder_weights(weights: list[float]) -> None:
    parts = parts_of(weights)
    assert worst(parts, shares_of(parts).many(np.arange(sum(parts) + mixture_order.POSITIONS))) < 1


def test_one_position_or_many() -> None:
    places = np.array([0, 3, 10**12, 4099, 4100, 4101, 7])
    assert [shares_of((7, 2, 1)).at(int(place)) for place in places] == shares_of((7, 2, 1)).many(places).tolist()


def test_the_turns_are_the_same_for_ever() -> None:
    """A saved state is a position in this order."""
    order = shares_of((7, 2, 1)).many(np.arange(9000))
    assert "".join(map(str, order[:40])) == "0001020100200010001010000100200201001000"
    assert hashlib.sha256(order.astype("<u2").tobytes()).hexdigest()[:16] == "62a2f7c2edd383c6"


# --- mixtures


def marked(mark: str, lengths: Sequence[int], **options: Any) -> Given:
    return Given([[f"{mark}{shard}.{at}" for at in range(length)] for shard, length in enumerate(lengths)], **options)


def test_the_position_of_a_loader_decides() -> None:
    source = Mixture([marked("a", [9]), marked("b", [9])], [1, 1])
    order = shares_of((1, 1))
    for shift in range(20):
        cursor = source.open(0, 0, 1, None, lambda index, shift=shift: shift + 3 * index)  # type: ignore[misc]
        assert ["ab".index(next(cursor)[0]) for _ in range(9)] == [order.at(shift + 3 * index) for index in range(9)]
        cursor = source.open(0, 0, 1, None, lambda index, shift=shift: shift + 3 * index)  # type: ignore[misc]
        cursor.skip(7)
        assert "ab".index(next(cursor)[0]) == order.at(shift + 21)


def test_same_data_twice_has_two_orders() -> None:
    """Energon (#266) gave a dataset that was mixed with itself in one order twice."""
    leaf = Given([range(50)], shuffled=True)
    samples = first(Mixture([leaf, leaf], [1, 1]), 100)
    turn = shares_of((1, 1)).many(np.arange(100))
    ones, others = ([sample for sample, number in zip(samples, turn, strict=True) if number == n] for n in (0, 1))
    assert ones[:40] != others[:40]


def test_a_source_without_weight_is_never_read() -> None:
    unread = Given([[]])
    for stop in get_args(Stop):
        source = Mixture([marked("a", [5]), unread], [1, 0], stop=stop)
        cursor = source.open(0, 0, 1)
        cursor.skip(3)
        next(again(source, cursor))
    assert unread.opened == 0


# --- ends


def by_hand(lengths: Sequence[int], parts: Sequence[int], stop: Stop) -> list[str]:
    left, live, given_out = list(lengths), list(parts), [0] * len(parts)
    out: list[str] = []
    while any(live):
        number = shares_of(tuple(live)).at(len(out))
        if not left[number]:
            if stop == "first":
                break
            live[number] = 0
            continue
        out.append(f"{'abcd'[number]}0.{given_out[number]}")
        given_out[number] += 1
        left[number] -= 1
    return out


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["first", "last"]), st.booleans(), st.booleans())
def test_ends(data: st.DataObject, stop: Stop, known: bool, placed: bool) -> None:
    count = data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    parts = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count).filter(any))
    sources = [marked(mark, [length], known=known) for mark, length in zip("abcd", lengths, strict=False)]
    source = Mixture(sources, parts, stop=stop)
    expected = by_hand(lengths, parts, stop)
    assert whole(source) == expected
    known_lengths = source.lengths(0)
    if stop == "last" and known:
        assert known_lengths == [len(expected)]
        assert sorted(expected) == sorted(s for s, part in zip(sources, parts, strict=True) if part for s in whole(s))
    else:
        assert known_lengths is None
    position_of: PositionOf | None = (lambda index: index) if placed else None

    def saved(cursor: Cursor) -> Cursor:
        return source.open(0, 0, 1, cursor.saved_position(), position_of)

    at, skipped = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 50))
    cursor = source.open(0, 0, 1, None, position_of)
    assert [sample for sample, _ in zip(cursor, range(at), strict=False)] == expected[:at]
    cursor = saved(source.open(0, 0, 1, None, position_of))
    assert cursor.skip(at) == min(at, len(expected))
    cursor = saved(cursor)
    assert cursor.skip(skipped) == min(skipped, max(0, len(expected) - at))
    cursor = saved(cursor)
    assert list(cursor) == expected[at + skipped :]
    assert (next(cursor, None), cursor.skip(2), list(saved(cursor))) == (None, 0, [])


def test_stop_never_repeats_each_source_by_itself() -> None:
    source = Mixture([marked("a", [3]), marked("b", [5])], [1, 1])
    assert source.endless
    assert source.described()["sources"][0]["kind"] == "Repeated"
    counts = Counter(first(source, 600))
    assert {counts[f"a0.{at}"] for at in range(3)} == {100}
    assert {counts[f"b0.{at}"] for at in range(5)} == {60}


def test_much_is_passed_over_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "AT_ONCE", 100)
    sources: list[ShardedSource] = [marked("a", [10] * 2), WindowShuffled(marked("b", [10] * 2), 3)]
    source = Mixture([Repeated(each) for each in sources], [2, 1])
    samples = first(source, 1013, shard=1)
    cursor = source.open(1, 0, 1)
    assert cursor.skip(1010) == 1010
    assert [next(cursor) for _ in range(3)] == samples[-3:]


# --- what cannot be meant


@pytest.mark.parametrize(
    ("sources", "weights", "stop", "message"),
    [
        ([], [], "never", "at least one source, got none"),
        ([marked("a", [1])], [1, 2], "never", "one weight for each of 1 sources, got 2"),
        ([marked("a", [1])], [1], "soon", "stop must be one of never, first, last, got 'soon'"),
        ([marked("a", [1]), marked("b", [1, 1])], [1, 2], "never", r"the same number of shards, got \[1, 2\]"),
        ([marked("a", [1]), Repeated(marked("b", [1]))], [1, 2], "first", r"got sources\[1\]. Put Repeated"),
    ],
)
def test_settings_that_cannot_be_meant(sources: Any, weights: Any, stop: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Mixture(sources, weights, stop=stop)


def test_saved_position_of_another_mixture() -> None:
    position = Mixture([marked("a", [1]), marked("b", [1])], [1, 1]).open(0, 0, 1).saved_position()
    for wrong in (
        position,
        {"index": 0, "ended": [1], "sources": [None]},
        {"index": 0, "ended": None, "sources": [None]},
    ):
        with pytest.raises(StateCorruptError, match="the saved position of a Mixture of 1 sources is damaged"):
            Mixture([marked("a", [1])], [1]).open(0, 0, 1, wrong)
