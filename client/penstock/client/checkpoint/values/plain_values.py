"""Encoding of objects of common classes as plain values: numbers, text, bytes, and lists of them.

Loading an object means running code that the file names, so a restore does that only on request. But states contain
arrays, numpy's scalars, paths and dates. They are saved as plain values with a *recipe* to make them again, itself
plain values; None: saved unchanged."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import importlib
import pathlib
import sys
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from penstock.proto.errors import CheckpointError

PLAIN = frozenset((type(None), bool, int, float, str, bytes))
LEAVES = PLAIN | {torch.Tensor, torch.nn.Parameter}
"""Types of values without parts, looked up first: `isinstance(value, Mapping)` takes 1 us, a state has thousands."""
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
DEPTH = 60
TENSORS = "tensors"


class EncodedValue(NamedTuple):
    value: Any
    recipe: Any
    opaque: str
    """Why it was not encoded: class without a recipe, or too deep nesting. "": it was encoded. TENSORS: it was, but
    has tensors within, which only torch.save writes."""


def _moment(value: Any) -> Any:
    fields = ("year", "month", "day", "hour", "minute", "second", "microsecond", "tzinfo", "fold")
    return [getattr(value, field) for field in fields if hasattr(value, field)]


def _made_with_fold(kind: Any) -> Callable[[Any], Any]:
    return lambda fields: kind(*fields[:-1], fold=fields[-1])


def _array(value: Any) -> Any:
    dtype = value.dtype
    # JAX's bfloat16 and its kind are void to `dtype.str`.
    text = f"ml_dtypes.{dtype.name}" if dtype.isbuiltin == 2 else dtype.str
    parts = [text, list(value.shape), np.ascontiguousarray(value).tobytes()]
    return [*parts, dict(dtype.metadata)] if dtype.metadata else parts


def _made_array(parts: Any) -> Any:
    text, shape, data, *metadata = parts
    module, _, name = str(text).rpartition(".")
    dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), name) if module == "ml_dtypes" else text)
    dtype = np.dtype(dtype, metadata=metadata[0]) if metadata else dtype
    return np.frombuffer(bytearray(data), np.uint8).view(dtype).reshape(shape)


def _pairs(value: Any) -> Any:
    return [list(value), list(value.values())]


def _bounds(value: Any) -> Any:
    return [value.start, value.stop, value.step]


KINDS: tuple[tuple[str, type, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    ("bytearray", bytearray, bytes, bytearray),
    ("complex", complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    ("counter", Counter, _pairs, lambda parts: Counter(dict(zip(*parts, strict=True)))),
    ("date", datetime.date, _moment, lambda fields: datetime.date(*fields)),
    ("datetime", datetime.datetime, _moment, _made_with_fold(datetime.datetime)),
    ("decimal", decimal.Decimal, str, decimal.Decimal),
    ("deque", deque, lambda value: [list(value), value.maxlen], lambda parts: deque(*parts)),
    ("device", torch.device, str, torch.device),
    ("dtype", torch.dtype, lambda value: str(value).removeprefix("torch."), lambda name: _torch_dtype(name)),
    ("fraction", fractions.Fraction, str, fractions.Fraction),
    ("frozenset", frozenset, lambda value: sorted(value, key=value_digest), frozenset),
    ("ndarray", np.ndarray, _array, _made_array),
    ("ordered", OrderedDict, _pairs, lambda parts: OrderedDict(zip(*parts, strict=True))),
    ("path", pathlib.PosixPath, str, pathlib.Path),
    ("purepath", pathlib.PurePosixPath, str, pathlib.PurePosixPath),
    ("range", range, _bounds, lambda parts: range(*parts)),
    ("set", set, lambda value: sorted(value, key=value_digest), set),
    ("size", torch.Size, list, torch.Size),
    ("slice", slice, _bounds, lambda parts: slice(*parts)),
    ("time", datetime.time, _moment, _made_with_fold(datetime.time)),
    (
        "timedelta",
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    ("timezone", datetime.timezone, lambda value: [*value.__getinitargs__()], lambda parts: datetime.timezone(*parts)),
    ("uuid", uuid.UUID, str, uuid.UUID),
    ("zone", zoneinfo.ZoneInfo, lambda value: value.key, zoneinfo.ZoneInfo),
)
"""Name in recipes, type, its plain parts, and the value of these, for each class that is saved as plain values."""
TAKEN = {kind: (name, taken) for name, kind, taken, _ in KINDS}
MAKE: dict[str, Callable[[Any], Any]] = {
    **{name: made for name, _, _, made in KINDS},
    "dict": lambda parts: dict(zip(*parts, strict=True)),
    "defaultdict": lambda parts: defaultdict(FACTORIES[parts[0]], zip(*parts[1:], strict=True)),
    "scalar": lambda parts: _made_array([parts[0], [], *parts[1:]])[()],
    "enum": lambda parts: _made_member(*parts),
    "named": lambda parts: tuple.__new__(_class(parts[0], parts[1]), parts[2]),
    "fields": lambda parts: _made_fields(*parts),
}


def _class(module: str, name: str) -> Any:
    """Return a class that the job has imported: a checkpoint imports nothing."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    is_kind = isinstance(found, type) and (
        issubclass(found, enum.Enum)
        or (issubclass(found, tuple) and hasattr(found, "_fields"))
        or _has_plain_fields(found)
    )
    if not is_kind:
        raise CheckpointError(
            f"the checkpoint has a value of the class {module}.{name}: import it before the restore, under that name"
        )
    return found


