"""Balance of cost in a ShardLoader: the same rows in each step, in any topology and after any resume."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.datasets.sharded.contract import Fleet

from penstock.data import (
    Balance,
    LogicalShards,
    MapLoader,
    Mapped,
    Packed,
    Repeated,
    ShardedSource,
    ShardLoader,
)
from penstock.proto.errors import InvalidArgumentError

RECORDS = 300
COSTS = np.random.default_rng(0).lognormal(5, 1, RECORDS) ** 2
PIECES = [list(range(130)), list(range(130, RECORDS))]


def source(*, endless: bool, shuffle: bool = True, shards: int = 12) -> ShardedSource:
    records = Mapped(LogicalShards(PIECES, shards=shards, shuffle=shuffle), abs)
    return Repeated(records) if endless else records


def fleet(endless: bool, shape: tuple[int, int], before: Fleet | None = None, **more: Any) -> Fleet:
    options = {"partitions": 3} if endless else {"tail": "drop"}
    return Fleet(lambda: source(endless=endless), shape, before, global_batch_size=24, **options, **more)


SHAPES = st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 1), (8, 1), (5, 2)])


@settings(max_examples=5)
@given(st.booleans(), st.lists(st.tuples(SHAPES, st.integers(0, 5)), min_size=1, max_size=3))
def test_steps_keep_their_rows_over_any_chain(endless: bool, shapes: list[Any]) -> None:
    whole = fleet(endless, (1, 1)).take(sum(count for _, count in shapes))
    balanced: Fleet | None = None
    got = []
    for shape, count in shapes:
        balanced = fleet(endless, shape, balanced, balance=Balance(COSTS))
        got += balanced.take(count)
    assert [sorted(rows) for rows in got] == [sorted(rows) for rows in whole]


@pytest.mark.parametrize("tail", ["emit", "pad"])
def test_incomplete_batches_keep_their_rows(tail: Any) -> None:
    options: dict[str, Any] = {"global_batch_size": 64, "tail": tail, "collate_fn": list, "seed": 3}
    plain, balanced = (
        [list(ShardLoader(source(endless=False), rank=(box, 5), balance=balance, **options)) for box in range(5)]
        for balance in (None, Balance(COSTS))
    )
    for one, other in zip(zip(*plain, strict=True), zip(*balanced, strict=True), strict=True):
        assert [len(rows) for rows in one] == [len(rows) for rows in other]
        assert sorted(chain.from_iterable(one)) == sorted(chain.from_iterable(other))


def test_boxes_get_their_rows_back() -> None:
    """After steps on another topology each box has the rows that it would have had without it: the number of the step,
    which decides who gets the most expensive row, counts on."""
    balance = Balance(COSTS)
    whole = fleet(True, (3, 2), balance=balance).take(12)
    before = fleet(True, (3, 2), balance=balance)
    first = before.take(4)
    between = fleet(True, (1, 1), before, balance=balance)
    between.take(4)
    after = fleet(True, (3, 2), between, balance=balance)
    assert [*first, *after.take(4)] == [*whole[:4], *whole[8:]]


def test_boxes_have_about_the_same_cost() -> None:
    """With costs of few rows that are too large for a box, and each record's own cost."""
    costs = np.random.default_rng(1).uniform(1, 100, RECORDS)
    loader = ShardLoader(source(endless=True), global_batch_size=128, rank=(0, 8), balance=Balance(costs))
    found = loader.imbalance(2)
    assert found.plain > 1.1
    assert found.balanced < 1.01
    boxes = [
        ShardLoader(source(endless=True), global_batch_size=128, rank=(box, 8), balance=Balance(costs), collate_fn=list)
        for box in range(8)
    ]
    sums = np.array([[costs[rows].sum() for _, rows in zip(range(2), box, strict=False)] for box in boxes])
    assert np.mean(sums.max(axis=0) / sums.mean(axis=0)) == pytest.approx(found.balanced)


def test_costs_are_those_of_the_records() -> None:
    """A cost is asked for by the number of the record, whatever order the shards have, and in each epoch of them."""
    asked: list[Any] = []

    def cost(numbers: Any) -> Any:
        asked.append(numbers)
        return COSTS[numbers]

    loader = ShardLoader(
        source(endless=True), global_batch_size=30, rank=(1, 3), balance=Balance(cost), collate_fn=list
    )
    asked.clear()
    whole = ShardLoader(source(endless=True), global_batch_size=30, collate_fn=list)
    for _, own, rows in zip(range(12), loader, whole, strict=False):
        assert set(own) <= set(rows)
        assert sorted(asked[-1].tolist()) == sorted(rows)


@pytest.mark.parametrize(
    ("made", "balance", "says"),
    [
        (lambda: Packed(source(endless=True), length=8), Balance(COSTS), "balance needs LogicalShards"),
        (lambda: source(endless=True), Balance(COSTS, over_steps=2), "over_steps must be 1 in a ShardLoader"),
    ],
)
def test_what_cannot_be_balanced_is_refused(made: Any, balance: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        ShardLoader(made(), global_batch_size=24, balance=balance)


def test_rows_are_those_of_a_map_loader() -> None:
    """The same function assigns rows in all loaders."""
    plain = LogicalShards([list(range(RECORDS))], shards=1)
    options: dict[str, Any] = {"global_batch_size": 48, "rank": (2, 4), "balance": Balance(COSTS), "collate_fn": list}
    ours = list(ShardLoader(plain, tail="drop", **options))
    assert ours == list(MapLoader(range(RECORDS), tail="drop", **options))
