"""What layers have in common: the shards of the source below, and how tokens, keys and places are handed down.

A layer has no state of its own beside what lies in its cursors, so a source and its layers may be opened many times in
one process. Where a layer uses randomness, its key is made of its own depth in the stack too: two layers of a kind, one
on top of the other, would undo or repeat each other's choices if they drew the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.data.sharded.protocol import Place, ShardedSource, Token
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateCorruptError

__all__ = ["Layer", "SearchLimit", "checked", "entered", "is_keyed", "placed", "title"]

PATIENCE = 1_000_000
"""Samples in a row that may give nothing, of a source that does not end. A predicate that is never true would read on
for ever; one that is true for one sample of 10,000 gets here once in e^100 times."""


_LAYERS = ("Chunked", "Filtered", "Grouped", "Mapped", "Packed", "Repeated", "WindowShuffled")
MOST = 1 << 62
"""Of any number in a token."""


class Layer:
    """A source that works inside each shard of another one."""

    def __init__(self, source: ShardedSource) -> None:
        self.source = checked(source, type(self).__name__)
        self.depth = _depth(source.described()) + 1
        """Of the stack of sources that ends with this one."""

    @property
    def num_shards(self) -> int:
        return self.source.num_shards

    @property
    def endless(self) -> bool:
        return self.source.endless

    def described(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **self.settings(), "source": self.source.described()}

    def settings(self) -> dict[str, Any]:
        """What decides the layer's samples, as values of JSON."""
        return {}

    def lengths(self, epoch: int) -> Sequence[int] | None:
        return None


class SearchLimit:
    """Ends the search for a sample in a shard that has none any more and does not end either."""

    def __init__(self, source: ShardedSource, what: str, shard: int) -> None:
        self._left = self._most = PATIENCE if source.endless else None
        self._what, self._shard = what, shard

    def found(self) -> None:
        self._left = self._most

    def nothing(self, samples: int = 1) -> None:
        """So many more. Raises DatasetError if these are too many."""
        if self._left is None:
            return
        self._left -= samples
        if self._left < 0:
            raise DatasetError(
                f"{self._what} left out {PATIENCE:,} samples of shard {self._shard} in a row, and its source never "
                "ends. Put Repeated on top of it: that sees an epoch in which there is nothing"
            )


def checked(source: ShardedSource, layer: str) -> ShardedSource:
    """Raises InvalidArgumentError for what is no source in logical shards."""
    if not isinstance(source, ShardedSource):
        raise InvalidArgumentError(
            f"{layer} reads sources in logical shards, and not a {type(source).__name__}: cut it into shards by "
            "LogicalShards or Savable first"
        )
    return source


def entered(token: Token | None, layer: str, *names: str) -> tuple[list[int], Token | None]:
    """These integers of a layer's token, and its source's token; of None: zeros, and None.

    Raises StateCorruptError if that is no such token.
    """
    if token is None:
        return [0] * len(names), None
    if not isinstance(token, Mapping):
        raise StateCorruptError(f"a token of {layer} that cannot be: {token!r:.200}")
    found = [token.get(name) for name in names]
    numbers = [number for number in found if type(number) is int and 0 <= number < MOST]
    if len(numbers) < len(names):
        raise StateCorruptError(f"a token of {layer} that cannot be: {dict(zip(names, found, strict=True))}")
    return numbers, token.get("source")


def is_keyed(described: Any) -> bool:
    """Nothing in a stack of sources, by its `described()`, draws from the process's random generators: functions get
    generators of their own, and so do pieces and streams. Not known of sources that are not ours."""
    kind = described.get("kind") if isinstance(described, Mapping) else None
    if kind in ("LogicalShards", "Savable"):
        return described["capture_rng"] is True
    if kind == "Mixture":
        return all(map(is_keyed, described["sources"]))
    if kind in ("Mapped", "Filtered") and not described["random"]:
        return False
    return kind in _LAYERS and is_keyed(described["source"])


def placed(place: Place | None, shard: int, shards: int) -> Place:
    """`place`, or where samples come if nobody says so: a row of all shards' samples, then the next one."""
    return place or (lambda index: index * shards + shard)


def title(function: Callable[..., Any], name: str | None) -> str:
    """How a state names a function: that what it does is still the same cannot be seen. Not by its module, for a main
    script has another name in the process that runs it."""
    if name is not None:
        return name
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _depth(described: Mapping[str, Any]) -> int:
    below = [described["source"]] if "source" in described else described.get("sources", [])
    return 1 + max((_depth(source) for source in below), default=0)
