"""Base class and helper functions of layers, sources made from another source. A layer has no state except in its
cursors. The key of its random choices contains its depth in the stack; otherwise two layers of the same kind, one over
the other, would undo or repeat each other's choices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from penstock.data.sharded.protocol import PositionOf, SavedPosition, ShardedSource
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateCorruptError

SEARCHED_SAMPLES = 1_000_000
"""Most consecutive samples that a layer may leave out of an endless source: a filter that is never true would read
forever. One that is true for a sample in 10,000 reaches this with probability e^-100."""


NUMBER_LIMIT = 1 << 62
ANEW = "anew"
"""Entry of the saved position of a layer that begins anew over its source's: a number beyond all that the layers before
it have used as the index of a sample or window, so that no random choice is made twice."""
UNREADABLE = "unreadable"
"""Field of the description of a source whose data are gone: why."""


class Layer:
    """Base class of layers. Shard s contains what the layer makes of its source's shard s."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "keyed" not in vars(cls):  # a subclass may draw where its base class does not
            cls.keyed = Layer.keyed  # type: ignore[method-assign]

    @property
    def keyed(self) -> bool:
        """True if samples depend at most on generators seeded by (seed, epoch, shard, index), not on the global ones: a
        loader can compute a later state without making batches. Set it in each class: it is not inherited."""
        return False

    def __init__(self, source: ShardedSource) -> None:
        self.source = checked(source, type(self).__name__)
        self.depth = depth_of(source.described()) + 1

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
        """Return the settings that decide which samples the layer yields, as JSON values."""
        return {}

    def lengths(self, epoch: int) -> Sequence[int] | None:
        return None

    def over(self, source: ShardedSource) -> Self:
        found = copy.copy(self)
        found.source, found.depth = source, depth_of(source.described()) + 1
        return found


class SearchLimit:
    def __init__(self, source: ShardedSource, what: str, shard: int) -> None:
        self._left = self._most = SEARCHED_SAMPLES if source.endless else None
        self._what, self._shard = what, shard

    def yielded(self) -> None:
        self._left = self._most

    def left_out(self, samples: int = 1) -> None:
        if self._left is None:
            return
        self._left -= samples
        if self._left < 0:
            raise DatasetError(
                f"{self._what} must keep at least one of {SEARCHED_SAMPLES:,} consecutive samples of shard "
                f"{self._shard}. Check its function, or put the Repeated above it"
            )


def checked(source: ShardedSource, layer: str) -> ShardedSource:
    if not isinstance(source, ShardedSource):
        raise InvalidArgumentError(
            f"{layer} needs a source in logical shards, got {type(source).__name__}. Use LogicalShards or Savable"
        )
    return source


def entered(saved: SavedPosition, layer: str, *names: str) -> tuple[list[int], SavedPosition]:
    """Return the integers `names` in a layer's saved position, and its source's; zeros and None at the beginning."""
    if saved is None:
        return [0] * len(names), None
    if not isinstance(saved, Mapping):
        raise StateCorruptError(f"the saved position of {layer} must be a dict of integers, got {saved!r:.200}")
    fresh = {"index": saved.get(ANEW), "window": saved.get(ANEW)}
    found = [fresh.get(name, 0) if ANEW in saved else saved.get(name) for name in names]
    numbers = [number for number in found if type(number) is int and 0 <= number < NUMBER_LIMIT]
    if len(numbers) < len(names):
        damaged = dict(zip(names, found, strict=True))
        raise StateCorruptError(f"the saved position of {layer} must be integers from 0, got {damaged}")
    return numbers, saved.get("source")


def leaves_out(source: Any) -> bool:
    """Return True if a source below `source` leaves out samples that cannot be decoded."""
    below = getattr(source, "sources", [source.source] if hasattr(source, "source") else [])
    return getattr(source, "skip_failures", 0) > 0 or any(map(leaves_out, below))


def is_keyed(source: Any) -> bool:
    """Return True if `source` and all sources below it say that they are keyed."""
    below = getattr(source, "sources", [source.source] if hasattr(source, "source") else [])
    return getattr(source, "keyed", False) is True and all(map(is_keyed, below))


def position_function(position_of: PositionOf | None, shard: int, shards: int) -> PositionOf:
    """Return `position_of`, or the default: that of shards read round robin."""
    return position_of or (lambda index: index * shards + shard)


def title(function: Callable[..., Any], name: str | None) -> str:
    """Return the name of a user's function in states. The module's name is left out, because a script's depends on the
    process. A changed function with an unchanged name is not noticed."""
    if name is not None:
        return name
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def depth_of(described: Mapping[str, Any]) -> int:
    below = [described["source"]] if "source" in described else described.get("sources", [])
    return 1 + max((depth_of(source) for source in below), default=0)
