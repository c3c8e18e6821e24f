"""Change of a mixture's weights at a resume: from which position on two descriptions give other samples.

A mixture directly below the loader has its samples at the loader's positions. So a state fits weights that differ only
from its position on: what was delivered is the same under both. Sources may be added at the end of the mixture, with
weight 0 up to there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["first_change"]


def first_change(was: Any, now: Any) -> int | None:
    """Return the first position from which a source that is described by `now` may give other samples than one that is
    described by `was`; None if they differ in more than the weights of a mixture directly below the loader. Functions
    that yield one sample for each (Mapped) may lie between."""
    while _is_mapped(was) and _is_mapped(now) and {**was, "source": None} == {**now, "source": None}:
        was, now = was["source"], now["source"]
    both = [was, now]
    if not all(isinstance(each, Mapping) and each.get("kind") == "Mixture" for each in both):
        return None
    rest = [{name: each[name] for name in each if name not in ("parts", "segments", "sources")} for each in both]
    sources = [each.get("sources") for each in both]
    if rest[0] != rest[1] or not all(isinstance(each, Sequence) for each in sources):
        return None
    old, new = (list(each) for each in sources)
    if new[: len(old)] != old or was.get("stop") != "never":
        return None
    return _first_difference(_segments(was, len(new)), _segments(now, len(new)))


def _is_mapped(described: Any) -> bool:
    """Return True for a Mapped that yields one sample for each, and draws nothing. What it draws would depend on the
    number of layers below, which another source may change."""
    plain = isinstance(described, Mapping) and described.get("kind") == "Mapped"
    return plain and not described.get("skip_failures") and described.get("random") is False


def _segments(described: Mapping[str, Any], sources: int) -> list[tuple[int, list[int]]]:
    """Return the (begin, parts) of a mixture's segments, with parts for `sources` sources."""
    segments = described.get("segments", [[0, described.get("parts", [])]])
    return [(begin, [*parts, *[0] * (sources - len(parts))]) for begin, parts in segments]


def _first_difference(was: Sequence[tuple[int, Any]], now: Sequence[tuple[int, Any]]) -> int:
    """Return the first beginning of a segment of either list that the other one does not have like this."""
    begins = sorted({begin for begin, _ in (*was, *now)})
    for begin in begins:
        old, new = (each[bisect_right([at for at, _ in each], begin) - 1] for each in (was, now))
        if old != new:
            return begin
    return begins[-1] + (1 << 62)  # they are the same
