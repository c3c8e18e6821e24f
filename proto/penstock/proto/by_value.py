"""Callables and arguments by value: pickles for this machine's own processes, and for no others.

What has a name that can be imported travels as that name. What has none (a lambda, a local function, a function or a
class of a notebook) travels as its code, with the values that it holds, as cloudpickle does it: both ends are the same
interpreter of the same user. The training script's own functions and classes go by their names in it, and are found in
the script as workers load it.

Only an embedded worker loads this; see penstock.worker.usercode.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

__all__ = ["dump", "load"]

_MAIN_NAMES = ("__main__", "__mp_main__")


def dump(value: object) -> bytes:
    """Return a pickle of the value. Raises whatever pickling it raises: PicklingError, TypeError, AttributeError."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def load(data: bytes, main: Callable[[], types.ModuleType]) -> Any:
    """Return the value of a pickle that this user's own process made. `main`: the training script as a module."""
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.main = main
    return unpickler.load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def persistent_id(self, value: Any) -> tuple[str, ...] | None:
        """The training script's own functions and classes by name; its module has another one in workers."""
        if not isinstance(value, type | types.FunctionType) or value.__module__ not in _MAIN_NAMES:
            return None
        module = sys.modules.get("__main__")
        if not _is_named(value, module):
            return None
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.name not in _MAIN_NAMES:  # started as a module
            return "module", spec.name, value.__qualname__
        return ("main", value.__qualname__) if os.path.isfile(getattr(module, "__file__", None) or "") else None


class _Unpickler(pickle.Unpickler):
    main: Callable[[], types.ModuleType]

    def persistent_load(self, place: Any) -> Any:
        kind, *names = place
        found: Any = self.main() if kind == "main" else importlib.import_module(names.pop(0))
        for part in names[0].split("."):
            found = getattr(found, part)
        return found


def _is_named(value: Any, module: types.ModuleType | None) -> bool:
    found: Any = module
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value
