"""Slow traversal of a batch: returns its tree, or raises an error with the path, the type and the remedy of the first
unsupported value. `flatten.Flattener` uses it for a new signature, and where its fast traversal stopped."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any, NoReturn
from uuid import UUID

import numpy as np
import torch

from penstock.proto.batch.classes import (
    MAX_NAME,
    ClassKind,
    class_fields,
    class_name,
    find_class,
    qualified,
    resolve_class,
    slots_of,
)
from penstock.proto.batch.pytrees import Pair, extra_attributes, has_more, is_plain, pair_of
from penstock.proto.batch.structure import (
    MAX_DEPTH,
    MAX_INT_BYTES,
    MAX_LEAVES,
    MAX_RANK,
    MAX_VALUES,
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

TORCH_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in TORCH_DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}

HAS_NAMES: bool = hasattr(torch.Tensor, "has_names")
"""True for versions before 2.13: tensors may have named dimensions."""

_NOT_PLAIN = Leaf("t")
_PLAIN = {str: Leaf("s"), bytes: Leaf("b"), float: Leaf("f"), bool: Leaf("o")}


def survey(batch: Any) -> Tree:
    return _Survey().tree(batch, None, 0)


def _refuse(path: Path, value: Any, reason: str) -> NoReturn:
    raise UnsupportedLeafError(f"{render_path(path)} is a {qualified(type(value))}{reason}") from None


class _Survey:
    def __init__(self) -> None:
        self._leaves = 0
        self._values = 0

    def tree(self, value: Any, path: Path, depth: int) -> Tree:
        self._values += 1
        if self._values > MAX_VALUES:
            _refuse(path, value, f": value {self._values}, above the limit of {MAX_VALUES}; stack values into tensors")
        if value is None:
            return None
        cls = type(value)
        if cls in (dict, OrderedDict, list, tuple):
            return self._container(value, path, depth)
        if not issubclass(cls, (torch.Tensor, np.ndarray, np.generic)):
            record, pair = class_fields(cls), pair_of(cls)
            if record is not None and not (pair is not None and has_more(value, *record)):
                return self._record(value, *record, path, depth)
            if pair is not None:
                return self._pair(value, pair, path, depth)
        self._leaves += 1
        if self._leaves > MAX_LEAVES:
            _refuse(path, value, f": leaf {self._leaves}, above the limit of {MAX_LEAVES}; stack values into tensors")
        return _leaf(value, path)

    def _container(self, value: Any, path: Path, depth: int) -> Node:
        self._check_depth(value, path, depth)
        if isinstance(value, dict):
            for key in value:
                if type(key) is not str and not allowed_key(key):
                    wanted = "a key must be a str, a bool, None or an int of 64 bits"
                    _refuse(path, value, f" with a key {repr(key)[:80]} of type {qualified(type(key))}; {wanted}")
            _check_attributes(value, path)
            keys: tuple[Key, ...] = tuple(value)
            kind = "d" if type(value) is dict else "od"
            values = list(value.values())
        else:
            keys, kind, values = (), "l" if type(value) is list else "u", list(value)
        return Node(kind, self._children(kind, keys, values, path, depth), keys)

    def _record(self, value: Any, kind: ClassKind, fields: tuple[str, ...], path: Path, depth: int) -> Node:
        self._check_depth(value, path, depth)
        name = _checked_name(type(value), value, path)
        try:
            resolve_class(name, kind, fields)
        except UnsupportedLeafError:
            _refuse(path, value, f"{_NOT_FOUND}, or call penstock.proto.batch.flatten.register_class on both sides")
        if kind == "nt":
            values = list(tuple.__iter__(value))
            if len(values) != len(fields):
                _refuse(path, value, f" that has {len(values)} values for its {len(fields)} fields; give each one")
        else:
            missing = [field for field in fields if not hasattr(value, field)]
            if missing:
                _refuse(path, value, f" without a value for its field {missing[0]!r}; set the field")
            values = [getattr(value, field) for field in fields]
        _check_attributes(value, path, fields if kind == "dc" else ())
        return Node(kind, self._children(kind, fields, values, path, depth), fields, name)

    def _pair(self, value: Any, pair: Pair, path: Path, depth: int) -> Node:
        self._check_depth(value, path, depth)
        cls = pair.sent_as(type(value))
        name = _checked_name(cls, value, path)
        if find_class(name) is not cls:
            _refuse(path, value, _NOT_FOUND)
        try:
            parts = pair.take(value)
        except UnsupportedLeafError as error:
            _refuse(path, value, str(error))
        except Exception as error:
            _refuse(path, value, f", whose registered flatten function raised {type(error).__name__}: {error}")
        steps = ["", *path_steps("l", (), len(parts))]
        first = self._context(value, parts[0], path, depth) if pair.registered else ()
        rest = zip(parts[len(first) :], steps[len(first) :], strict=False)
        return Node("pt", (*first, *(self.tree(part, (path, step), depth + 1) for part, step in rest)), (), name)

    def _context(self, value: Any, context: Any, path: Path, depth: int) -> tuple[Tree, ...]:
        try:
            tree = self.tree(context, path, depth + 1)
        except UnsupportedLeafError:
            tree = _NOT_PLAIN
        if not is_plain(tree):
            _refuse(path, value, f", whose context in torch's pytree registry must be plain values; {_remedy(value)}")
        return (tree,)

    def _children(
        self, kind: str, keys: tuple[Key, ...], values: list[Any], path: Path, depth: int
    ) -> tuple[Tree, ...]:
        steps = path_steps(kind, keys, len(values))
        return tuple(self.tree(value, (path, step), depth + 1) for value, step in zip(values, steps, strict=True))

    def _check_depth(self, value: Any, path: Path, depth: int) -> None:
        if depth >= MAX_DEPTH:
            _refuse(path, value, f" nested in {depth} containers, which is the limit; does the batch contain itself?")


def _checked_name(cls: type, value: Any, path: Path) -> str:
    name = class_name(cls)
    if len(name) > MAX_NAME:
        _refuse(path, value, f": its name is longer than {MAX_NAME} characters; give it a shorter one (register_class)")
    return name


def _check_attributes(value: Any, path: Path, known: tuple[str, ...] = ()) -> None:
    extra = extra_attributes(value, known)
    if extra:
        _refuse(path, value, f" with the attribute {extra[0]!r}, which is not sent; make it a field or an item")


def _leaf(value: Any, path: Path) -> Leaf:
    cls = type(value)
    plain = _PLAIN.get(cls)
    if plain is not None:
        return plain
    if cls is int:
        if value.bit_length() >= 8 * MAX_INT_BYTES:
            _refuse(path, value, f" of {value.bit_length()} bits; an int must have less than {8 * MAX_INT_BYTES}")
        return Leaf("i")
    if isinstance(value, torch.Tensor):
        return _tensor(value, path)
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            _refuse(path, value, "; pass x.data and numpy.ma.getmaskarray(x), or x.filled(value)")
        if cls is not np.ndarray and cls is not np.memmap and value.dtype.names is None:
            _refuse(path, value, f", a subclass of numpy.ndarray; {_AS_ARRAY}")
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


_NESTED = " that is nested; pass the list of its tensors, list(x.unbind()), or pad it"


def _tensor(value: torch.Tensor, path: Path) -> Leaf:
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        if value.is_nested:
            _refuse(path, value, _NESTED)
        _refuse(path, value, ", a subclass of torch.Tensor with code of its own; pass the tensors that it stands for")
    if extra := tensor_attributes(value):
        plain = "x.detach()" if type(value) is torch.Tensor else "x.detach().as_subclass(torch.Tensor)"
        _refuse(path, value, f" with the attribute {extra[0]!r}, which is not sent; pass {plain}, and it beside")
    value = _detached(value)
    if value.is_nested:
        _refuse(path, value, _NESTED)
    if HAS_NAMES and value.has_names():  # type: ignore[attr-defined]
        _refuse(path, value, " with named dimensions; pass x.rename(None)")
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
        _refuse(path, value, " without memory (its storage was freed, or never made); pass a tensor with data")
    return Leaf("t", name, value.ndim)


def tensor_attributes(value: torch.Tensor) -> list[str]:
    """Names of the attributes of a tensor that its class or user code has set: in `__dict__` or slots."""
    return [*value.__dict__, *(name for name in slots_of(type(value)) if hasattr(value, name))]


def plain_tensor(value: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor in the memory of a Parameter, or of another subclass whose instances hold nothing else."""
    own_code = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return None if own_code or tensor_attributes(value) else _detached(value)


