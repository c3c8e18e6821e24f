"""Reading of the columns of several batches in one call of a dataset.

A call costs about as much for one batch of small rows as for a dozen batches. The shuffled rows of all of them come
from the same row groups, and each row group takes one look-up of each column. So a call also reads the rows of the next
batches, some hundred KiB in all. Each batch still gets arrays of its own, so that saving or keeping one batch does not
save or keep the others.
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
"""Largest size in bytes of several batches that are read in one call, estimated from the call before. A single batch
may be larger."""
AHEAD_BATCHES = 32
"""Largest number of batches that are read in one call."""
FEWEST = 4
"""Smallest number of batches that are read together. For fewer batches, copying the arrays costs more than the common
call saves."""
MEASURED_ROWS = 8
"""Number of values of a list whose sizes are measured, to estimate the size of the whole list."""


class ColumnsAhead:
    """Reader of the columns of an epoch's batches, which reads several batches in one call of the dataset."""

    def __init__(self, source: ColumnSource) -> None:
        self._source = source
        self._read: list[tuple[BatchPlan, Columns]] = []
        """Batches that were read and not taken yet, the next one last."""
        self._count = 1
        """Number of batches to read in the next call. At first it is 1, because a loop may take only one batch."""

    def take(self, plan: BatchPlan, plans: Sequence[BatchPlan] = ()) -> Columns | None:
        """Return the columns of the batch `plan`, see `ColumnSource.get_columns`. `plans`: plans of the batches that
        follow it in the same epoch, the next one last; `plan` itself may be the very last."""
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
        """Read these batches together. Return False if a file is not open, or if the samples cannot be read by column.
        No error is raised then: the loop may never take the batch whose sample cannot be read."""
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
        """Return the number of batches to read in the next call, after a call that read `batches` batches and returned
        `columns`."""
        if columns is None:
            return 1
        batch_bytes = max(1, sum(map(_nbytes, columns.values())) // batches)
        fit = AHEAD_BYTES // batch_bytes
        return min(fit, AHEAD_BATCHES, max(FEWEST, 2 * batches)) if fit >= FEWEST else 1


def _nbytes(values: Values) -> int:
    """Return the approximate size of some values, in bytes."""
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
    """Return the values of the rows `begin` to `end` - 1 of a column. An array is copied."""
    return values[begin:end].copy() if isinstance(values, np.ndarray) else values[begin:end]
