"""Functions that make a batch: from samples, from columns as torch's default_collate does from rows, or without
rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torchs

from penstock.data.batch_columns import Columns, Values, stacked
from penstock.data.stop_iteration import forbid_stop_iteration
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.worker.batch.building import collate

_TORCHS_OWN: dict[Any, Any] = {
    torch.Tensor: torchs.collate_tensor_fn,
    np.ndarray: torchs.collate_numpy_array_fn,
    (np.bool_, np.number, np.object_): torchs.collate_numpy_scalar_fn,
    float: torchs.collate_float_fn,
    int: torchs.collate_int_fn,
    str: torchs.collate_str_fn,
    bytes: torchs.collate_str_fn,
}
"""torch's collate functions by type, as torch defines them. A user may change torch's table."""


def checked_collate(collate_fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Let `collate_fn` raise DatasetError for a StopIteration, which would silently end the epoch."""
    if not callable(collate_fn):
        raise InvalidArgumentError(f"collate_fn must be a function of a list of samples, got {collate_fn!r}")
    return partial(_collated, collate_fn)  # a partial can be pickled for a process


def _collated(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    with forbid_stop_iteration("the collate_fn"):
        return collate_fn(samples)


def name_rows(
    error: Exception,
    found: list[Any] | Columns,
    rows: str,
    place_of: Callable[[int], str],
    *,
    own_collate: bool,
) -> None:
    """Add a note to an error of a collate function that says which rows it got. `found`: the samples, or their columns;
    `rows`: names them all; `place_of`: names one by its index. Raises DatasetError in place of an error for a null, for
    which torch says only that it cannot infer a dtype; not if it is the user's function, which may accept nulls."""
    null = None if own_collate else _first_null(found)
    if null is not None:
        column, index, value = null
        what, remedy = "is null", f"Give StreamingDataset fill={{{column!r}: VALUE}}, leave"
        if value is not None:
            what, remedy = "has a null within its value", "Leave"
        raise DatasetError(
            f"{place_of(index)}: column {column!r} {what}, of which no batch can be made. {remedy} the column out by "
            "columns=, or write a collate_fn"
        ) from error
    error.add_note(f"raised for a batch of {rows}")


def _first_null(found: list[Any] | Columns) -> tuple[str, int, Any] | None:
    """Return (column, index of the sample, value) of a null, or of a value with one in it."""
    if isinstance(found, dict):
        lists = ((name, values) for name, values in found.items() if isinstance(values, list))
        values = ((name, index, value) for name, listed in lists for index, value in enumerate(listed))
    else:
        rows = ((index, sample) for index, sample in enumerate(found) if isinstance(sample, Mapping))
        values = ((str(name), index, value) for index, sample in rows for name, value in sample.items())
    return next((each for each in values if _has_null(each[2])), None)


def _has_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_null, value.values()))
    return value is None or (isinstance(value, list | tuple) and any(map(_has_null, value)))


def may_draw(collate_fn: Callable[[list[Any]], Any]) -> bool:
    """Return True for any collate function but Penstock's and torch's own."""
    return collate_fn is not collate and collate_fn is not torchs.default_collate


def collates_as_torch() -> bool:
    """Return True if torch's default_collate has no user function, so that `collate_columns` gives the same batches."""
    return torchs.default_collate_fn_map == _TORCHS_OWN


def collate_columns(columns: Columns) -> dict[str, Any]:
    """Return the batch of torch's default_collate from the rows of these columns, and raise its errors."""
    return {name: _collated_column(values) for name, values in columns.items()}


def _collated_column(values: Values) -> Any:
    array = values if isinstance(values, np.ndarray) else stacked(values)
    if array is not None:
        return torch.from_numpy(array)
    return torchs.default_collate(values)  # type: ignore[no-untyped-call]


def empty_batch(collate_fn: Callable[[list[Any]], Any], sample: Any) -> Any:
    """Return a batch without rows, for a box that gets no row of an epoch's last batch. Few collate functions accept an
    empty list, so [sample] and [sample, sample] are collated: if one makes 3 rows and two make 6, none makes 0. That
    works for stacked tensors, lists, running offsets ([0, 7], then [0, 7, 14], so [0]) and counts."""
    warnings.warn(
        "the epoch's last batch has fewer samples than there are boxes, and the mean of a loss over no rows is NaN. "
        "Pass tail='pad' or 'drop'",
        stacklevel=2,
    )
    return _less(collate_fn([sample]), collate_fn([sample, sample]), "the batch")


def without_rows(batch: Any) -> Any:
    """Copy a batch without rows: no first dimension of tensors and arrays, no items of lists, except lists and tuples
    that contain tensors, arrays, dicts, lists or tuples."""
    if isinstance(batch, Mapping):
        return {name: without_rows(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple) and any(isinstance(each, _ARRAYS | Mapping | list | tuple) for each in batch):
        return _like(batch, [without_rows(each) for each in batch])
    if isinstance(batch, list | tuple) or (isinstance(batch, _ARRAYS) and batch.ndim):
        return batch[:0]
    raise _no_rows("the batch", batch)


_ARRAYS = torch.Tensor | np.ndarray


def _less(one: Any, two: Any, where: str) -> Any:
    if type(one) is not type(two):
        raise _no_rows(where, one)
    if isinstance(one, Mapping) and one.keys() == two.keys():
        return {name: _less(one[name], two[name], f"{where}[{name!r}]") for name in one}
    if isinstance(one, _ARRAYS) and one.ndim == two.ndim:
        for dim in range(one.ndim):
            size = max(0, 2 * one.shape[dim] - two.shape[dim])
            one = one[(slice(None),) * dim + (slice(size),)] if size != one.shape[dim] else one
        return one
    if isinstance(one, list | tuple):
        if len(one) != len(two):
            return one[: max(0, 2 * len(one) - len(two))]
        return _like(one, [_less(*each, f"{where}[{at}]") for at, each in enumerate(zip(one, two, strict=True))])
    if isinstance(one, int | float) and not isinstance(one, bool):
        return one if one == two else type(one)(2 * one - two)
    if isinstance(one, str | bytes | bool | None) and one == two:
        return one
    raise _no_rows(where, one)


def _like(batch: Any, values: list[Any]) -> Any:
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _no_rows(where: str, value: Any) -> DatasetError:
    return DatasetError(
        f"a batch without rows must be made of tensors, arrays, lists and dicts, got a {type(value).__qualname__} as "
        f"{where}. Some boxes get such a batch, because the epoch's last batch has fewer samples than there are boxes. "
        "Pass tail='pad' or 'drop', or change collate_fn"
    )
