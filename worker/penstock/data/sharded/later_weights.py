"""Resuming a run with other weights of its mixtures: check that they differ only after the saved position.

A state contains a description of its source, which decides the order of samples. A loader refuses a state whose
description differs from its own. But weights that differ only after the state's position give the same samples before
it. So a run may be resumed with a Schedule that has other weights later, or with more sources that have weight 0 until
then. The function below removes such differences from the state's description before the descriptions are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.data.sharded.layers.layer import depth_of

__all__ = ["with_later_weights"]


def with_later_weights(was: Any, now: Any, position: int, inner: int) -> Any:
    """Return the description `was`, with the weights and the added sources from `now` for each mixture that yields the
    same samples before the saved position by both descriptions. All other differences between `was` and `now` stay.

    Descriptions in a damaged state raise KeyError, TypeError or AttributeError.

    Args:
        was: description of the source in the state, as `described()` returned it.
        now: description of the source of the loader that resumes.
        position: first position that no worker has reached, for a mixture whose samples the loader takes directly or
            through Mapped layers.
        inner: upper bound of this position for a mixture inside another mixture, which counts its own samples.
    """
    if not isinstance(was, Mapping) or not isinstance(now, Mapping) or was.get("kind") != now.get("kind"):
        return was
    if was["kind"] == "Mapped" and was.get("skip_failures") == 0:
        if was.get("random") and depth_of(was) != depth_of(now):  # the function's random numbers depend on the depth
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
    """Compare the lists of sources of two descriptions of a mixture. Return a pair (description in `was`, description
    in `now`) for each source in both, and a list of the descriptions of sources that only `now` has. The list is None
    if `now` has fewer sources than `was`."""
    first, second = was["sources"], now["sources"]
    if len(first) > len(second):
        return [], None
    return list(zip(first, second, strict=False)), list(second[len(first) :])


def _before(described: Mapping[str, Any], position: int, count: int) -> list[Any]:
    """Return the segments of a mixture's description (ranges of positions, each with its weights) that begin before
    `position`. Their lists of weights are extended to `count` sources, with weight 0 for added ones."""
    segments = described.get("schedule") or [{"start": 0, "parts": described.get("parts") or []}]
    return [
        {
            name: [*value, *([0] * (count - len(value)))] if name in ("parts", "begin") else value
            for name, value in segment.items()
        }
        for segment in segments
        if segment["start"] < position
    ]
