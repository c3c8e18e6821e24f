"""Record batches of an Arrow file in memory, for files of small rows that are read in any order.

A row that is read by itself takes one or two system calls for each column. If many rows near each other are wanted, it
is faster to read all of them at once. So record batches that follow each other form spans of up to 2 MiB. The rows of a
span are read one by one at first. Once many of them were read, the span is read as a whole and kept in memory. Single
record batches would be too small for this: writers make them of a few hundred rows, and a batch of shuffled rows has
about one row of each. Spans are dropped like other decoded blocks, when their memory is needed (decoded_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.data.batch_columns import Columns, by_number
from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.formats.parquet.parquet_columns import Column, column_of
from penstock.data.ordering.permutation import Ints

__all__ = ["KeptSpans"]

SPAN_BYTES = 2 << 20
"""Largest size in bytes of a span: consecutive record batches that are read together. A larger record batch is a span
of its own, which is never read as a whole."""
ROW_COST_BYTES = 4096
"""Fixed cost of reading a row by itself, as the number of bytes that are read from the page cache in the same time."""
NEVER = -(1 << 62)
"""Value in `KeptSpans._asked` for a span that is never read as a whole: a number so low that no count reaches 0."""


class KeptSpans:
    """Division of a file's record batches into spans, with the columns of those spans that are in memory.
    Thread-safe."""

    def __init__(self, begins: Sequence[int], sizes: Sequence[int], table: Callable[[int, int], Any]) -> None:
        """
        Args:
            begins: first row of each record batch, then the number of rows.
            sizes: size of each record batch in bytes.
            table: function (first, end) that reads and checks record batches `first` to `end` - 1, and returns a
                pyarrow table of the wanted columns.
        """
        bounds, total = [0], 0
        for number, size in enumerate(sizes):
            if total and total + size > SPAN_BYTES:
                bounds.append(number)
                total = 0
            total += size
        self._bounds = [*bounds, len(sizes)]
        """First record batch of each span, then the number of record batches."""
        self._begins: Ints = np.array([begins[number] for number in self._bounds])
        """First row of each span, then the number of rows."""
        self._sizes = [sum(sizes[first:end]) for first, end in zip(self._bounds, self._bounds[1:], strict=False)]
        self._table = table
        rows = np.diff(self._begins).tolist()
        self._asked = [
            0 if size <= min(SPAN_BYTES, ROW_COST_BYTES * count) else NEVER
            for size, count in zip(self._sizes, rows, strict=True)
        ]
        """Number of rows of each span that were asked for while the span was not in memory. NEVER for a span that is
        not to be read as a whole, because it is larger than SPAN_BYTES, or its rows have more than ROW_COST_BYTES on
        average."""
        self._kept: dict[int, list[tuple[str, Column]]] = {}
        self._owner = MEMORY.add_owner(self)

    def __bool__(self) -> bool:
        """Return True if at least one span may be kept in memory."""
        return max(self._asked, default=NEVER) >= 0

    def read(self, rows: Ints) -> tuple[list[tuple[Ints, Columns]], Ints]:
        """Return the columns of those rows whose spans are in memory, or are read now because many of their rows were
        asked for.

        Returns (parts, rest). `parts`: for each span, (indexes into `rows`, columns of the rows at these indexes).
        `rest`: indexes into `rows` of all other rows, ascending, for the caller to read one by one.
        """
        parts, rest = [], []
        found = list(by_number(np.searchsorted(self._begins, rows, side="right") - 1))
        for span, places in found:
            columns = self._kept.get(span) or self._loaded(span, len(places))
            if columns is None:
                rest.append(places)
                continue
            inside = rows[places] - self._begins[span]
            parts.append((places, {name: column.batch(inside) for name, column in columns}))
        MEMORY.used(self._owner, [span for span, _ in found])
        return parts, np.sort(np.concatenate(rest)) if rest else np.zeros(0, np.int64)

    def _loaded(self, span: int, rows: int) -> list[tuple[str, Column]] | None:
        """Count `rows` more rows of a span as asked for. If enough were asked for, read the span and return its
        columns; otherwise return None. Return None also if the span cannot be read: the caller then reads its rows one
        by one, and so finds the damaged sample."""
        self._asked[span] += rows
        if self._asked[span] * ROW_COST_BYTES < self._sizes[span]:
            return None
        MEMORY.make_room(self._sizes[span])
        try:
            table = self._table(self._bounds[span], self._bounds[span + 1])
            table = table.combine_chunks()
            columns = [
                (name, column_of(name, column)) for name, column in zip(table.column_names, table.columns, strict=True)
            ]
        except Exception:
            self._asked[span] = NEVER
            return None
        self._asked[span], self._kept[span] = 0, columns
        MEMORY.add(self._owner, span, table.nbytes)
        return columns

    def drop(self, span: int, /) -> None:
        """Drop span number `span` from memory."""
        self._kept.pop(span, None)

    def clear(self) -> None:
        """Drop all spans."""
        self._kept = {}
        MEMORY.remove_owner(self._owner)
