"""A shuffle within windows."""

from __future__ import annotations

import itertools

import pytest
from given_shards import Given, again, whole
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import Grouped, Mixture, WindowShuffled
from penstock.proto.errors import DatasetError


@given(st.integers(0, 25), st.integers(1, 12), st.booleans())
def test_each_window_is_shuffled_differently(length: int, window: int, known: bool) -> None:
    source = WindowShuffled(Given([range(length)], known=known), window)
    samples = whole(source)
    for begin in range(0, length, window):
        assert sorted(samples[begin : begin + window]) == list(range(begin, min(begin + window, length)))
    assert source.lengths(0) == ([length] if known else None)


def test_the_order_is_keyed() -> None:
    source = WindowShuffled(Given([range(64)] * 2), 32)
    orders = [tuple(whole(source, shard=s, epoch=e, seed=d)) for s in (0, 1) for e in (0, 1) for d in (1, 2)]
    assert len(set(orders)) == 8
    one = whole(source)
    assert [number - 32 for number in one[32:]] != one[:32], "each window has another permutation"


def test_stacked_windows_do_not_undo_each_other() -> None:
    once = WindowShuffled(Given([range(64)]), 64)
    twice = whole(WindowShuffled(once, 64))
    order = whole(once)
    assert twice != [order[at] for at in order]
    assert sorted(twice) == list(range(64))


def test_window_does_not_depend_on_positions() -> None:
    """Change the positions of the samples that are still to come, as a new batch size does."""
    source = WindowShuffled(Mixture([Given([range(100)]), Given([range(100, 200)])], [1, 1], stop="last"), 8)
    for at in range(17):
        cursor = source.open(0, 0, 1, None, lambda index: index)
        samples = list(itertools.islice(cursor, at))
        samples += source.open(0, 0, 1, cursor.saved_position(), lambda index: 5 * index + 3)
        assert sorted(samples) == list(range(200))


def test_resume_reads_one_window_only() -> None:
    numbers = Given([range(1000)])
    source = WindowShuffled(numbers, 10)
    cursor = source.open(0, 0, 1)
    assert cursor.skip(503) == 503
    assert numbers.made == 10
    cursor = again(source, cursor)
    next(cursor)
    assert numbers.made == 20


def test_a_window_that_has_become_smaller() -> None:
    cursor = WindowShuffled(Given([range(9)]), 10).open(0, 0, 1)
    cursor.skip(7)
    cursor = WindowShuffled(Given([range(6)]), 10).open(0, 0, 1, cursor.saved_position())
    with pytest.raises(DatasetError, match="shard 0, epoch 0: window 0 must have more than 7 items"):
        next(cursor)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_lists_of_samples_that_are_alike(keys: list[int], size: int, window: int, drop: bool) -> None:
    samples = list(enumerate(keys))
    lists = whole(Grouped(Given([samples]), lambda sample: sample[1], size, window=window, drop_rest=drop))
    expected: list[list[tuple[int, int]]] = []
    for begin in range(0, len(samples), window):
        of_window = samples[begin : begin + window]
        mine = [
            [s for s in of_window if s[1] == key][at : at + size] for key in range(4) for at in range(0, window, size)
        ]
        expected += [group for group in mine if group and (len(group) == size or not drop)]
    assert sorted(lists) == sorted(expected)
    ends = [group[-1][0] for group in lists if len(group) == size]
    assert ends == sorted(ends), "a list comes when it is full"
