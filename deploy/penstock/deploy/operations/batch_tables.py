"""View of a batch for people and for JSON, and its file, made in the child process that has the user's classes. A leaf
is a value that is no container, such as a tensor, or a list or tuple of plain values, or an empty container."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.deploy.operations.state_values import as_json
from penstock.proto.errors import InvalidArgumentError, UnsupportedStateError
from penstock.proto.state.codec import encode_state

FORMATS = (".pst", ".pt")
FIRST = 8
"""Most values of a leaf that are shown."""
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


def describe(batch: Any) -> list[dict[str, Any]]:
    """Return name, type, shape, first values and figures of each leaf."""
    return [_leaf(name, value) for name, value in leaves(batch)]


def _leaf(name: str, value: Any) -> dict[str, Any]:
    kind = type(value).__qualname__
    found: dict[str, Any] = {"name": name, "kind": kind, "dtype": None, "shape": None}
    if isinstance(value, torch.Tensor | np.ndarray):
        found |= {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        first = value.reshape(-1)[:FIRST].tolist()
        shown = [str(item) if isinstance(item, complex) else as_json(item) for item in first]
        return found | {"first": shown} | _numbers(value)
    if _is_column(value):
        of = " or ".join(sorted({type(item).__qualname__ for item in value}))
        return found | {"kind": f"{kind} of {of}", "shape": [len(value)], "first": as_json(list(value[:FIRST]))}
    return found | {"first": [str(value) if isinstance(value, complex) else as_json(value)]}


def _numbers(value: torch.Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach()
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


# ---- files


def write(batch: Any, path: Path) -> None:
    """Write the batch to a new file in one of FORMATS and sync it. Raises InvalidArgumentError if the format cannot
    hold it as it is, or the file exists or cannot be written."""
    data = _envelope(batch) if path.suffix == ".pst" else _torch(batch)
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
        raise InvalidArgumentError(f"--out: the batch cannot be written as .pst: {error.reason}") from error


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
        value = value.detach()
        if value.untyped_storage().nbytes() > value.nbytes:
            value = value.clone()
    if type(value) not in _PLAIN:
        raise InvalidArgumentError(
            f"--out: {name} is a {type(value).__qualname__}, which torch.load(weights_only=True) does not read. Pass "
            "a file name that ends in .pst"
        )
    return value
