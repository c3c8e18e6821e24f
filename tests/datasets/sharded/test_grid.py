"""The closed forms of both orders, against models that count step by step."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.worker.datasets.sharded.grid import Grid
from penstock.worker.datasets.sharded.rounds import Rounds

LENGTHS = st.lists(st.one_of(st.integers(0, 9), st.just(0)), min_size=1, max_size=9)


def in_turns(lengths: list[int]) -> list[tuple[int, int]]:
    """(shard, index) at each position."""
    return [(s, i) for i in range(max(lengths)) for s, length in enumerate(lengths) if i < length]


@given(LENGTHS)
def test_rounds_are_a_round_robin_in_which_shards_that_are_over_leave(lengths: list[int]) -> None:
    order, rounds = in_turns(lengths), Rounds(len(lengths), lengths)
    assert rounds.length == sum(lengths)
    assert list(zip(*rounds.at(np.arange(len(order))), strict=True)) == order
    for position in range(len(order) + 3):
        before = [shard for shard, _ in order[:position]]
        assert rounds.counts(position).tolist() == [before.count(shard) for shard in range(len(lengths))]


@given(LENGTHS, st.data())
def test_rounds_are_right_as_far_as_ends_are_known(lengths: list[int], data: st.DataObject) -> None:
    """An end that is not known makes nothing wrong before the position where it shows."""
    order = in_turns(lengths)
    known = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    rounds = Rounds(len(lengths), {shard: lengths[shard] for shard in known})
    assert rounds.length == (sum(lengths) if len(known) == len(lengths) else None)
    unknown = [lengths[shard] for shard in range(len(lengths)) if shard not in known]
    shows = sum(min(length, min(unknown, default=1 << 30)) for length in lengths)
    assert list(zip(*rounds.at(np.arange(shows)), strict=True)) == order[:shows]
    for shard in data.draw(st.permutations(range(len(lengths)))):
        rounds.end(shard, lengths[shard])
    assert list(zip(*rounds.at(np.arange(len(order))), strict=True)) == order


def test_a_position_far_away_costs_no_more_than_the_first() -> None:
    rounds = Rounds(3, [10**15, 10**9, 2 * 10**15])
    assert rounds.length == 3 * 10**15 + 10**9
    assert rounds.at(np.asarray([3 * 10**9, 3 * 10**9 + 1, rounds.length - 1])) == (
        [0, 2, 2],
        [10**9, 10**9, 2 * 10**15 - 1],
    )


LEGS = st.lists(st.tuples(st.integers(1, 11), st.integers(0, 9)), min_size=1, max_size=4)
"""Rows of a batch, and how many such batches."""


@given(st.integers(1, 4), st.integers(1, 5), LEGS)
def test_a_grid_deals_column_by_column_and_goes_on_when_batches_grow(
    partitions: int, columns: int, legs: list[tuple[int, int]]
) -> None:
    shards = partitions * columns
    grid = Grid.begin(shards, partitions, legs[0][0])
    batch = position = 0
    used: dict[int, int] = defaultdict(int)
    read: dict[int, int] = defaultdict(int)
    at: dict[tuple[int, int], int] = {}
    for rows, count in [*legs, (3, columns + 1)]:
        grid = grid.changed(batch, rows)
        grid = Grid.of(shards, partitions, json.loads(json.dumps(grid.plain())))
        for _ in range(count):
            assert grid.position(batch) == position
            assert grid.counts(batch).tolist() == [read[shard] for shard in range(shards)]
            expected = []
            for _ in range(rows):
                column = batch % columns
                shard = column * partitions + used[column] % partitions
                used[column] += 1
                expected.append((shard, read[shard]))
                at[shard, read[shard]] = position
                read[shard] += 1
                position += 1
            assert list(zip(*grid.at(batch, np.arange(rows)), strict=True)) == expected
            batch += 1
    for (shard, index), place in at.items():
        assert grid.place(shard)(index) == place, "also of what earlier legs dealt out"


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 6), LEGS, st.integers(1, 5), st.integers(1, 5), st.integers(0, 9))
def test_a_worker_s_own_shards_are_those_that_its_rows_lie_in(
    partitions: int, columns: int, legs: list[tuple[int, int]], boxes: int, workers: int, last: int
) -> None:
    grid, start = Grid.begin(partitions * columns, partitions, boxes), 0
    for rows, count in legs:
        grid = grid.changed(start, rows + boxes)
        start += count
    grid = grid.changed(start, boxes + last)
    everybody: set[int] = set()
    for box in range(boxes):
        for slot in range(workers):
            begin = start + (slot - 1) % workers
            own = set(grid.own(box, boxes, begin, workers).tolist())
            numbers = range(begin, begin + workers * columns * partitions, workers)
            mine = np.arange(box, boxes + last, boxes)
            needed = {shard for number in numbers for shard in grid.at(number, mine)[0]}
            assert needed <= own
            everybody |= own
    assert everybody == set(range(partitions * columns))


@pytest.mark.parametrize("divides", [(2, 3), (6, 2), (3, 6), (1, 1)])
def test_a_shard_is_read_by_one_worker_alone_where_boxes_and_workers_divide(divides: tuple[int, int]) -> None:
    boxes, workers = divides
    grid = Grid.begin(36, 6, 12)
    readers: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for box in range(boxes):
        for slot in range(workers):
            for shard in grid.own(box, boxes, slot, workers).tolist():
                readers[shard].add((box, slot))
    assert set(map(len, readers.values())) == {1}
    assert len(readers) == 36


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        [[4, 0, 0]],
        [[0, 0, 0, []]],
        [[4, 1, 0, []]],
        [[4, 0, 0, []], [3, 2, 7, [4, 4]]],
        [[4, 0, 0, []], [3, 2, 8, [4, 4, 4]]],
        [[4, 0, 0, []], [3, 2, 8, ["4", 4]]],
        [[4, 0, 0, []], [3, -1, 8, [4, 4]]],
    ],
)
def test_legs_that_do_not_follow_from_each_other_are_refused(plain: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        Grid.of(4, 2, plain)


def test_batches_that_grow_and_shrink_again_before_one_was_made_leave_no_leg() -> None:
    grid = Grid.begin(4, 2, 4)
    assert grid.changed(5, 6).changed(5, 4) == grid
    assert grid.changed(0, 6) == Grid.begin(4, 2, 6)
    assert len(grid.changed(5, 6).changed(5, 7).legs) == 2
