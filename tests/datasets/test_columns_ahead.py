"""Batches whose columns are read together: each as if it were read alone, and none that waits for a file."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.data.batch_columns import Columns, ColumnSource
from penstock.data.loading.columns_ahead import AHEAD_BATCHES, FEWEST, ColumnsAhead
from penstock.data.ordering.epoch_plan import BatchPlan
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import ShardCorruptError

ROWS = 4


class Numbers(ColumnSource):
    """Rows of `width` numbers, and a text. Samples from `bad` on fail, and those from `far` on are not at hand."""

    def __init__(self, width: int = 1, *, bad: int = 1 << 40, far: int = 1 << 40) -> None:
        self.width, self.bad, self.far = width, bad, far
        self.calls: list[int] = []

    def get_columns(self, samples: Ints) -> Columns | None:
        self.calls.append(len(samples))
        if samples.max() >= self.bad:
            raise ShardCorruptError(f"sample {samples.max()}")
        wide = np.repeat(samples[:, None], self.width, 1)
        return {"wide": wide, "text": [f"row {number}" for number in samples.tolist()]}

    def is_at_hand(self, samples: Ints) -> bool:
        return bool(samples.max() < self.far)


def plans_of(batches: int) -> list[BatchPlan]:
    return [BatchPlan(0, np.arange(ROWS), own) for own in np.split(np.arange(batches * ROWS), batches)]


def taken(source: Numbers, plans: list[BatchPlan]) -> list[Any]:
    """Take all batches, as the iterator of an epoch does."""
    ahead, left = ColumnsAhead(source), plans[::-1]
    found: list[Any] = []
    while left:
        try:
            found.append(ahead.take(left[-1], left))
        except ShardCorruptError as error:
            found.append(str(error))
        left.pop()
    return found


def check(found: list[Any], plans: list[BatchPlan], width: int = 1) -> None:
    for columns, plan in zip(found, plans, strict=True):
        assert columns["wide"].tolist() == [[number] * width for number in plan.ids.tolist()]
        assert columns["text"] == [f"row {number}" for number in plan.ids.tolist()]
        assert columns["wide"].flags.owndata
        assert columns["wide"].flags.writeable


def test_small_rows_are_read_together() -> None:
    source, plans = Numbers(), plans_of(100)
    check(taken(source, plans), plans)
    assert source.calls[:3] == [ROWS, FEWEST * ROWS, 2 * FEWEST * ROWS]
    assert max(source.calls) == AHEAD_BATCHES * ROWS
    assert sum(source.calls) == 100 * ROWS


def test_large_rows_are_read_by_batch() -> None:
    source, plans = Numbers(10_000), plans_of(5)
    check(taken(source, plans), plans, 10_000)
    assert source.calls == [ROWS] * 5


def test_batches_of_another_place_are_read() -> None:
    """Of a loader that went elsewhere: what was read ahead is for other plans, even if they are equal."""
    source, plans = Numbers(), plans_of(30)
    ahead = ColumnsAhead(source)
    for _ in range(2):
        again = [BatchPlan(*plan) for plan in plans]
        check([ahead.take(again[0], again[::-1]) for _ in range(3)], [again[0]] * 3)
        check([ahead.take(again[9], again[:8:-1]), ahead.take(again[10], again[:9:-1])], again[9:11])


def test_a_batch_has_its_own_error() -> None:
    plans = plans_of(40)
    source = Numbers(bad=30 * ROWS + 1)
    found = taken(source, plans)
    check(found[:30], plans[:30])
    assert found[30:] == [f"sample {plan.ids.max()}" for plan in plans[30:]]


def test_batches_not_at_hand_are_read_alone() -> None:
    plans = plans_of(40)
    source = Numbers(far=0)
    check(taken(source, plans), plans)
    assert source.calls == [ROWS] * 40
