"""Views of a batch for people, for JSON and as a file, made in the child process that has the user's classes. A leaf
is a value that is no container, such as a tensor, or a list or tuple of plain values, or an empty container."""

from __future__ import annotations

import dataclasses
import io
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.deploy.operations.state_values import as_json
from penstock.proto.errors import InvalidArgumentError, UnsupportedStateError
from penstock.proto.state.codec import encode_state

__all__ = ["FORMATS", "describe", "rows_in", "write"]

FORMATS = (".pst", ".npz", ".pt")
FIRST = 8
"""Most values of a leaf that are shown."""
ROW_VALUES = 256
"""Most values of a leaf that are shown for one row."""
_SCALARS = (str, bytes, int, float, bool, complex, type(None))
_PLAIN = (*_SCALARS, torch.Tensor)


def _is_column(value: Any) -> bool:
    """Return whether this is a list or tuple of plain values: one leaf, with a value for each row."""
    return type(value) in (list, tuple) and len(value) > 0 and all(type(item) in _SCALARS for item in value)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each leaf: `tokens`, `meta.length`, `pair.0`; "" if the batch is a leaf itself."""
    fields = [] if _is_column(value) else list(_fields(value, name))
    if not fields:
        yield name, value
    for there, item in fields:
        yield from leaves(item, there)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or _is_record(value)


def _fields(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    dot = f"{name}." if name else ""
    if isinstance(value, Mapping):
        named: Iterable[tuple[Any, Any]] = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
    else:
        named = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in named:
        yield f"{dot}{key}", item


def rows_in(batch: Any) -> int | None:
    """Return the rows of a batch: the length of a list of samples (no collate function), else of the first tensor or
    array that has a dimension, else of the first list or tuple of plain values, if any."""
    if _is_samples(batch):
        return len(batch)
    for _, value in leaves(batch):
        if isinstance(value, torch.Tensor | np.ndarray) and value.ndim:
            return int(value.shape[0])
    return _length_in(batch)


def _is_samples(value: Any) -> bool:
    """Return True for a list of dicts and the like, of lists without tensors, or of tuples that are not plain values
    of one type. Others, and all tuples, are fields of one batch, as torch's collate function makes them."""
    if type(value) is not list or not value:
        return False
    if all(isinstance(item, Mapping) or _is_record(item) for item in value):
        return True
    if all(type(item) is tuple for item in value):
        return not all(_is_column(item) and len({type(one) for one in item}) == 1 for item in value)
    return all(type(item) is list for item in value) and not any(
        isinstance(leaf, torch.Tensor | np.ndarray) for _, leaf in leaves(value)
    )


def _is_record(value: Any) -> bool:
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    return named or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _length_in(value: Any) -> int | None:
    if _is_column(value) or _is_samples(value):
        return len(value)
    items = (item for _, item in _fields(value, ""))
    return next((found for item in items if (found := _length_in(item)) is not None), None)


def describe(batch: Any, row: int | None) -> dict[str, Any]:
    """Return the rows of a batch, and name, type, shape and first values of each leaf; with `row` also its values.
    Raises InvalidArgumentError if there is no such row."""
    rows = rows_in(batch)
    if row is not None and (rows is None or row >= rows):
        have = "no rows, because it has no tensor with a dimension and no list" if rows is None else _range(rows)
        remedy = "Pass the number of one of these rows" if rows else "Omit --row"
        raise InvalidArgumentError(f"--row must be a row of the batch, which has {have}, got {row}. {remedy}")
    found: dict[str, Any] = {"rows": rows, "leaves": [_leaf(name, value) for name, value in leaves(batch)]}
    if row is not None:
        found["row"] = {"row": row, "leaves": [_of_row(name, cell) for name, cell in _row(batch, "", row, rows)]}
    return found


def _range(rows: int) -> str:
    return f"rows 0 to {rows - 1}" if rows else "no rows: it is empty"


def _row(value: Any, name: str, row: int, rows: int | None) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim and value.shape[0] == rows:
            yield name, value[row]
    elif _is_column(value) or _is_samples(value):
        if len(value) == rows:
            yield from leaves(value[row], name)
    else:
        for there, item in _fields(value, name):
            yield from _row(item, there, row, rows)


def _of_row(name: str, cell: Any) -> dict[str, Any]:
    if isinstance(cell, np.generic):
        cell = cell.item()
    if not isinstance(cell, torch.Tensor | np.ndarray):
        return {"name": name, "shape": [], "values": as_json(cell)}
    shape = list(cell.shape)
    return {"name": name, "shape": shape, "values": _values(cell, ROW_VALUES) if shape else _values(cell, 1)[0]}


