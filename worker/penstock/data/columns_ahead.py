"""Reading of the columns of several batches in one call of a dataset.

A call costs about as much for a batch of small rows as for a dozen of them: shuffled rows come from as many row groups,
and each takes a look-up of each column. So rows of the next batches are read with those of the present one, some
hundred KiB of them. Each batch still gets arrays of its own: saving a batch, or keeping it, must not save or keep the
others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from penstock.data.batch_columns import Columns, ColumnSource, Values
from penstock.data.ordering.epoch_plan import BatchPlan

__all__ = ["ColumnsAhead"]

AHEAD_BYTES = 512 << 10
"""Largest size of the rows that are read in one call, in bytes."""
AHEAD_BATCHES = 32
"""Largest number of batches that are read in one call."""
FEWEST = 4
"""Smallest number of batches that are read together. Fewer save less than the copy of their arrays costs."""
MEASURED_ROWS = 8
"""Rows of a list of values whose sizes are measured."""


class ColumnsAhead:
    """Columns of the next batches of an epoch."""

    def __init__(self, source: ColumnSource) -> None:
        self._source = source
        self._read: list[tuple[BatchPlan, Columns]] = []
        """Batches that were read and not taken, in reverse order."""
        self._count = 1
        """Number of batches to read in the next call. It begins with one, because a loop may take no more."""

    def take(self, plan: BatchPlan, plans: Sequence[BatchPlan] = ()) -> Columns | None:
        """Return the columns of a batch, see `ColumnSource.get_columns`. `plans`: plans of the batches that come after
        it in the same epoch, in reverse order; plan itself may be the last of them."""
        if self._read and self._read[-1][0] is plan:
            return self._read.pop()[1]
        self._read = []
        chosen = [plan, *(each for each in plans[: -self._count - 1 : -1] if each is not plan and not each.empty)]
        if len(chosen) >= FEWEST and self._take(chosen):
            return self._read.pop()[1]
        columns = self._source.get_columns(plan.ids)
        self._count = self._next_count(columns, len(plan.ids), 1)
        return columns

    def _take(self, plans: list[BatchPlan]) -> bool:
        """Read these batches together. Returns False if that would wait for a file, or fails: the error belongs to the
        batch that needs the sample, and may never be needed."""
        ids = np.concatenate([plan.ids for plan in plans])
        if not self._source.is_at_hand(ids):
            return False
        try:
            columns = self._source.get_columns(ids)
        except Exception:
            return False
        if columns is None:
            return False
        self._count = self._next_count(columns, len(ids), len(plans))
        bounds = pairwise([0, *accumulate(len(plan.ids) for plan in plans)])
        own = [{name: _part(values, *bound) for name, values in columns.items()} for bound in bounds]
        self._read = list(zip(reversed(plans), reversed(own), strict=True))
        return True

    def _next_count(self, columns: Columns | None, rows: int, batches: int) -> int:
        """Return the number of batches of the next call, after a call for `batches` of them with `rows` rows."""
        if columns is None:
            return 1
        batch_bytes = max(1, sum(map(_nbytes, columns.values())) // batches)
        fit = AHEAD_BYTES // batch_bytes
        return min(fit, AHEAD_BATCHES, max(FEWEST, 2 * batches)) if fit >= FEWEST else 1


def _nbytes(values: Values) -> int:
    """Return the approximate number of bytes of some values."""
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
    """Return some rows as a column of their own."""
    return values[begin:end].copy() if isinstance(values, np.ndarray) else values[begin:end]
