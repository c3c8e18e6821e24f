"""Reading of files with states of other libraries, written as JSON or by torch.save. No code in these files is
executed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.proto.errors import InvalidArgumentError, StateCorruptError, StateMismatchError

__all__ = ["count", "foreign_state"]

DEEPEST = 16
"""Largest number of containers (dicts, lists) within each other in which a state is searched."""


def foreign_state(path: Path, library: str, *keys: Collection[str]) -> Mapping[str, Any]:
    """Return the state of a library in a file, which may be part of a larger checkpoint.

    Args:
        path: the file.
        library: name of the library, for errors.
        keys: sets of names by which a state is recognised: a dict is a state if it has all names of one of these sets.

    Raises InvalidArgumentError for a file that cannot be read, StateCorruptError for a damaged file, StateMismatchError
    if the file has no state or several.
    """
    found = list(_dicts(_value(path), keys, 0))
    if len(found) == 1:
        return found[0]
    wanted = " or ".join(", ".join(sorted(names)) for names in keys)
    if not found:
        raise StateMismatchError(
            f"{path} must have a state of {library}, a dict with the keys {wanted}, got none. Save the loader's state "
            "by itself, or pass the right --from"
        )
    raise StateMismatchError(
        f"{path} must have one state of {library}, got {len(found)} dicts with the keys {wanted}. Save the right state "
        "in a file by itself"
    )


def count(path: Path, state: Mapping[str, Any], name: str) -> int:
    """Return the entry `name` of a state, which must be an integer of at least 0. Raises StateCorruptError for another
    value."""
    value = state.get(name)
    if type(value) is not int or value < 0:
        raise StateCorruptError(f"{path}: {name} must be an integer >= 0, got {value!r:.100}. Pass an older state")
    return value


def _value(path: Path) -> Any:
    from penstock.deploy.operations.saved_file import ZIP, of_torch

    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}. Check the path") from error
    if data.startswith(ZIP):
        return of_torch(path, data)
    return _of_json(path, data)


def _of_json(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StateCorruptError(
            f"{path} must be JSON or a file that torch.save() wrote, got one that begins with {data[:8]!r} ({error}). "
            "Pass a file that the other library's state was saved in"
        ) from error


def _dicts(value: Any, keys: Collection[Collection[str]], depth: int) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, bytes) and value.lstrip().startswith(b"{"):  # Grain's states are JSON in bytes
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return
    if isinstance(value, Mapping):
        if any(all(name in value for name in names) for names in keys):
            yield value
            return
        inner: Any = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        return
    if depth < DEEPEST:
        for item in inner:
            yield from _dicts(item, keys, depth + 1)
