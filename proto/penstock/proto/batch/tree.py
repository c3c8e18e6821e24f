"""Slow traversal of a batch: returns its tree of containers and leaves, or raises an error that names the first
unsupported value.

`flatten.Flattener` uses it for a batch whose signature it has not seen recently, and for a batch at which its fast
traversal stopped. This traversal records the path of every value, so each error names the path, the type and how to
convert the value.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from typing import Any, NoReturn

import numpy as np
import torch

from penstock.proto.batch.classes import MAX_NAME, ClassKind, class_fields, class_name, qualified, resolve_class
from penstock.proto.batch.structure import (
    MAX_INT_BYTES,
    MAX_RANK,
    TORCH_DTYPES,
    Key,
    Leaf,
    Node,
    Path,
    Tree,
    allowed_key,
    numpy_dtype,
    numpy_dtype_name,
    path_steps,
    render_path,
)
from penstock.proto.errors import UnsupportedLeafError

__all__ = ["TORCH_NAMES", "survey"]

TORCH_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in TORCH_DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}
"""dtype that batches may have and that this version of torch has -> its name."""

_PLAIN = {str: Leaf("s"), bytes: Leaf("b"), float: Leaf("f"), bool: Leaf("o")}


def survey(batch: Any, max_leaves: int, max_depth: int) -> Tree:
    """Return the tree of a batch. It may have at most `max_leaves` leaves, 4 * max_leaves values (leaves, containers
    and Nones), and `max_depth` nested containers.

    Raises UnsupportedLeafError with the path and type of the first unsupported value.
    """
    return _Survey(max_leaves, max_depth).tree(batch, None, 0)


def _refuse(path: Path, value: Any, reason: str) -> NoReturn:
    raise UnsupportedLeafError(f"{render_path(path)} is a {qualified(type(value))}{reason}") from None


class _Survey:
    def __init__(self, max_leaves: int, max_depth: int) -> None:
        self._max_leaves = max_leaves
        self._max_depth = max_depth
        self._leaves = 0
        self._values = 0

    def tree(self, value: Any, path: Path, depth: int) -> Tree:
        self._values += 1
        if self._values > 4 * self._max_leaves:
            _refuse(
                path,
                value,
                f": value {self._values}, above the limit of {4 * self._max_leaves}; stack values into tensors",
            )
        if value is None:
            return None
        cls = type(value)
        if cls in (dict, OrderedDict, list, tuple):
            return self._container(value, path, depth)
        record = None if issubclass(cls, (torch.Tensor, np.ndarray, np.generic)) else class_fields(cls)
        if record is not None:
            return self._record(value, *record, path, depth)
        self._leaves += 1
        if self._leaves > self._max_leaves:
            _refuse(
                path,
                value,
                f": leaf {self._leaves}, above the limit of {self._max_leaves}; stack values into tensors",
            )
        return _leaf(value, path)

    def _container(self, value: Any, path: Path, depth: int) -> Node:
        self._check_depth(value, path, depth)
        if isinstance(value, dict):
            for key in value:
                if type(key) is not str and not allowed_key(key):
                    _refuse(
                        path, value, f" with a key {repr(key)[:80]} of type {qualified(type(key))}; "
                        "a key must be a str, a bool, None or an int of 64 bits"
                    )  # fmt: skip
            keys: tuple[Key, ...] = tuple(value)
            kind = "d" if type(value) is dict else "od"
            values = list(value.values())
        else:
            keys, kind, values = (), "l" if type(value) is list else "u", list(value)
        return Node(kind, self._children(kind, keys, values, path, depth), keys)

    def _record(self, value: Any, kind: ClassKind, fields: tuple[str, ...], path: Path, depth: int) -> Node:
        self._check_depth(value, path, depth)
        name = class_name(type(value))
        if len(name) > MAX_NAME:
            _refuse(
                path,
                value,
                f": its name is longer than {MAX_NAME} characters; give the class a shorter name by register_class",
            )
        try:
            resolve_class(name, kind, fields)
        except UnsupportedLeafError:
            _refuse(
                path, value, f": {name!r} does not resolve to this class, so other processes cannot find it; define "
                "it at the top of its module, or name it by penstock.proto.batch.flatten.register_class on both sides"
            )  # fmt: skip
        if kind == "nt":
            values = list(value)
            if len(values) != len(fields):
                _refuse(
                    path,
                    value,
                    f" that has {len(values)} values for its {len(fields)} fields; give each field one value",
                )
        else:
            missing = [field for field in fields if not hasattr(value, field)]
            if missing:
                _refuse(path, value, f" without a value for its field {missing[0]!r}; set the field")
            values = [getattr(value, field) for field in fields]
        return Node(kind, self._children(kind, fields, values, path, depth), fields, name)

    def _children(
        self, kind: str, keys: tuple[Key, ...], values: list[Any], path: Path, depth: int
    ) -> tuple[Tree, ...]:
        steps = path_steps(kind, keys, len(values))
        return tuple(self.tree(value, (path, step), depth + 1) for value, step in zip(values, steps, strict=True))

    def _check_depth(self, value: Any, path: Path, depth: int) -> None:
        if depth >= self._max_depth:
            _refuse(
                path,
                value,
                f" nested in {depth} containers, which is the limit; does the batch contain itself?",
            )


def _leaf(value: Any, path: Path) -> Leaf:
    cls = type(value)
    plain = _PLAIN.get(cls)
    if plain is not None:
        return plain
    if cls is int:
        if value.bit_length() >= 8 * MAX_INT_BYTES:
            _refuse(
                path, value, f" of {value.bit_length()} bits; an int must have at most {8 * MAX_INT_BYTES - 1} bits"
            )
        return Leaf("i")
    if isinstance(value, torch.Tensor):
        return _tensor(value, path)
    if isinstance(value, np.ndarray):
        if cls is not np.ndarray and cls is not np.memmap:
            _refuse(path, value, ", a subclass of numpy.ndarray; pass numpy.asarray(x)")
        if value.ndim > MAX_RANK:
            _refuse(path, value, f" of rank {value.ndim}; an array must have at most {MAX_RANK} dimensions")
        return Leaf("a", _dtype_name(value, path), value.ndim)
    if cls is np.str_ or cls is np.bytes_:
        return Leaf("S" if cls is np.str_ else "B")
    if isinstance(value, np.generic):
        name = _dtype_name(value, path)
        if cls is not np.dtype(name).type:
            _refuse(path, value, ", a subclass of a numpy scalar; pass it as its base type")
        return Leaf("n", name)
    _refuse(path, value, f", which a batch must not contain; {_remedy(value)}")


def _tensor(value: torch.Tensor, path: Path) -> Leaf:
    cls = type(value)
    if cls is not torch.Tensor and cls is not torch.nn.Parameter:
        _refuse(path, value, ", a subclass of torch.Tensor; pass x.as_subclass(torch.Tensor)")
    if value.is_nested:
        _refuse(path, value, " that is nested; pass a list of tensors (x.unbind()) or pad it")
    if value.layout is not torch.strided:
        _refuse(path, value, f" of layout {value.layout}; pass x.to_dense(), or its indices and values")
    if value.is_quantized:
        _refuse(path, value, f" of quantized {value.dtype}; pass x.int_repr() with its scale, or x.dequantize()")
    if value.is_meta:
        _refuse(path, value, " on device meta, which holds no data; pass a tensor with data")
    if not value.is_cpu:
        _refuse(path, value, f" on device {value.device}; batches are made on the CPU: pass x.cpu()")
    name = TORCH_NAMES.get(value.dtype)
    if name is None:
        _refuse(path, value, f" of {value.dtype}; pass x.view(torch.uint8) and view it back")
    if value.ndim > MAX_RANK:
        _refuse(path, value, f" of rank {value.ndim}; a tensor must have at most {MAX_RANK} dimensions")
    if value.nbytes and not value.data_ptr():
        _refuse(path, value, " whose storage has been freed (resized to 0); pass a tensor with data")
    return Leaf("t", name, value.ndim)


def _dtype_name(value: Any, path: Path) -> str:
    dtype: np.dtype[Any] = value.dtype
    if dtype.kind == "O":
        _refuse(path, value, " of dtype object; make it numeric or fixed-width str, or pass x.tolist()")
    if dtype.names is not None:
        _refuse(path, value, f" of structured dtype {str(dtype)[:200]}; pass a dict of its fields")
    try:
        name = numpy_dtype_name(dtype)
        numpy_dtype(name)
    except (TypeError, ValueError):
        _refuse(path, value, f" of dtype {str(dtype)[:200]}, which a batch must not contain; convert it with astype")
    return name


def _remedy(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return "pass its .value or .name"
    if isinstance(value, defaultdict):
        return "its default_factory is code; pass dict(x)"
    if isinstance(value, dict) or hasattr(value, "keys"):
        return "no subclass of dict but OrderedDict is allowed; pass dict(x)"
    if isinstance(value, (set, frozenset)):
        return "pass sorted(x) or list(x)"
    if isinstance(value, (list, tuple)):
        return "of its kind only list, tuple and namedtuples are allowed; pass list(x) or tuple(x)"
    if isinstance(value, complex):
        return "pass numpy.complex128(x)"
    if isinstance(value, (bytearray, memoryview)):
        return "pass bytes(x)"
    if isinstance(value, (int, float, str, bytes)):
        return "a subclass would lose its type; pass the plain int, float, str or bytes"
    if callable(value):
        return "code is not sent; call it in input_fn"
    return "convert it to tensors, arrays, str or numbers in input_fn, or make it a dataclass of those"
