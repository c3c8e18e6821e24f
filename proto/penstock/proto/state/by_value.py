"""Pickles of callables and their arguments, which only processes of this user on this machine may load: embedded
workers (penstock.worker.processes.user_code).

Objects with an importable name, and the training script's own functions and classes, are sent by name; others (a
lambda, what a notebook defines) as code by cloudpickle: both processes run the same interpreter."""

from __future__ import annotations

import functools
import importlib
import io
import json
import linecache
import os
import pickle
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from penstock.proto.state.main_script import MAIN_NAMES, main_module

_MOST_SEARCHED = 100_000
"""Objects looked at for the way to one that cannot be pickled."""


def dump(value: object) -> tuple[bytes, str]:
    """Return a pickle, and the function or class for which its reader loads the training script, "" for none. Raises
    PicklingError, which names the attribute that cannot be pickled, or the function or class that uses it."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception as error:
        where = f", which {pickler.last} holds or uses" if pickler.last else ""
        way = _way_to(pickler.newest, value)
        if way:
            where = f", which {way} is: open or make it in each process, at its first use"
        raise pickle.PicklingError(f"{error}{where}") from error
    sources = {name: linecache.getlines(name) for name in pickler.files if not os.path.exists(name)}
    file.write(json.dumps(sources).encode())
    return file.getvalue(), pickler.of_main


def load(data: bytes, main: Callable[[], types.ModuleType]) -> Any:
    """Return the value of a pickle of this user. `main`: returns the training script as a module."""
    file = io.BytesIO(data)
    unpickler = _Unpickler(file)
    unpickler.main = main
    value = unpickler.load()
    for name, lines in json.loads(file.read()).items():
        linecache.cache[name] = sum(map(len, lines)), None, lines, name
    return value


def _way_to(culprit: Any, value: Any) -> str:
    """Return the attributes, keys and indexes that lead to an object, such as "Folder.index[0].file"; "" if there is no
    such way through objects, dicts, lists and tuples."""
    waiting, seen = deque([("", value)]), {id(value)}
    while waiting and len(seen) < _MOST_SEARCHED:
        way, holder = waiting.popleft()
        for step, member in _members(holder):
            # a way begins at the first object that has attributes: what holds that is ours
            further = f"{way or type(holder).__qualname__}{step}" if way or step.startswith(".") else ""
            if member is culprit:
                return further
            if id(member) not in seen:
                seen.add(id(member))
                waiting.append((further, member))
    return ""


def _members(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, list | tuple):
        yield from ((f"[{index}]", member) for index, member in enumerate(holder))
    elif isinstance(holder, dict):
        yield from ((f"[{key!r:.40}]", member) for key, member in holder.items())
    elif not isinstance(holder, type | types.ModuleType | types.FunctionType):
        yield from ((f".{name}", member) for name, member in getattr(holder, "__dict__", {}).items())


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    of_main = ""
    """Function or class of the training script that was pickled by name."""
    last = ""
    newest: Any = None
    """Object that is pickled at the moment."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.files = set[str]()
        """Files of the code. The cells of a notebook are none, so their lines are sent too, for tracebacks."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle a function that functools.lru_cache wraps as code, if no worker can import it by name."""
        if type(value) is functools._lru_cache_wrapper and not _is_importable(value):
            return _cached, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)

    def persistent_id(self, value: Any) -> tuple[str, ...] | None:
        """Name under which a worker finds a function or class of the training script, loaded as another module."""
        self.newest = value
        if isinstance(value, types.CodeType):
            self.files.add(value.co_filename)
        if isinstance(value, type | types.FunctionType) and not str(value.__module__).startswith("cloudpickle"):
            self.last = value.__qualname__
        if not isinstance(value, type | types.FunctionType) or value.__module__ not in MAIN_NAMES:
            return None
        module = sys.modules.get("__main__")
        if not _is_named(value, module):
            return None
        name, path = main_module()
        if name or path:
            self.of_main = value.__qualname__
        return ("module", name, value.__qualname__) if name else ("main", value.__qualname__) if path else None


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


class _Unpickler(pickle.Unpickler):
    main: Callable[[], types.ModuleType]

    def persistent_load(self, place: Any) -> Any:
        kind, *names = place
        found: Any = self.main() if kind == "main" else importlib.import_module(names.pop(0))
        for part in names[0].split("."):
            try:
                found = getattr(found, part)
            except AttributeError as error:
                raise AttributeError(f'{error}: define it above `if __name__ == "__main__":`') from None
        return found


def _is_importable(value: Any) -> bool:
    return value.__module__ not in MAIN_NAMES and _is_named(value, sys.modules.get(value.__module__))


def _is_named(value: Any, module: types.ModuleType | None) -> bool:
    found: Any = module
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value
