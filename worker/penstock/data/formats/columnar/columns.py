"""Values of a decoded column, by row: of a row group of Parquet, a record batch of Arrow, or rows of Lance.

pyarrow takes a microsecond to look up a number, and a millisecond for a list of 2,000. So numbers, texts, and lists of
numbers are read from the arrays' buffers. A list of numbers becomes a numpy array, a writable copy that does not keep
its row group in memory; with a null number, a Python list. All other types go through pyarrow's scalars (values.py).
"""

from __future__ import annotations

import contextlib
import importlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from penstock.data.batch_columns import Values, as_python_numbers, by_number, placed, stacked_slices
from penstock.data.formats.columnar.values import Value, conversion_of, storage_of, value_of
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import InvalidArgumentError

KEPT_TYPES = 256
"""Number of pyarrow types for which the function that makes their columns is remembered."""


class Column(Protocol):
    def at(self, row: int) -> Any:
        """Return the value in a row, as samples have it."""

    def many(self, rows: Sequence[int]) -> list[Any]:
        """Return the values in these rows, as samples have them."""

    def batch(self, rows: Ints) -> Values:
        """Return the values in these rows (at least one) joined into one column of a batch."""


def column_of(name: str, chunks: Any, kind: Any = None) -> Column:
    """Return the column `name`. `kind`: its type in the file's schema, if `chunks` has the type `storage_of(kind)`;
    None: that of `chunks`. Raises DatasetError for a type that `conversion_of` refuses."""
    convert, plain = conversion_of(name, chunks.type if kind is None else kind), storage_of(chunks.type)
    column = _column_of(chunks if plain == chunks.type else chunks.cast(plain))
    return column if convert is None else _Converted(column, convert)


def constant_column(name: str, value: Any, kind: Any = None) -> ConstantColumn:
    """Return a column with the same value in each row. `kind`: its pyarrow type; None: integers have 32 bits."""
    arrow = importlib.import_module("pyarrow")
    if kind is None:
        kind = arrow.null() if value is None else arrow.int32() if isinstance(value, int) else arrow.string()
    return ConstantColumn(column_of(name, arrow.chunked_array([[value]], kind)), kind)


def filled(name: str, chunks: Any, value: Any) -> Any:
    """Return a column's chunks with a value in place of its nulls, in the column's type. Raises as `fill_value`."""
    plain = storage_of(chunks.type)
    found = fill_value(name, value, plain)
    if not chunks.null_count:
        return chunks
    if plain != chunks.type or found.type != plain:
        chunks = chunks.cast(found.type)  # also a dictionary: it may lack the value
    return chunks.fill_null(found)


def fill_value(name: str, value: Any, kind: Any) -> Any:
    """Return a value for the nulls of a column as pyarrow's scalar of the column's type, so that a batch's dtype does
    not depend on nulls. Raises InvalidArgumentError if the type cannot hold it."""
    arrow = importlib.import_module("pyarrow")
    plain = storage_of(kind)
    plain = plain.value_type if arrow.types.is_dictionary(plain) else plain
    try:
        if arrow.types.is_null(plain):  # no file says another type
            return arrow.scalar(value)
        found = arrow.array([value], plain)[0]
        with contextlib.suppress(arrow.ArrowNotImplementedError):
            arrow.array([value]).cast(plain)  # refuses a fraction for integers, which the line above cuts off
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgumentError(
            f"fill must have values of the columns' types: column {name!r} has {kind}, got {value!r:.100} ({error})"
        ) from None
    if not found.is_valid:
        raise InvalidArgumentError(f"fill must have no null, got {value!r:.100} for column {name!r}")
    return found


def _column_of(chunks: Any) -> Column:
    parts = [_column(chunk) for chunk in chunks.chunks]
    return parts[0] if len(parts) == 1 else _Chunks(parts, [len(chunk) for chunk in chunks.chunks])


def _column(array: Any) -> Column:
    return _maker(array.type)(array)


@lru_cache(maxsize=KEPT_TYPES)
def _maker(kind: Any) -> Callable[[Any], Column]:
    types = importlib.import_module("pyarrow.types")
    number = _number(types, kind)
    if number is not None and kind.bit_width > 1:
        return partial(_Numbers, dtype=number)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return partial(
            _Texts,
            wide=types.is_large_string(kind) or types.is_large_binary(kind),
            is_text=types.is_string(kind) or types.is_large_string(kind),
        )
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        number = _number(types, kind.value_type)
        if number is not None:
            return partial(_Lists, dtype=number)
    return partial(_Scalars, value=value_of(kind))


def _number(types: Any, kind: Any) -> np.dtype[Any] | None:
    return (
        np.dtype(kind.to_pandas_dtype())
        if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        else None
    )


def _valid(array: Any) -> npt.NDArray[np.bool_] | None:
    """Return a mask that is True where a value is not null, shape (values,); None if no value is null."""
    return array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None


