"""A few values that took long to compute, kept for the next call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The `most` values used last, by key. Unlike functools.lru_cache it can be pickled."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        value = self._values.pop(key, None)
        if value is None:
            value = make()
        self._values[key] = value
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        return value
