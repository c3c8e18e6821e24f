"""Passes of epochs, some of which is left out: where they begin and end, and what lies ahead."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.ordering.epoch_plan import EpochPlan
from penstock.data.ordering.partition import Tail
from penstock.data.ordering.skips import added_before, ranges_of
from penstock.proto.errors import InvalidArgumentError


def epochs_of(length: int, tail: Tail = "emit", *skip: range) -> EpochPlan:
    return EpochPlan(length, tail, ranges_of(skip))


@given(st.integers(1, 60), st.integers(0, 50), st.integers(1, 5), st.integers(0, 80), st.integers(0, 30), st.data())
def test_positions_ahead_are_those_a_box_will_get(
    length: int, start: int, boxes: int, out: int, many: int, data: st.DataObject
) -> None:
    start = min(start, length)
    remainder = epochs_of(length, "drop", range(out, out + many)).remainder(0, start, boxes, boxes)
    begin = data.draw(st.integers(start, length))
    for box in range(boxes):
        rows = [remainder.positions(number, box).tolist() for number in range(remainder.batches)]
        near = remainder.near(box, begin, length, run=1, runs=length).tolist()
        mine = [row for own in rows for row in own if row >= begin]
        assert near[: len(mine)] == mine
        assert len(near) - len(mine) in (0, 1), "of what is dropped a box would have one row at most"
        assert near == sorted(near)
        some = remainder.near(box, begin, length, run=boxes, runs=2).tolist()
        assert set(some) <= set(near)


@pytest.mark.parametrize("tail", ["emit", "pad", "drop", "carry"])
def test_fully_skipped_epochs_are_passed_at_once(tail: Tail) -> None:
    epochs = epochs_of(10, tail, range(7, 10**15 + 3))
    epoch, start = epochs.remainder(0, 0, 4, 2).following()
    remainder = epochs.remainder(epoch, start, 4, 2)
    carried = 4 - 10**15  # the samples 4, 5 and 6 of epoch 0
    assert (epoch, start) == (10**14, carried if tail == "carry" else 0)
    assert remainder.batches == {"emit": 2, "pad": 2, "drop": 1, "carry": 2}[tail]
    assert remainder.positions(0, 0).tolist() == ([carried, carried + 2] if tail == "carry" else [3, 5])


def test_carried_epoch_begins_at_its_own_start() -> None:
    epochs = epochs_of(23, "carry")
    begins = [0, -3, -1, -4, -2, 0]
    assert [epochs.begin(epoch, 5, (0, 0)) for epoch in range(6)] == begins
    place = (0, 0)
    for epoch in range(1, 6):
        place = epochs.remainder(*place, 5, 1).following()
        assert place == (epoch, begins[epoch])
    assert [epochs.begin(epoch, 5, (1, -3)) for epoch in range(3)] == begins[:3]
    assert epochs.begin(0, 5, (1, -4)) == 0, "there is nothing before the first sample"
    assert epochs.begin(10**12, 5, (10**12, -2)) == -2


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=3),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=3),
    st.integers(0, 40),
)
def test_what_is_added_behind_a_place_is_found(
    saved: list[tuple[int, int]], now: list[tuple[int, int]], place: int
) -> None:
    def numbers(pieces: list[tuple[int, int]]) -> set[int]:
        return {number for first, many in pieces for number in range(first, first + many)}

    def ranges(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return ranges_of([range(first, first + many) for first, many in pieces])

    added = sorted(number for number in numbers(now) - numbers(saved) if number < place)
    found = added_before(ranges(saved), ranges(now), place)
    assert (found is None) == (not added)
    if found is not None:
        assert found[0] == added[0]
        assert set(range(*found)) <= set(added)
    kept = np.array(sorted(numbers(now)))
    assert sum(end - first for first, end in ranges(now)) == len(kept)


def test_ranges_are_joined_and_checked() -> None:
    assert ranges_of([range(5, 7), range(3), range(3, 4), range(9, 9), range(6, 8)]) == ((0, 4), (5, 8))
    with pytest.raises(InvalidArgumentError, match="must hold ranges of sample numbers"):
        ranges_of([range(1 << 62)])