def _values(value: torch.Tensor | np.ndarray[Any, Any], count: int) -> list[Any]:
    first = value.reshape(-1)[:count].tolist()
    return [str(item) if isinstance(item, complex) else as_json(item) for item in first]


def _leaf(name: str, value: Any) -> dict[str, Any]:
    kind = type(value).__qualname__
    found: dict[str, Any] = {"name": name, "kind": kind, "dtype": None, "shape": None}
    if isinstance(value, torch.Tensor | np.ndarray):
        found |= {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        return found | {"first": _values(value, FIRST)} | _numbers(value)
    if _is_column(value):
        of = " or ".join(sorted({type(item).__qualname__ for item in value}))
        return found | {"kind": f"{kind} of {of}", "shape": [len(value)], "first": as_json(list(value[:FIRST]))}
    return found | {"first": [str(value) if isinstance(value, complex) else as_json(value)]}


def _numbers(value: torch.Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
    try:
        if isinstance(value, torch.Tensor):
            value = _resolved(value)
            value = value.double() if value.is_floating_point() else value
        array = value.numpy() if isinstance(value, torch.Tensor) else value
        if array.dtype.kind not in "biuf":
            return {}
        nan = np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
        numbers = array[~nan]
        found: dict[str, Any] = {"nan": int(nan.sum())}
        if numbers.size:
            low, high = numbers.min().item(), numbers.max().item()
            mean = float(numbers.mean(dtype=np.float64))
            found |= {"min": as_json(low), "max": as_json(high), "mean": as_json(mean)}
    except (TypeError, RuntimeError):  # a dtype that numpy, or this torch, cannot compute with
        return {}
    return found


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a box receives it: no gradient, lazy conjugation and negation applied."""
    return tensor.detach().resolve_conj().resolve_neg()


# ---- files


def write(batch: Any, path: Path) -> None:
    """Write the batch to a new file in one of FORMATS and sync it. Raises InvalidArgumentError if the format cannot
    hold it as it is, or the file exists or cannot be written."""
    data = {".pst": _envelope, ".npz": _arrays, ".pt": _torch}[path.suffix](batch)
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InvalidArgumentError(
            f"--out: files in {path.absolute().parent} cannot be written: {error.strerror}. Pass a path in "
            "another folder"
        ) from error


def _envelope(batch: Any) -> bytes:
    try:
        return encode_state(batch, "batch")
    except UnsupportedStateError as error:
        raise InvalidArgumentError(
            f"--out: the batch cannot be written as .pst: {error.reason}. Pass a file name that ends in .npz"
        ) from error


def _arrays(batch: Any) -> bytes:
    out, names = io.BytesIO(), set[str]()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, value in leaves(batch):
            if name in names:
                raise InvalidArgumentError(
                    f"--out: the leaves of the batch must have different names in a .npz file, got {name!r} twice. "
                    "Pass a file name that ends in .pst"
                )
            names.add(name)
            with archive.open(f"{name or 'batch'}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, _array(name, value), allow_pickle=False)
    return out.getvalue()


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    try:
        array = _resolved(value).numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"--out: {name!r} cannot be written as .npz ({error}). Pass a file name that ends in .pst"
        ) from error
    empty = _is_container(value) and not value
    if array.dtype.hasobject or empty or array.dtype.kind == "S" or not _is_kept(value, array):
        raise InvalidArgumentError(
            f"--out: {name!r}, a {type(value).__qualname__}, cannot be written as .npz. Pass a file name that "
            "ends in .pst"
        )
    return array


def _is_kept(value: Any, array: np.ndarray[Any, Any]) -> bool:
    """Numpy drops trailing NULs of a str, and changes large integers and values of mixed types."""
    if not _is_column(value):
        if type(value) not in _SCALARS:
            return True
        value, array = [value], array.reshape(1)
    pairs = zip(value, array.tolist(), strict=True)
    return all(type(given) is type(held) and (given == held or given != given) for given, held in pairs)


def _torch(batch: Any) -> bytes:
    out = io.BytesIO()
    torch.save(_plain(batch, "the batch"), out)
    return out.getvalue()


def _plain(value: Any, name: str) -> Any:
    """Return the batch for torch.load(weights_only=True). A view is copied: torch would save its whole storage."""
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{name}[{index}]") for index, item in enumerate(value))
    if type(value) is dict:
        return {key: _plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        value = _resolved(value)
        if value.untyped_storage().nbytes() > value.nbytes:
            value = value.clone()
    if type(value) not in _PLAIN:
        raise InvalidArgumentError(
            f"--out: {name} is a {type(value).__qualname__}, which torch.load(weights_only=True) does not read. Pass "
            "a file name that ends in .pst"
        )
    return value
