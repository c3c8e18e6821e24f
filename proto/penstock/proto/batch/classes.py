"""Names of namedtuple and dataclass types in batches, and the classes that a received name may refer to.

Only class and field names are sent, never code. The receiver looks the name up among the classes that its process has
already imported or registered, so that a peer cannot cause an import. Access to an attribute could import a module (a
module's `__getattr__`, importlib's lazy modules), so only `__dict__`s are read. Only namedtuples and dataclasses with
exactly the received fields are accepted, and rebuilt without running `__new__`, `__init__` or `__post_init__`.

A main script is `__main__` in its own process, `__mp_main__` in a multiprocessing child and `penstock_main` in a
runner. The three are treated as one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from functools import lru_cache
from inspect import isabstract
from types import BuiltinFunctionType, ModuleType
from typing import Final, Literal, TypeVar

from penstock.proto.errors import InvalidArgumentError, UnsupportedLeafError

MAIN_MODULES: Final = ("__main__", "__mp_main__", "penstock_main")
"""Module of the user's main script: in the process that runs it, in a multiprocessing child, and in a runner."""

MAX_NAME: Final = 1024

T = TypeVar("T", bound=type)
ClassKind = Literal["nt", "dc"]

_WORDS: Final = {"nt": "namedtuple", "dc": "dataclass"}

_by_name: dict[str, type] = {}
_names: dict[type, str] = {}


def qualified(cls: type) -> str:
    """`module.qualname`, or the name alone for a builtin."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def class_fields(cls: type) -> tuple[ClassKind, tuple[str, ...]] | None:
    """Return "nt" for a namedtuple or "dc" for a dataclass, and its field names in order; None for other classes.

    None also for a dataclass that cannot be rebuilt from its fields (it is abstract, has other slots, or a base that
    `object.__new__` cannot make), and for a tensordict `tensorclass`, with its values elsewhere."""
    if issubclass(cls, tuple):
        names = getattr(cls, "_fields", None)
        if type(names) is tuple and all(type(name) is str for name in names):
            return "nt", names
        return None
    if not dataclasses.is_dataclass(cls) or isabstract(cls) or getattr(cls, "_is_tensorclass", None) is True:
        return None
    makers = (base.__dict__.get("__new__") for base in cls.__mro__[:-1])
    if any(isinstance(maker, BuiltinFunctionType) for maker in makers):
        return None
    fields = tuple(field.name for field in dataclasses.fields(cls))
    return ("dc", fields) if slots_of(cls) <= set(fields) else None


@lru_cache(maxsize=256)
def slots_of(cls: type) -> frozenset[str]:
    return frozenset(
        f"_{base.__name__.lstrip('_')}{slot}" if slot.startswith("__") else slot
        for base in cls.__mro__
        for slot in _own_slots(base)
        if not slot.endswith("__")
    )


def _own_slots(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def register_class(cls: T, name: str | None = None) -> T:
    """Register a name (default "module:qualname") for a namedtuple or dataclass, so that batches may hold its
    instances.

    Needed for a class that is not an attribute of its module (it is defined inside a function), or that the runner and
    the training process import under different module names: call this in both processes, with the same name. It can be
    used as a decorator. A class that is defined again (by a notebook cell that is run twice) replaces the earlier one.

    Raises InvalidArgumentError if `cls` is neither a namedtuple nor a dataclass that can be rebuilt from its fields, if
    `name` is empty or too long, or if it belongs to another class."""
    if not isinstance(cls, type) or class_fields(cls) is None:
        raise InvalidArgumentError(f"register_class: cls must be a namedtuple, or a dataclass of fields, got {cls!r}")
    if name is None:
        name = f"{cls.__module__}:{cls.__qualname__}"
    if not name or len(name) > MAX_NAME:
        raise InvalidArgumentError(f"register_class: name must have 1 to {MAX_NAME} characters, got {len(name)}")
    holder = _by_name.get(name)
    if holder is not None and holder is not cls:
        if (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InvalidArgumentError(f"register_class: {name!r} is already the name of {qualified(holder)}")
        _names.pop(holder, None)
    _by_name[name] = cls
    _names[cls] = name
    return cls


def class_name(cls: type) -> str:
    """Name under which instances of `cls` are sent: the registered one, or "module:qualname"."""
    return _names.get(cls) or f"{cls.__module__}:{cls.__qualname__}"


def resolve_class(name: str, kind: ClassKind, fields: tuple[str, ...]) -> type:
    """Return the class in this process. Raises UnsupportedLeafError, with the remedy, if there is none."""
    found = find_class(name)
    if found is None:
        raise UnsupportedLeafError(
            f"the batch has a {name!r}, which this process has not imported; import its module, or register_class it"
        )
    known = class_fields(found)
    if known != (kind, fields):
        raise UnsupportedLeafError(
            f"the batch holds a {_WORDS[kind]} {name!r} with fields {list(fields)}, but here it has "
            f"{list(known[1]) if known else 'none'}; run the same version of its module on both sides"
        )
    return found


def find_class(name: str) -> type | None:
    """Return the registered or imported class with this name. Nothing is imported."""
    return _by_name.get(name) or _imported(name)


def _imported(name: str) -> type | None:
    module_name, colon, qualname = name.partition(":")
    if not colon:
        return None
    candidates = [module_name]
    if module_name in MAIN_MODULES:
        candidates += [other for other in MAIN_MODULES if other != module_name]
    for candidate in candidates:
        module = sys.modules.get(candidate)
        if not isinstance(module, ModuleType):
            continue
        # Not vars(module): a lazy module's own __getattribute__ would import.
        found: object = module
        scope: object = ModuleType.__getattribute__(module, "__dict__")
        for part in qualname.split("."):
            found = scope.get(part) if isinstance(scope, dict) else None
            if not isinstance(found, type):
                break
            scope = dict(type.__getattribute__(found, "__dict__"))
        if isinstance(found, type):
            return found
    return None
