"""Rows of a batch as columns. If only torch's default_collate makes the batch, a dataset of a columnar format returns
columns (`ColumnSource`), and loading/collating.py makes the same batch without a dict for each row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.permutation import Ints

Array = npt.NDArray[Any]

Values = Array | list[Any]
"""Values of one column in the rows of a batch. An array has the shape (rows, ...) and the dtype of default_collate's
tensor, and the caller may change it. Arrays in a list may be views of other data."""

Columns = dict[str, Values]
"""Column name -> values, in the order of the columns in a sample."""

LARGEST_INT = np.iinfo(np.int64).max


ROW_METHODS = ("__getitem__", "__getitems__", "get_many")


class ColumnSource:
    """Map-style dataset that can return samples by column."""

    def get_columns(self, samples: Ints) -> Columns | None:
        """Return the columns of the samples with these numbers, which must be in range. Return None if their columns
        differ or one of them cannot be read: reading row by row then raises an error that names it.

        Raises ShardUnavailableError, and other errors that concern a whole file.
        """
        raise NotImplementedError


def columns_match_samples(dataset: Any) -> bool:
    """Return False for other datasets, and if a subclass overrides one of ROW_METHODS and not `get_columns`: its own
    `__getitem__` may tokenize, for example."""
    if not isinstance(dataset, ColumnSource):
        return False
    own = type(dataset)
    source = next(cls for cls in own.__mro__ if "get_columns" in vars(cls))
    return all(getattr(own, name, None) is getattr(source, name, None) for name in ROW_METHODS)


def as_python_numbers(values: Array) -> Values:
    """Return the dtypes that default_collate gives to Python numbers; a list if one is too large for int64."""
    if values.dtype.kind == "f":
        return values.astype(np.float64)
    if values.dtype == np.uint64 and values.max() > LARGEST_INT:
        return list(values.tolist())  # torch refuses them with its own error
    return values.astype(np.int64)


def stacked_slices(values: Array, begins: Ints, size: int) -> Array:
    """Return a copy of the slices that begin at the indexes `begins`, shape (slices, size)."""
    found: Array = values[begins[:, None] + np.arange(size)]
    return found


def stacked(rows: list[Any]) -> Array | None:
    """Return one array (rows, ...) of Python's ints or floats, or of arrays of numbers or bools. Return None for other
    values, unlike types, shapes or dtypes, and ints too large for int64."""
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
    """Yield (number, indexes at which it occurs) for each different number, in ascending order."""
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
    """Join parts (places of rows among all rows, columns of these rows) that together hold all rows; a single part must
    be in order. Return None if the names of the columns or their order differ."""
    columns = parts[0][1]
    if len(parts) == 1:
        return columns
    names = list(columns)
    if any(list(own) != names for _, own in parts):
        return None
    return {name: placed(count, [(own, part[name]) for own, part in parts]) for name in names}


def placed(count: int, parts: Sequence[tuple[Ints, Values]]) -> Values:
    """Join parts of one column: (places of rows among all `count` rows, values in these rows)."""
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
