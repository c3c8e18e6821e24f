"""Weights of a mixture's sources, and how they change with the position in the mixture's order.

A schedule is a list of segments: from a position on, the sources have these parts. A segment begins its order of
sources anew, so shares are exact within each segment, and the source of a sample is a function of the segment and the
sample's position in it. A ramp is a series of short segments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.layers.mixture_shares import MixtureOrder, Weight, order_of, parts_of
from penstock.proto.errors import InvalidArgumentError

__all__ = ["Ramp", "Schedule", "ScheduledOrder", "Segment", "Weights", "segments_of"]

RAMP_PIECES = 32
"""Largest number of segments in a ramp."""
RAMP_PARTS = 1 << 12
"""Sum of the parts to which the weights within a ramp are rounded. Finer ones would take a large table for each
segment."""

Weights = Sequence[Weight] | Mapping[str, Weight]
"""One weight for each source, or weights by the sources' names; a source without a weight has weight 0."""


class Segment(NamedTuple):
    """Parts of the sources from a position on."""

    begin: int
    """Position of the segment's first sample in the mixture's order."""
    parts: tuple[int, ...]
    """Weight of each source as a whole number."""


@dataclass(frozen=True)
class Ramp:
    """Weights that are reached gradually: from the weights before, in equal steps.

    Args:
        weights: weights at the ramp's end.
        over: length of the ramp, in samples of the mixture.
    """

    weights: Weights
    over: int


@dataclass(frozen=True)
class Schedule:
    """Weights that change at positions in the mixture's order.

        Mixture({"web": web, "code": code}, Schedule({0: {"web": 1}, 50_000: {"web": 0.6, "code": 0.4}}))

    A position counts the samples that the mixture has given on all workers of all boxes together. With a Mixture
    directly below a ShardLoader, step S begins at position S times the global batch. A nested mixture counts its own
    samples.

    Args:
        weights: position -> weights from there on, or a Ramp that begins there. One of the positions must be 0.
    """

    weights: Mapping[int, Weights | Ramp]


class ScheduledOrder:
    """Function from positions to sources, for weights that change."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments, self._begins = segments, [segment.begin for segment in segments]

    def number_at(self, position: int) -> int:
        """Return the number of the segment that has this position."""
        return bisect_right(self._begins, position) - 1

    def at(self, position: int) -> int:
        """Return the number of the source that gives the sample at this position of the mixture's order."""
        begin, parts = self._segments[self.number_at(position)]
        return order_of(parts).at(position - begin)

    def many(self, positions: Ints) -> Ints:
        """Return the numbers of the sources that give the samples at these positions."""
        numbers = np.searchsorted(self._begins, positions, "right") - 1
        found = np.empty(len(positions), np.int64)
        for number in np.unique(numbers).tolist():
            begin, parts = self._segments[number]
            chosen = numbers == number
            found[chosen] = order_of(parts).many(positions[chosen] - begin)
        return found


Order = MixtureOrder | ScheduledOrder


def segments_of(weights: Any, names: Sequence[str]) -> tuple[Segment, ...]:
    """Return the segments of a mixture's weights or Schedule; `names`: names of its sources. Raises
    InvalidArgumentError for invalid weights or positions."""
    if not isinstance(weights, Schedule):
        return (Segment(0, parts_of(_weights(weights, names))),)
    given = weights.weights
    if not isinstance(given, Mapping) or not given:
        raise InvalidArgumentError(f"Schedule needs a dict from positions to weights, got {given!r:.200}")
    for position in given:
        if type(position) is not int or position < 0:
            raise InvalidArgumentError(f"Schedule: a position must be an int >= 0, got {position!r}")
    begins = sorted(given)
    if begins[0] != 0 or isinstance(given[0], Ramp):
        raise InvalidArgumentError(
            f"Schedule must have weights at position 0, where the mixture begins, got {given[begins[0]]!r:.200} at "
            f"position {begins[0]}"
        )
    found: list[Segment] = []
    now: list[Fraction] = []
    """Shares at the end of the last segment."""
    for begin, following in zip(begins, [*begins[1:], None], strict=True):
        try:
            now = _add(found, begin, given[begin], following, now, names)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"Schedule, position {begin}: {error.message}") from None
    return tuple(found)


def _add(
    found: list[Segment],
    begin: int,
    given: Weights | Ramp,
    following: int | None,
    before: Sequence[Fraction],
    names: Sequence[str],
) -> list[Fraction]:
    """Add the segments that begin with one entry of a schedule. Return the shares at their end."""
    parts = parts_of(_weights(given.weights if isinstance(given, Ramp) else given, names))
    shares = [Fraction(part, sum(parts)) for part in parts]
    if isinstance(given, Ramp):
        over = given.over
        if type(over) is not int or over < 1:
            raise InvalidArgumentError(f"over= of a Ramp must be an int >= 1, got {over!r}")
        if following is not None and begin + over > following:
            raise InvalidArgumentError(
                f"the ramp must end before the next weights begin, at position {following}, got over={over}, which "
                f"ends at {begin + over}"
            )
        pieces = min(RAMP_PIECES, over)
        for piece in range(pieces):
            part_of_way = Fraction(piece + 1, pieces + 1)
            between = [old + (new - old) * part_of_way for old, new in zip(before, shares, strict=True)]
            rounded = tuple(max(1, round(share * RAMP_PARTS)) if share else 0 for share in between)
            found.append(Segment(begin + over * piece // pieces, rounded))
        begin += over
        if begin == following:
            return shares
    found.append(Segment(begin, parts))
    return shares


def _weights(given: Any, names: Sequence[str]) -> list[Weight]:
    """Return one weight for each source."""
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in names]
        if unknown:
            raise InvalidArgumentError(
                f"weights must be of the Mixture's sources, {', '.join(names)}, got one of {unknown[0]!r}"
            )
        return [given.get(name, 0) for name in names]
    if not isinstance(given, Sized) or isinstance(given, str):
        raise InvalidArgumentError(
            f"Mixture needs a list of weights, a dict of weights by name, or a Schedule, got a {type(given).__name__}"
        )
    if len(given) != len(names):
        raise InvalidArgumentError(
            f"Mixture needs one weight for each source, got {len(names)} sources and {len(given)} weights"
        )
    found: list[Weight] = list(given)  # type: ignore[call-overload]  # of any iterable with a length
    return found