def _has_plain_fields(kind: Any) -> bool:
    """True for a dataclass that pickle would copy field by field."""
    return (
        dataclasses.is_dataclass(kind)
        and kind.__new__ is object.__new__
        and all(getattr(kind, name) is getattr(object, name, None) for name in ("__reduce__", "__reduce_ex__"))
        and all(
            getattr(getattr(kind, name, None), "__module__", None) in (None, "dataclasses")
            for name in ("__getstate__", "__setstate__")
        )
    )


def _made_member(module: str, name: str, value: Any) -> Any:
    kind = _class(module, name)
    return kind.__members__[value] if type(value) is str else kind(value)


def _made_fields(module: str, name: str, fields: dict[str, Any]) -> Any:
    made = object.__new__(_class(module, name))
    for field, value in fields.items():
        object.__setattr__(made, field, value)
    return made


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def encode(value: Any, depth: int = 0) -> EncodedValue:
    """Return plain values and the recipe; the value itself if a part has no recipe (`opaque`)."""
    kind = type(value)
    if kind in PLAIN:
        return EncodedValue(value, None, "")
    if isinstance(value, torch.Tensor):
        return EncodedValue(value, None, TENSORS if kind in (torch.Tensor, torch.nn.Parameter) else kind.__qualname__)
    if depth > DEPTH:
        return EncodedValue(value, None, f"more than {DEPTH} levels of nesting")
    if kind in (list, tuple):
        return _sequence(value, depth)
    if kind is dict:
        return _dict(value, depth)
    parts = _parts(value)
    if parts is None:
        return EncodedValue(value, None, f"{kind.__module__}.{kind.__qualname__}")
    name, inside = parts
    inner = encode(inside, depth + 1)
    if inner.opaque not in ("", TENSORS):
        return EncodedValue(value, None, inner.opaque)
    return EncodedValue(inner.value, [name, inner.recipe], inner.opaque)


def _parts(value: Any) -> tuple[str, Any] | None:
    """Return the name in MAKE and the plain parts; None for other classes."""
    kind = type(value)
    if isinstance(value, np.generic | np.ndarray) and (value.dtype.hasobject or value.dtype.fields is not None):
        return None
    if isinstance(value, np.generic):
        text, _, *rest = _array(np.asarray(value))
        return "scalar", [text, *rest]
    if kind is defaultdict:
        factory = next((name for name, one in FACTORIES.items() if one is value.default_factory), None)
        return None if factory is None else ("defaultdict", [factory, *_pairs(value)])
    if kind not in TAKEN:
        return _parts_of_class(value)
    if kind is zoneinfo.ZoneInfo and value.key is None:
        return None
    name, taken = TAKEN[kind]
    return name, taken(value)


