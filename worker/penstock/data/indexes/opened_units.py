"""Numbers of a dataset's units, and of what is opened to read them.

A *unit* is a part of a file that is read as a whole, such as a row group of Parquet, or an undivided file. An *opened
piece* is a whole file, or a unit that is fetched and opened alone. Units, files and opened pieces are each counted from
0 through all streams: if stream 0 has 3 files, the first file of stream 1 has the number 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.indexes.shard_table import ShardTable
from penstock.data.ordering.permutation import Ints


class Units:
    """Numbers of units, files and opened pieces. If no file is divided, they are equal, and not stored."""

    def __init__(self, tables: Sequence[ShardTable], by_unit: Sequence[npt.NDArray[np.bool_]]) -> None:
        """`by_unit`: for each stream, whether each file's units are fetched alone; shape (files,). If any is True, all
        files of the stream are divided into the parts that can be fetched alone (ShardTable.parts)."""
        self._tables = tables
        self.finer = [table.parts is not None and bool(own.any()) for table, own in zip(tables, by_unit, strict=True)]
        """For each stream, True if its files are divided more finely than for its order (order_layout.py)."""
        self._firsts = np.cumsum([0, *(len(table) for table in tables)])
        """Number of each stream's first file, then of all files; shape (streams + 1,)."""
        self.sizes: Ints = joined([sizes for sizes, _ in map(self._division, range(len(tables)))])
        self._file_of: Ints | None = None
        counts = [counts for _, counts in map(self._division, range(len(tables)))]
        if any(own is not None for own in counts):
            filled = [
                np.ones(len(table), np.int64) if own is None else own for table, own in zip(tables, counts, strict=True)
            ]
            self._set_blocks(np.concatenate(filled), np.concatenate([np.zeros(0, bool), *by_unit]))
            opened = np.bincount(self._opened_of, self.sizes, len(self._first_units)).astype(np.int64)
            self.bounds: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(opened)])
            """First sample of each opened piece, then the number of samples; shape (opened pieces + 1,)."""
        elif len(tables) == 1:
            self.bounds = tables[0].starts
        else:
            self.bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)])

    def _division(self, stream: int) -> tuple[Ints, Ints | None]:
        """Return (samples in each unit, units in each file) of a stream; the latter None if no file is divided."""
        table = self._tables[stream]
        return table.parts if self.finer[stream] and table.parts is not None else (table.sizes, table.counts)

    def _set_blocks(self, counts: Ints, by_unit: npt.NDArray[np.bool_]) -> None:
        self._file_of = np.repeat(np.arange(len(counts)), counts)
        """File of each unit."""
        self._opened_of: Ints = np.cumsum(_begins(self._file_of) | by_unit[self._file_of]) - 1
        """Opened piece of each unit."""
        self._unit_bounds: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)])
        self._first_units = np.flatnonzero(_begins(self._opened_of))
        """First unit of each opened piece."""
        self._alone = by_unit[self._file_of[self._first_units]]
        """True for each opened piece that is a single unit and not the whole file."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the arrays that the copy can take from its own tables."""
        given = dict(self.__dict__)
        if len(self._tables) == 1:
            del given["sizes"]
            if self._file_of is None:
                del given["bounds"]
        return given

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if len(self._tables) == 1:
            self.sizes = self._division(0)[0]
            if self._file_of is None:
                self.bounds = self._tables[0].starts

    @property
    def count(self) -> int:
        """Number of files in all streams together."""
        return int(self._firsts[-1])

    @property
    def unit_bounds(self) -> Ints:
        """First sample of each unit, then the number of samples; shape (units + 1,)."""
        return self.bounds if self._file_of is None else self._unit_bounds

    def opened_of(self, units: Ints) -> Ints:
        """Return the opened piece of each of these units."""
        return units if self._file_of is None else self._opened_of[units]

    def first_unit(self, opened: int) -> int:
        """Return the first unit of an opened piece."""
        return opened if self._file_of is None else int(self._first_units[opened])

    def file(self, opened: int) -> tuple[int, int, int | None]:
        """Return (stream, file within it, unit within the file or None for the whole file) of an opened piece."""
        unit = self.first_unit(opened)
        file, block = unit, None
        if self._file_of is not None:
            file = int(self._file_of[unit])
            block = unit - int(np.searchsorted(self._file_of, file)) if self._alone[opened] else None
        stream = int(np.searchsorted(self._firsts, file, side="right")) - 1
        return stream, file - int(self._firsts[stream]), block


def joined(arrays: Sequence[Ints]) -> Ints:
    """Return the arrays as one, without a copy if there is only one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.zeros(0, np.int64), *arrays])


def _begins(numbers: Ints) -> npt.NDArray[np.bool_]:
    return np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]
