"""Rows of a batch as columns, so that a batch is made without a dict for each row.

Columnar formats store the values of a column next to each other, and a batch consists of columns, too. If nothing but
torch's default_collate turns the rows into a batch, their dicts are not needed: a dataset returns the columns
(`ColumnSource`), and loading/collating.py makes from them the same batch as from rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.permutation import Ints

__all__ = [
    "ColumnSource",
    "Columns",
    "Values",
    "as_python_numbers",
    "by_number",
    "columns_match_samples",
    "joined",
    "placed",
    "stacked",
    "stacked_slices",
]

Array = npt.NDArray[Any]

Values = Array | list[Any]
"""Values of one column in the rows of a batch, as an array or as a list. An array has the shape (rows, ...) and the
dtype of the tensor that default_collate would make, and the caller may change it. A list has the value of each row;
arrays in it may be views of other data."""

Columns = dict[str, Values]
"""Columns of a batch: name -> values, in the order of the columns in a sample."""

LARGEST_INT = np.iinfo(np.int64).max


ROW_METHODS = ("__getitem__", "__getitems__", "get_many")
"""Names of a dataset's methods that return samples."""


class ColumnSource:
    """Map-style dataset that can return samples by column."""

    def get_columns(self, samples: Ints) -> Columns | None:
        """Return the columns of the samples with these numbers, which must be in range. Return None if the caller must
        read the samples row by row: they have different columns, or one of them cannot be read. (Reading row by row
        raises an error that names this sample.)

        Raises ShardUnavailableError, and other errors that concern a whole file.
        """
        raise NotImplementedError

    def is_at_hand(self, samples: Ints) -> bool:
        """Return True if the files of these samples are open, so that a read need not wait for a download."""
        raise NotImplementedError


def columns_match_samples(dataset: Any) -> bool:
    """Return True if a dataset is a ColumnSource whose columns have the same values as its samples. Return False if a
    subclass overrides one of ROW_METHODS and not `get_columns`: its own `__getitem__` may tokenize, for example."""
    if not isinstance(dataset, ColumnSource):
        return False
    own = type(dataset)
    source = next(cls for cls in own.__mro__ if "get_columns" in vars(cls))
    return all(getattr(own, name, None) is getattr(source, name, None) for name in ROW_METHODS)


def as_python_numbers(values: Array) -> Values:
    """Return integers as int64 and floats as float64, the dtypes that default_collate gives to Python numbers. Return a
    list if an integer is too large for int64."""
    if values.dtype.kind == "f":
        return values.astype(np.float64)
    if values.dtype == np.uint64 and values.max() > LARGEST_INT:
        return list(values.tolist())  # torch refuses them with its own error
    return values.astype(np.int64)


def stacked_slices(values: Array, begins: Ints, size: int) -> Array:
    """Return a copy of the slices of `size` values that begin at the indexes `begins` (at least one) of the array;
    shape (slices, size). The array must be one-dimensional and contiguous, and contain all slices."""
    count = len(begins)
    first = int(begins[0])
    if not size:
        return np.empty((count, 0), values.dtype)
    if int(begins[-1]) - first == size * (count - 1) and (begins[1:] - begins[:-1] == size).all():
        return values[first : first + count * size].reshape(count, size).copy()
    step = values.itemsize
    slices = np.ndarray((len(values) - size + 1, size), values.dtype, values, strides=(step, step))
    return slices[begins]


def stacked(rows: list[Any]) -> Array | None:
    """Return the rows' values as one array, shape (rows, ...), if they are Python's ints or floats, or arrays of
    numbers or bools. Return None for other values, for values that differ in type, shape or dtype, and for ints that
    are too large for int64."""
    first, kinds = rows[0], set(map(type, rows))
    if kinds == {int}:
        with contextlib.suppress(OverflowError):
            return np.array(rows, np.int64)
    if kinds == {float}:
        return np.array(rows, np.float64)
    if kinds != {np.ndarray} or not first.ndim or first.dtype.kind not in "biuf":
        return None
    if len({(row.shape, row.dtype) for row in rows}) > 1:
        return None
    return np.concatenate(rows).reshape(len(rows), *first.shape)


def by_number(numbers: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield (number, indexes at which it occurs) for each different number in the array, in ascending order."""
    if not len(numbers):
        return
    if (numbers == numbers[0]).all():
        yield int(numbers[0]), np.arange(len(numbers))
        return
    order = np.argsort(numbers, kind="stable")
    ascending = numbers[order]
    ends = (np.flatnonzero(np.append(ascending[1:] != ascending[:-1], True)) + 1).tolist()
    for begin, end in zip([0, *ends], ends, strict=False):
        yield int(ascending[begin]), order[begin:end]


def joined(count: int, parts: Sequence[tuple[Ints, Columns]]) -> Columns | None:
    """Return the columns of `count` rows, joined from parts that together hold all rows. A part is (places of its rows
    among all rows, columns of its rows); a single part must have its rows in order. Return None if the parts have
    different columns, or the same columns in another order."""
    columns = parts[0][1]
    if len(parts) == 1:
        return columns
    names = list(columns)
    if any(list(own) != names for _, own in parts):
        return None
    return {name: placed(count, [(own, part[name]) for own, part in parts]) for name in names}


def placed(count: int, parts: Sequence[tuple[Ints, Values]]) -> Values:
    """Return the values of one column in `count` rows, joined from parts that together hold all rows. A part is (places
    of its rows among all rows, values in its rows)."""
    first = parts[0][1]
    if isinstance(first, np.ndarray):
        kind = first.dtype, first.shape[1:]
        if all(isinstance(values, np.ndarray) and (values.dtype, values.shape[1:]) == kind for _, values in parts):
            found = np.empty((count, *kind[1]), kind[0])
            for places, values in parts:
                found[places] = values
            return found
    listed: list[Any] = [None] * count
    for places, values in parts:
        for place, value in zip(places.tolist(), _by_row(values), strict=True):
            listed[place] = value
    return listed


def _by_row(values: Values) -> list[Any]:
    if isinstance(values, list):
        return values
    return values.tolist() if values.ndim == 1 else list(values)
