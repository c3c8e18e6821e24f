"""Numbers of a dataset's units, and of what is opened to read them.

A *unit* is a part of a file that is read as a whole, such as a row group of Parquet, or an undivided file. An *opened
piece* is a whole file, or a unit that is fetched and opened alone. Units, files and opened pieces are each counted from
0 through all streams: if stream 0 has 3 files, the first file of stream 1 has the number 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.data.indexes.shard_table import ShardTable
from penstock.data.ordering.permutation import Ints


class Units:
    """Numbers of units, files and opened pieces."""

    def __init__(self, tables: Sequence[ShardTable], by_unit: Sequence[npt.NDArray[np.bool_]]) -> None:
        """`by_unit`: for each stream, whether each file's units are fetched alone; shape (files,). If any is True, all
        files of the stream are divided into the parts that can be fetched alone (ShardTable.parts), else as for its
        order (order_layout.py)."""
        self._firsts = np.cumsum([0, *(len(table) for table in tables)])
        """Number of each stream's first file, then of all files; shape (streams + 1,)."""
        divisions = [_division(table, bool(own.any())) for table, own in zip(tables, by_unit, strict=True)]
        none, alone = np.zeros(0, np.int64), np.concatenate([np.zeros(0, bool), *by_unit])
        self.sizes: Ints = np.concatenate([none, *(sizes for sizes, _ in divisions)])
        self._file_of = np.repeat(np.arange(len(alone)), np.concatenate([none, *(counts for _, counts in divisions)]))
        """File of each unit."""
        self._opened_of: Ints = np.cumsum(_begins(self._file_of) | alone[self._file_of]) - 1
        """Opened piece of each unit."""
        self.unit_bounds: Ints = np.concatenate([[0], np.cumsum(self.sizes)])
        """First sample of each unit, then the number of samples; shape (units + 1,)."""
        self._first_units = np.flatnonzero(_begins(self._opened_of))
        """First unit of each opened piece."""
        self.bounds: Ints = np.append(self.unit_bounds[self._first_units], self.unit_bounds[-1])
        """First sample of each opened piece, then the number of samples; shape (opened pieces + 1,)."""
        self._alone = alone[self._file_of[self._first_units]]
        """True for each opened piece that is a single unit and not the whole file."""

    @property
    def count(self) -> int:
        """Number of files in all streams together."""
        return int(self._firsts[-1])

    def opened_of(self, units: Ints) -> Ints:
        """Return the opened piece of each of these units."""
        return self._opened_of[units]

    def first_unit(self, opened: int) -> int:
        """Return the first unit of an opened piece."""
        return int(self._first_units[opened])

    def file(self, opened: int) -> tuple[int, int, int | None]:
        """Return (stream, file within it, unit within the file or None for the whole file) of an opened piece."""
        unit = self.first_unit(opened)
        file = int(self._file_of[unit])
        block = unit - int(np.searchsorted(self._file_of, file)) if self._alone[opened] else None
        stream = int(np.searchsorted(self._firsts, file, side="right")) - 1
        return stream, file - int(self._firsts[stream]), block


def _division(table: ShardTable, in_parts: bool) -> tuple[Ints, Ints]:
    """Return (samples in each unit, units in each file)."""
    if in_parts and table.parts is not None:
        return table.parts
    return table.sizes, np.ones(len(table), np.int64) if table.counts is None else table.counts


def _begins(numbers: Ints) -> npt.NDArray[np.bool_]:
    return np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]