def _detached(value: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach()


def _dtype_name(value: Any, path: Path) -> str:
    dtype: np.dtype[Any] = value.dtype
    if dtype.kind == "O":
        _refuse(path, value, " of dtype object; make it numeric or fixed-width str, or pass x.tolist()")
    if dtype.names is not None:
        _refuse(path, value, f" of structured dtype {str(dtype)[:200]}; pass a dict of its fields, x[name]")
    try:
        name = numpy_dtype_name(dtype)
        numpy_dtype(name)
    except (TypeError, ValueError):
        _refuse(path, value, f" of dtype {str(dtype)[:200]}, which a batch must not contain; convert it with astype")
    return name


def _remedy(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        return "a dataclass must have no slots but its fields, and no base written in C; make it such a dataclass"
    for types, remedy in _REMEDIES:
        if isinstance(value, types):
            plain = isinstance(value, _PLAIN_BASES) and not isinstance(value, enum.Enum)
            attributes = plain and extra_attributes(value)
            return f"{remedy}, and its attributes beside it" if attributes else remedy
    if hasattr(value, "to_numpy"):
        return "pass x.to_numpy(), or of a table {name: x[name].to_numpy() for name in x}"
    if hasattr(value, "keys"):
        return _AS_DICT
    if hasattr(value, "__array_interface__"):
        return _AS_ARRAY
    if callable(value):
        return "code is not sent; call it in input_fn"
    return "convert it in input_fn, make it a dataclass, or call torch.utils._pytree.register_pytree_node on both sides"


_PLAIN_BASES = (dict, list, tuple, set, frozenset, str, bytes, int, float)
_AS_DICT = "no subclass of dict but OrderedDict is allowed; pass dict(x)"
_AS_ARRAY = "pass numpy.asarray(x), and what else it holds beside it"
_NOT_FOUND = ", whose name does not lead to this class in other processes; define it at the top of its module"
_REMEDIES: tuple[tuple[tuple[type, ...], str], ...] = (
    ((enum.Enum,), "pass its .value or .name"),
    ((defaultdict,), "its default_factory is code; pass dict(x)"),
    ((Mapping,), _AS_DICT),
    ((Set, KeysView), "pass sorted(x) or list(x)"),
    ((list, tuple), "of its kind only list, tuple and namedtuples are allowed; pass list(x) or tuple(x)"),
    ((complex,), "pass numpy.complex128(x)"),
    ((bytearray, memoryview), "pass bytes(x)"),
    ((int, float, str, bytes), "a subclass would lose its type; pass the plain int, float, str or bytes"),
    ((Sequence, ValuesView, Iterator), "pass list(x)"),
    ((PurePath, Decimal, Fraction, UUID, date, time, timedelta, torch.dtype, torch.device, np.dtype), "pass str(x)"),
)
