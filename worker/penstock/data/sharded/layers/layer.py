"""Base class of layers, and helper functions that layers share. A layer is a source made from another source; layers
one over the other, with the source below them, are a stack.

A layer has no state except in its cursors, so one process may open the same stack many times. The key of a layer's
random choices also contains the layer's depth in the stack. Otherwise two layers of the same kind, one over the other,
would undo or repeat each other's random choices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from penstock.data.sharded.protocol import PositionOf, SavedPosition, ShardedSource
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateCorruptError

__all__ = ["Layer", "SearchLimit", "checked", "depth_of", "entered", "is_keyed", "position_function", "title"]

SEARCHED_SAMPLES = 1_000_000
"""Largest number of consecutive samples of an endless source that a layer may leave out: a filter whose predicate is
never true would read forever. One that is true for a sample in 10,000 reaches it with probability e^-100."""


NUMBER_LIMIT = 1 << 62
"""Exclusive upper bound of every number in a saved position."""


class Layer:
    """Base class of layers. Shard s of a layer contains what it makes of the samples of its source's shard s."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "keyed" not in vars(cls):  # a subclass may draw where its base class does not
            cls.keyed = Layer.keyed  # type: ignore[method-assign]

    @property
    def keyed(self) -> bool:
        """True if the layer's samples do not depend on the process's random generators (those of `random`, numpy and
        torch), but at most on generators that it seeds by (seed, epoch, shard, index). A loader can then compute a
        later state without making the batches before it. Set it in each class of your own for which it is true: a
        subclass does not inherit it."""
        return False

    def __init__(self, source: ShardedSource) -> None:
        self.source = checked(source, type(self).__name__)
        self.depth = depth_of(source.described()) + 1
        """Number of sources in the stack down to the lowest one."""

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value!r}" for name, value in self.settings().items())
        return f"{type(self).__name__}({self.source!r}{settings})"

    @property
    def num_shards(self) -> int:
        return self.source.num_shards

    @property
    def endless(self) -> bool:
        return self.source.endless

    def described(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **self.settings(), "source": self.source.described()}

    def settings(self) -> dict[str, Any]:
        """Return the settings that decide which samples the layer yields, as JSON values, for its description in
        states."""
        return {}

    def lengths(self, epoch: int) -> Sequence[int] | None:
        return None

    def over(self, source: ShardedSource) -> Self:
        """Return a layer with the same settings over another source."""
        found = copy.copy(self)
        found.source, found.depth = source, depth_of(source.described()) + 1
        return found


class SearchLimit:
    """Limit on the number of consecutive samples that a layer over an endless source may leave out."""

    def __init__(self, source: ShardedSource, what: str, shard: int) -> None:
        self._left = self._most = SEARCHED_SAMPLES if source.endless else None
        self._what, self._shard = what, shard

    def yielded(self) -> None:
        self._left = self._most

    def left_out(self, samples: int = 1) -> None:
        """Count more samples that were left out. Raises DatasetError beyond the limit."""
        if self._left is None:
            return
        self._left -= samples
        if self._left < 0:
            raise DatasetError(
                f"{self._what} must keep at least one of {SEARCHED_SAMPLES:,} consecutive samples of shard "
                f"{self._shard}, but left out all, and its source never ends. Check its function and settings. If a "
                "Repeated is below it, put the Repeated above it: an epoch without samples is then an error at once"
            )


def checked(source: ShardedSource, layer: str) -> ShardedSource:
    """Return `source`, the argument of a layer, which must be a source in logical shards."""
    if not isinstance(source, ShardedSource):
        raise InvalidArgumentError(
            f"{layer} needs a source in logical shards, got {type(source).__name__}. Wrap it in LogicalShards or "
            "Savable first"
        )
    return source


def entered(saved: SavedPosition | None, layer: str, *names: str) -> tuple[list[int], SavedPosition | None]:
    """Return the integers called `names` in a layer's saved position, and its source's saved position; zeros and None
    at the beginning."""
    if saved is None:
        return [0] * len(names), None
    if not isinstance(saved, Mapping):
        raise StateCorruptError(
            f"the saved position of {layer} must be a dict of integers, got {saved!r:.200}. Load an older state"
        )
    found = [saved.get(name) for name in names]
    numbers = [number for number in found if type(number) is int and 0 <= number < NUMBER_LIMIT]
    if len(numbers) < len(names):
        damaged = dict(zip(names, found, strict=True))
        raise StateCorruptError(
            f"each value of the saved position of {layer} must be an integer from 0 to {NUMBER_LIMIT - 1}, got "
            f"{damaged}. Load an older state"
        )
    return numbers, saved.get("source")


def is_keyed(source: Any) -> bool:
    """Return True if `source` and all sources below it are keyed, as `Layer.keyed` says; one without it is not."""
    below = getattr(source, "sources", [source.source] if hasattr(source, "source") else [])
    return getattr(source, "keyed", False) is True and all(map(is_keyed, below))


def position_function(position_of: PositionOf | None, shard: int, shards: int) -> PositionOf:
    """Return `position_of`, or if it is None the function for shards that are read round robin."""
    return position_of or (lambda index: index * shards + shard)


def title(function: Callable[..., Any], name: str | None) -> str:
    """Return the name by which states describe a user's function. The module's name is left out: that of a script
    depends on the process that runs it. A changed function with an unchanged name is not noticed."""
    if name is not None:
        return name
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def depth_of(described: Mapping[str, Any]) -> int:
    """Return the number of sources in a described stack."""
    below = [described["source"]] if "source" in described else described.get("sources", [])
    return 1 + max((depth_of(source) for source in below), default=0)