def _parts_of_class(value: Any) -> tuple[str, Any] | None:
    """Parts of a member of an Enum, a named tuple, or a dataclass of the user's, with the class's name."""
    kind = type(value)
    name = [kind.__module__, kind.__qualname__]
    try:
        if _class(*name) is not kind:
            return None
    except CheckpointError:
        return None
    if isinstance(value, enum.Enum):
        known = kind.__members__.get(str(value.name)) is value
        return "enum", [*name, value.name if known else value.value]
    if isinstance(value, tuple):
        return None if getattr(value, "__dict__", None) else ("named", [*name, list(value)])
    slots = {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
    }
    return "fields", [*name, {**slots, **getattr(value, "__dict__", {})}]


def _sequence(value: Any, depth: int) -> EncodedValue:
    inner = [encode(one, depth + 1) for one in value]
    opaque = _opaque(inner)
    recipes = {number: one.recipe for number, one in enumerate(inner) if one.recipe is not None}
    if opaque not in ("", TENSORS) or not recipes:
        return EncodedValue(value, None, opaque)
    return EncodedValue(type(value)(one.value for one in inner), ["items", recipes], opaque)


def _dict(value: dict[Any, Any], depth: int) -> EncodedValue:
    inner = [encode(one, depth + 1) for pair in value.items() for one in pair]
    opaque = _opaque(inner)
    if opaque not in ("", TENSORS) or all(one.recipe is None for one in inner):
        return EncodedValue(value, None, opaque)
    parts = encode([list(value), list(value.values())], depth + 1)
    return EncodedValue(parts.value, ["dict", parts.recipe], opaque)


def _opaque(inner: list[EncodedValue]) -> str:
    return next((one.opaque for one in inner if one.opaque not in ("", TENSORS)), "") or next(
        (one.opaque for one in inner if one.opaque), ""
    )


def decode(value: Any, recipe: Any) -> Any:
    if recipe is None:
        return value
    name, inner = recipe
    if name == "items":
        return type(value)(decode(one, inner.get(number)) for number, one in enumerate(value))
    return MAKE[name](decode(value, inner))


# ---- comparison of values


def value_digest(value: Any) -> str:
    """Return a digest, equal for equal values of the same types, in any order of keys in dicts."""
    hasher = xxhash.xxh3_64()
    _feed(hasher, value, 0)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any, depth: int) -> None:
    kind = type(value)
    hasher.update(f"{kind.__module__}.{kind.__qualname__}:".encode())
    if kind in (str, bytes):
        data = value.encode("utf-8", "surrogatepass") if kind is str else value
        hasher.update(b"%d:" % len(data) + data)
    elif kind in PLAIN:
        hasher.update(repr(value).encode())
    elif isinstance(value, torch.Tensor):
        _feed_tensor(hasher, value)
    elif kind in (list, tuple):
        hasher.update(b"%d:" % len(value))
        for one in value:
            _feed(hasher, one, depth + 1)
    elif kind is dict or kind is Counter or kind is defaultdict:
        for key, inner in sorted((value_digest(key), value_digest(inner)) for key, inner in value.items()):
            hasher.update(key.encode())
            hasher.update(inner.encode())
    elif (parts := _parts(value)) is not None:
        _feed(hasher, parts[1], depth + 1)
    else:
        _feed_object(hasher, value, depth)


def _feed_tensor(hasher: Any, tensor: torch.Tensor) -> None:
    hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if plain.numel():
            hasher.update(plain.view(torch.uint8).numpy().tobytes())
    except (RuntimeError, TypeError, NotImplementedError):  # a kind of tensor without bytes
        hasher.update(repr(tensor).encode())


def _feed_object(hasher: Any, value: Any, depth: int) -> None:
    """Add an object to a hash by what pickle would save of it."""
    if depth > DEPTH:
        return
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:
        reduced = repr(value)
    if isinstance(reduced, str):
        hasher.update(reduced.encode())
        return
    made, arguments, *rest = reduced
    hasher.update(f"{getattr(made, '__module__', '')}.{getattr(made, '__qualname__', '')}".encode())
    for part in (arguments, *(list(one) if hasattr(one, "__next__") else one for one in rest)):
        if isinstance(part, tuple):
            for one in part:
                hasher.update(repr(one).encode()) if isinstance(one, type) else _feed(hasher, one, depth + 1)
        else:
            _feed(hasher, part, depth + 1)