def _values(array: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array's numbers, without a copy except for bools. The values of nulls are arbitrary."""
    if dtype == np.bool_:
        filled = array.fill_null(False) if array.null_count else array
        found: npt.NDArray[Any] = filled.to_numpy(zero_copy_only=False)
        return found
    buffer = array.buffers()[1]
    return np.frombuffer(buffer if buffer else b"", dtype, len(array) if buffer else 0, array.offset * dtype.itemsize)


class _Scalars:
    def __init__(self, array: Any, value: Value) -> None:
        self._array, self._value = array, value

    def at(self, row: int) -> Any:
        return self._value(self._array[row])

    def many(self, rows: Sequence[int]) -> list[Any]:
        return [self._value(self._array[row]) for row in rows]

    def batch(self, rows: Ints) -> Values:
        return self.many(rows.tolist())


class _Numbers:
    def __init__(self, array: Any, dtype: np.dtype[Any]) -> None:
        self._valid, self._all = _valid(array), _values(array, dtype)
        self._item = self._all.item

    def at(self, row: int) -> Any:
        return self._item(row) if self._valid is None or self._valid[row] else None

    def many(self, rows: Sequence[int]) -> list[Any]:
        if self._valid is None:
            found: list[Any] = self._all[rows].tolist()
            return found
        return [self.at(row) for row in rows]

    def batch(self, rows: Ints) -> Values:
        return as_python_numbers(self._all[rows]) if self._valid is None else self.many(rows.tolist())


class _Texts:
    def __init__(self, array: Any, *, wide: bool, is_text: bool) -> None:
        self._array, self._valid, self._is_text = array, _valid(array), is_text
        _, offsets, data = array.buffers()
        code: Literal["q", "i"] = "q" if wide else "i"
        self._offsets = memoryview(offsets if offsets else bytes(8)).cast("B").cast(code)[array.offset :]
        self._data = memoryview(data if data else b"").cast("B")

    def at(self, row: int) -> Any:
        if self._valid is not None and not self._valid[row]:
            return None
        raw = self._data[self._offsets[row] : self._offsets[row + 1]]
        return str(raw, "utf-8") if self._is_text else bytes(raw)

    def many(self, rows: Sequence[int]) -> list[Any]:
        if isinstance(rows, range) and rows.step == 1:
            found: list[Any] = self._array.slice(rows.start, len(rows)).to_pylist()
            return found
        if self._valid is not None:
            return [self.at(row) for row in rows]
        data, offsets = self._data, self._offsets
        if self._is_text:
            return [str(data[offsets[row] : offsets[row + 1]], "utf-8") for row in rows]
        return [bytes(data[offsets[row] : offsets[row + 1]]) for row in rows]

    def batch(self, rows: Ints) -> Values:
        listed = rows.tolist()
        run = range(listed[0], listed[0] + len(listed))
        if listed == list(run):
            return self.many(run)
        return self.many(listed)


class _Lists:
    def __init__(self, array: Any, dtype: np.dtype[Any]) -> None:
        types = importlib.import_module("pyarrow.types")
        self._array, self._valid = array, _valid(array)
        values = array.values
        self._all, self._all_valid = _values(values, dtype), _valid(values)
        if types.is_fixed_size_list(array.type):
            size = array.type.list_size
            self._offsets: npt.NDArray[Any] = (np.arange(len(array) + 1) + array.offset) * size
        else:
            self._offsets = array.offsets.to_numpy()
        self._begins = self._offsets.data

    def at(self, row: int) -> Any:
        if self._valid is not None and not self._valid[row]:
            return None
        begin, end = self._begins[row], self._begins[row + 1]
        if self._all_valid is not None and not self._all_valid[begin:end].all():
            return self._array[row].as_py()  # a numpy array of numbers cannot hold a null
        return self._all[begin:end].copy()

    def many(self, rows: Sequence[int]) -> list[Any]:
        return [self.at(row) for row in rows]

    def batch(self, rows: Ints) -> Values:
        if self._valid is None and self._all_valid is None:
            begins = self._offsets[rows]
            sizes = self._offsets[rows + 1] - begins
            if (sizes == sizes[0]).all():
                return stacked_slices(self._all, begins, int(sizes[0]))
        return self.many(rows.tolist())


class _Converted:
    def __init__(self, column: Column, convert: Callable[[Any], Any]) -> None:
        self._column, self._convert = column, convert

    def at(self, row: int) -> Any:
        return self._convert(self._column.at(row))

    def many(self, rows: Sequence[int]) -> list[Any]:
        return [self._convert(value) for value in self._column.many(rows)]

    def batch(self, rows: Ints) -> Values:
        return self.many(rows.tolist())


class ChosenRows:
    """Some rows of a column, under numbers of their own, without a copy: to take rows from lists of numbers costs
    pyarrow twelve times as much as to copy all of them."""

    def __init__(self, column: Column, rows: Ints) -> None:
        """`rows`: ascending; shape (rows of this column,)."""
        self._column, self._rows = column, rows
        self._listed = rows.data

    def at(self, row: int) -> Any:
        return self._column.at(self._listed[row])

    def many(self, rows: Sequence[int]) -> list[Any]:
        return self._column.many([self._listed[row] for row in rows])

    def batch(self, rows: Ints) -> Values:
        return self._column.batch(self._rows[rows])


class ConstantColumn:
    def __init__(self, column: Column, kind: Any) -> None:
        """`column`: has one row. `kind`: its pyarrow type."""
        self._column, self.kind = column, kind

    def at(self, row: int) -> Any:
        return self._column.at(0)

    def many(self, rows: Sequence[int]) -> list[Any]:
        return self._column.many([0] * len(rows))

    def batch(self, rows: Ints) -> Values:
        return self._column.batch(np.zeros(len(rows), np.int64))


class _Chunks:
    def __init__(self, parts: list[Column], sizes: list[int]) -> None:
        self._parts = parts
        self._begins = [0, *accumulate(sizes)]

    def at(self, row: int) -> Any:
        part = bisect_right(self._begins, row) - 1
        return self._parts[part].at(row - self._begins[part])

    def many(self, rows: Sequence[int]) -> list[Any]:
        return [self.at(row) for row in rows]

    def batch(self, rows: Ints) -> Values:
        parts = np.searchsorted(self._begins, rows, side="right") - 1
        found = [
            (places, self._parts[part].batch(rows[places] - self._begins[part])) for part, places in by_number(parts)
        ]
        return found[0][1] if len(found) == 1 else placed(len(rows), found)
