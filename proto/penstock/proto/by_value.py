"""Callables and arguments by value: pickles for this machine's own processes, and for no others.

What has a name that can be imported travels as that name. What has none (a lambda, a local function, a function of a
notebook) travels as its code, with the values that it holds: both ends are the same interpreter of the same user. The
training script's own functions and classes go by their names in it, and are found in the script as workers load it.

Only an embedded worker loads this; see penstock.worker.usercode.
"""

from __future__ import annotations

import importlib
import io
import marshal
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["dump", "load"]

_MAIN_NAMES = ("__main__", "__mp_main__")


def dump(value: object) -> bytes:
    """Return a pickle of the value. Raises whatever pickling it raises: PicklingError, TypeError, AttributeError."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def load(data: bytes, main: Callable[[], types.ModuleType]) -> Any:
    """Return the value of a pickle that this user's own process made. `main`: the training script as a module."""
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.main = main
    return unpickler.load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[str, ...] | None:
        """The training script's own functions and classes by name; its module has another one in workers."""
        if not isinstance(value, type | types.FunctionType) or value.__module__ not in _MAIN_NAMES:
            return None
        module, name = _main()
        if not _is_named(value, module):
            return None
        if name:
            return "module", name, value.__qualname__
        return ("main", value.__qualname__) if _has_file(module) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, types.CellType):
            try:
                return _cell, (value.cell_contents,)
            except ValueError:
                return _cell, ()
        if not isinstance(value, type | types.FunctionType):
            return NotImplemented
        nameless = value.__module__ in _MAIN_NAMES  # a notebook's, or persistent_id had known its name
        if isinstance(value, types.FunctionType) and (
            nameless or not _is_named(value, sys.modules.get(value.__module__))
        ):
            return _reduced(value)
        if nameless:
            raise pickle.PicklingError(f"class {value.__qualname__} has no name to import: put it into a module file")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    main: Callable[[], types.ModuleType]

    def persistent_load(self, place: Any) -> Any:
        kind, *names = place
        found: Any = self.main() if kind == "main" else importlib.import_module(names.pop(0))
        for part in names[0].split("."):
            found = getattr(found, part)
        return found


def _reduced(function: types.FunctionType) -> tuple[Any, ...]:
    code = function.__code__
    state = {
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__dict__": function.__dict__,
        "__qualname__": function.__qualname__,
    }
    module = sys.modules.get(function.__module__)
    main, name = _main()
    if module is main and not name and not _has_file(main):
        place, used = None, {key: function.__globals__[key] for key in _names(code) if key in function.__globals__}
    else:
        place, used = (name if module is main else function.__module__) or "", {}
    made = (marshal.dumps(code), place, tuple(types.CellType() for _ in code.co_freevars))
    return _function, made, (state, used, function.__closure__), None, None, _fill


def _names(code: types.CodeType) -> set[str]:
    """Names that the code, and what is defined in it, may look up among its globals."""
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _function(code: bytes, place: str | None, cells: tuple[types.CellType, ...]) -> types.FunctionType:
    """place: the module whose globals it has; "" for the training script, None for globals of its own."""
    if place is None:
        names: dict[str, Any] = {"__builtins__": __builtins__}
    elif place:
        names = importlib.import_module(place).__dict__
    else:
        names = sys.modules["penstock_main"].__dict__
    return types.FunctionType(marshal.loads(code), names, closure=cells)


def _fill(function: types.FunctionType, contents: tuple[dict[str, Any], dict[str, Any], Any]) -> None:
    """What the function holds, once it is there: it may hold itself."""
    state, used, closure = contents
    for name, value in state.items():
        setattr(function, name, value)
    function.__globals__.update(used)
    for cell, filled in zip(function.__closure__ or (), closure or (), strict=True):
        try:
            cell.cell_contents = filled.cell_contents
        except ValueError:
            pass  # it had none yet


def _cell(*contents: Any) -> types.CellType:
    return types.CellType(*contents)


def _main() -> tuple[types.ModuleType | None, str]:
    """The training script, and its name where it was started as a module."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return main, spec.name if spec is not None and spec.name not in _MAIN_NAMES else ""


def _has_file(module: types.ModuleType | None) -> bool:
    return os.path.isfile(getattr(module, "__file__", None) or "")


def _is_named(value: Any, module: types.ModuleType | None) -> bool:
    found: Any = module
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value
