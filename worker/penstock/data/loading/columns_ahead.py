"""Reading of the columns of several batches in one call of a dataset, which costs about as much for a dozen batches of
small rows as for one: shuffled rows come from the same row groups, each looked up once. Each batch gets arrays of its
own, so that saving or keeping one does not save or keep the others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from penstock.data.batch_columns import Columns, ColumnSource, Values
from penstock.data.ordering.epoch_plan import BatchPlan

AHEAD_BYTES = 512 << 10
"""Bytes of several batches read in one call, estimated from the call before. A single one may be larger."""
AHEAD_BATCHES = 32
FEWEST = 4
"""Fewest batches read together. For fewer, copying the arrays costs more than the common call saves."""
MEASURED_ROWS = 8
"""Values of a list that are measured, to estimate the size of all."""


class ColumnsAhead:
    """Reader of an epoch's columns, several batches in one call of the dataset."""

    def __init__(self, source: ColumnSource) -> None:
        self._source = source
        self._read: list[tuple[BatchPlan, Columns]] = []
        """Batches read and not taken yet, the next one last."""
        self._count = 1
        """Batches to read in the next call; at first 1, because a loop may take only one."""

    def take(self, plan: BatchPlan, plans: Sequence[BatchPlan] = ()) -> Columns | None:
        """Return the columns of `plan` (`ColumnSource.get_columns`). `plans`: those that follow in the epoch, the next
        one last; `plan` itself may be the very last."""
        if self._read and self._read[-1][0] is plan:
            return self._read.pop()[1]
        self._read = []
        chosen = [plan, *(each for each in plans[: -self._count - 1 : -1] if each is not plan and not each.empty)]
        if len(chosen) >= FEWEST and self._take(chosen):
            return self._read.pop()[1]
        columns = self._source.get_columns(plan.ids)
        self._count = self._next_count(columns, 1)
        return columns

    def _take(self, plans: list[BatchPlan]) -> bool:
        """Return False if a file is not open, or samples cannot be read by column; raise nothing: the loop may never
        take the bad batch."""
        ids = np.concatenate([plan.ids for plan in plans])
        if not self._source.is_at_hand(ids):
            return False
        try:
            columns = self._source.get_columns(ids)
        except Exception:
            return False
        if columns is None:
            return False
        self._count = self._next_count(columns, len(plans))
        bounds = pairwise([0, *accumulate(len(plan.ids) for plan in plans)])
        own = [{name: _part(values, *bound) for name, values in columns.items()} for bound in bounds]
        self._read = list(zip(reversed(plans), reversed(own), strict=True))
        return True

    def _next_count(self, columns: Columns | None, batches: int) -> int:
        """Return how many batches to read next, after a call that read `batches` and returned `columns`."""
        if columns is None:
            return 1
        batch_bytes = max(1, sum(map(_nbytes, columns.values())) // batches)
        fit = AHEAD_BYTES // batch_bytes
        return min(fit, AHEAD_BATCHES, max(FEWEST, 2 * batches)) if fit >= FEWEST else 1


def _nbytes(values: Values) -> int:
    if isinstance(values, np.ndarray):
        return values.nbytes
    measured = values[:MEASURED_ROWS]
    return sum(map(_size, measured)) * len(values) // len(measured)


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sys.getsizeof(value) + sum(map(_size, value))
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(map(_size, value.values()))
    return sys.getsizeof(value)


def _part(values: Values, begin: int, end: int) -> Values:
    """Return the rows `begin` to `end` - 1, copied if an array."""
    return values[begin:end].copy() if isinstance(values, np.ndarray) else values[begin:end]
