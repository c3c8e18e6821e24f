"""Files with saved states: `DataLoader.state_dict()`, alone or in a larger checkpoint, by `encode_state` or
`torch.save`. A file of torch is read with weights_only=True, which runs no code, and only if the user named it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.client.states.saved_state import KEY, SavedState, read
from penstock.proto.errors import InvalidArgumentError, StateCorruptError, StateMismatchError
from penstock.proto.state.codec import decode_state

_ENVELOPE, _ZIP = b"PENSTATE", b"PK\x03\x04"
DEEPEST = 16
"""Most containers within each other in which states are searched."""


@dataclass(frozen=True)
class FoundState:
    """Saved state in a file. `path`: keys that lead to it."""

    path: tuple[Any, ...]
    saved: SavedState

    @property
    def name(self) -> str:
        return "".join(f"[{key!r}]" for key in self.path) or "the whole file"


def read_states(path: Path) -> list[FoundState]:
    """Return the states in a file. Raises InvalidArgumentError, StateCorruptError; StateMismatchError for none."""
    if path.is_dir():
        raise InvalidArgumentError(
            f"{path} must be a file with the state of a loader, got a directory. If it is a checkpoint, load it, and "
            "save the loader's state_dict() in a file of its own (torch.save)"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}. Check the path") from error
    if data.startswith(_ZIP):
        value = _of_torch(path, data)
    elif data.startswith(_ENVELOPE):
        try:
            value = decode_state(data)
        except StateCorruptError as error:
            raise StateCorruptError(f"{path}: {error.message}") from error
    else:
        raise StateCorruptError(
            f"{path} must be a file that encode_state() or torch.save() wrote, got one that begins with {data[:8]!r}"
        )
    states = [FoundState(keys, read(state)) for keys, state in _states(value, ())]
    if not states:
        raise StateMismatchError(f"{path} must have a DataLoader.state_dict(), got no value with the key {KEY!r}")
    return states


def read_state(path: Path, input_fn: str | None) -> SavedState:
    """Return the file's only state (of `input_fn`). Raises StateMismatchError for none or several."""
    states = read_states(path)
    fits = [found.saved for found in states if input_fn in (None, found.saved.input_fn)]
    if len(fits) != 1:
        have = ", ".join(f"{found.name} of {found.saved.label}" for found in states)
        raise StateMismatchError(
            f"{path} must have one state of {input_fn or 'a loader'}, got {len(fits)} ({have}). Save the right one in "
            "a file by itself"
        )
    return fits[0]


def _of_torch(path: Path, data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidArgumentError(
            f"{path} has objects that torch.load(weights_only=True) refuses, because reading them would run code. Save "
            "the loader's state in a file by itself"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise StateCorruptError(
            f"{path} is damaged: torch cannot read it ({' '.join(str(error).split())}). Pass an older state"
        ) from error


def _states(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping) and KEY in value:
        yield keys, value
    elif isinstance(value, Mapping | list | tuple) and len(keys) < DEEPEST:
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _states(item, (*keys, key))
