"""A loader that says of itself more than any honest one does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class _Loader:
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    @staticmethod
    def advance_state(state: dict[str, Any], batches: int) -> dict[str, Any]:
        return state


def long_name() -> _Loader:
    """A class whose name is above what a heartbeat may hold."""
    _Loader.__qualname__ = "x" * (5 << 20)
    return _Loader()
