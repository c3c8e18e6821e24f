"""Changes of a mixture's weights from a saved position on: whether two descriptions of a source agree before it.

A state records the order of samples, and a loader with another order refuses it. But two orders that differ only from
the state's position on give the same samples up to it. So a run may be resumed with other weights, or with more
sources, from any position, as long as the weights change only after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.data.sharded.layers.layer import depth_of

__all__ = ["with_later_weights"]


def with_later_weights(was: Any, now: Any, position: int, inner: int) -> Any:
    """Return a source's description `was`, in which each mixture has its weights from `now`, if both descriptions give
    the same samples of the mixture before a position. All other differences stay.

    Descriptions in a damaged state raise KeyError, TypeError or AttributeError.

    Args:
        was, now: descriptions of two sources, as `described()` returns them.
        position: first position that was not reached, for a mixture that yields the loader's samples itself.
        inner: first position that was not reached, for a mixture inside another one.
    """
    if not isinstance(was, Mapping) or not isinstance(now, Mapping) or was.get("kind") != now.get("kind"):
        return was
    if was["kind"] == "Mapped" and was.get("skip_failures") == 0:
        if was.get("random") and depth_of(was) != depth_of(now):  # what the function draws depends on the depth
            return was
        return {**was, "source": with_later_weights(was.get("source"), now.get("source"), position, inner)}
    if was["kind"] != "Mixture":
        return was
    sources, added = _pairs(was, now)
    if added is None:
        return was
    found = {**was, "sources": [with_later_weights(one, other, inner, inner) for one, other in sources]}
    count = len(sources) + len(added)
    if _before(was, position, count) != _before(now, position, count):
        return found
    changed = {name: value for name, value in found.items() if name not in ("parts", "schedule")}
    weights = {name: now[name] for name in ("parts", "schedule") if name in now}
    return {**changed, **weights, "sources": [*found["sources"], *added]}


def _pairs(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[tuple[Any, Any]], list[Any] | None]:
    """Return the descriptions of the sources that both mixtures have, in pairs; and of the sources that only `now` has.
    The second value is None if `now` lacks a source of `was`."""
    first, second = was["sources"], now["sources"]
    if len(first) > len(second):
        return [], None
    return list(zip(first, second, strict=False)), list(second[len(first) :])


def _before(described: Mapping[str, Any], position: int, count: int) -> list[Any]:
    """Return the segments (parts of the mixture's order with their weights) that begin before a position, with weights
    for `count` sources. A source that a segment does not list has weight 0."""
    segments = described.get("schedule") or [{"start": 0, "parts": described.get("parts") or []}]
    return [
        {
            name: [*value, *([0] * (count - len(value)))] if name in ("parts", "begin") else value
            for name, value in segment.items()
        }
        for segment in segments
        if segment["start"] < position
    ]
