"""Weights of a mixture that change with the position: users' `Schedule` and `Ramp`, and the segments made from them. A
position counts the mixture's samples in all shards and on all boxes, so weights do not depend on the topology."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

from penstock.data.arguments import apportioned, at_least_one, whole
from penstock.data.sharded.layers.layer import NUMBER_LIMIT, UNREADABLE, depth_of
from penstock.proto.errors import InvalidArgumentError

MAX_PARTS = 1 << 16
"""Largest sum of the whole numbers (parts) to which weights are converted."""

MAX_EXPONENT = 400
"""Largest exponent in the text of a weight (of a float: 324). 1e99999999 would take minutes to convert."""

Weight = float | int | Fraction | Decimal


def parts_of(weights: Sequence[Weight], names: Sequence[str] | None = None) -> tuple[int, ...]:
    """Return the weights as whole numbers (parts) in the same ratio: 0.7, 0.2 and 0.1 become 7, 2 and 1. A float means
    its decimal text: 0.1 is exactly 1/10. If the parts would sum up to more than MAX_PARTS, they are rounded to that
    sum; those with the largest remainders are rounded up."""
    keys: Sequence[Any] = range(len(weights)) if names is None else names
    exact = [_fraction(key, weight) for key, weight in zip(keys, weights, strict=True)]
    total = sum(exact)
    if total == 0:
        raise InvalidArgumentError(f"at least one weight must be above 0, got {list(weights)}")
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PARTS:
        return tuple(int(share * period) for share in shares)
    parts = apportioned(shares, MAX_PARTS)
    for key, part, weight in zip(keys, parts, weights, strict=True):
        if weight and not part:
            raise InvalidArgumentError(
                f"weights[{key!r}] must be 0, or at least 1/{MAX_PARTS:,} of the sum of all weights, got {weight}"
            )
    return reduced(tuple(parts))


def _fraction(key: int | str, weight: Any) -> Fraction:
    text = str(weight)
    try:
        exponent = int(text.lower().partition("e")[2] or 0)
        exact = Fraction(text if abs(exponent) <= MAX_EXPONENT else 0)
    except (ValueError, ZeroDivisionError):
        raise InvalidArgumentError(f"weights[{key!r}] must be a finite number, got {weight!r}") from None
    if abs(exponent) > MAX_EXPONENT:
        raise InvalidArgumentError(
            f"weights[{key!r}] must be 0 or from 1e-{MAX_EXPONENT} to 1e{MAX_EXPONENT}, got {weight!r}"
        )
    if exact < 0:
        raise InvalidArgumentError(f"weights[{key!r}] must be at least 0, got {weight}. Use 0 to leave the source out")
    return exact


def reduced(parts: tuple[int, ...]) -> tuple[int, ...]:
    divisor = math.gcd(*parts)
    return tuple(part // divisor for part in parts)


Weights: TypeAlias = Sequence[Weight] | Mapping[str, Weight]

MAX_RAMP = 1 << 31


@dataclass(frozen=True)
class Ramp:
    """Linear change of a mixture's weights, as a value of a Schedule.

        Schedule({0: {"web": 0.7, "code": 0.3}, 50_000: Ramp({"web": 0.5, "code": 0.5}, over=10_000)})

    Each source's share of all weights changes linearly to its share in `to`, and stays there. Here the share of "web"
    is 0.7 at position 50,000, 0.6 at 55,000, and 0.5 from 60,000 on.
    """

    to: Weights
    """Weights at the ramp's end."""
    over: int
    """Length in the unit of the Schedule's positions. The ramp ends before the next position, or at it."""
    start: Weights | None = None
    """Weights at the ramp's beginning; None: the weights that the Schedule has before the ramp."""


class Schedule:
    """Weights of a Mixture by position, for its argument `weights`.

        Mixture({"web": web, "code": code}, Schedule({0: {"web": 0.7, "code": 0.3}, 50_000: {"code": 1}}))

    Weights apply until the next position. A source of weight 0 is not read, and continues later where it stopped.
    """

    def __init__(self, changes: Mapping[int, Weights | Ramp], *, rows_per_step: int = 1) -> None:
        """
        Args:
            changes: dict from ascending positions, the first 0, to weights or a Ramp. A position is the number of
                samples that the mixture has given before, on all boxes; a mixture inside another one counts its own.
            rows_per_step: unit of the positions, in samples. Give the number of samples in a global batch, for
                positions in steps of the training loop.

        Raises InvalidArgumentError for invalid arguments. Weights are checked by Mixture.
        """
        if not isinstance(changes, Mapping) or not changes:
            raise InvalidArgumentError(f"Schedule needs a dict from positions to weights, got {changes!r:.200}")
        unit, before = at_least_one("rows_per_step", rows_per_step), -1
        found: dict[int, Weights | Ramp] = {}
        for given, weights in changes.items():
            position = _position(given, unit)
            if before < 0 and position:
                raise InvalidArgumentError(f"the first position of a Schedule must be 0, got {position}")
            if position <= before:
                raise InvalidArgumentError(f"the positions of a Schedule must ascend, got {position} after {before}")
            found[position * unit], before = weights, position
        self._changes, self._unit = found, unit

    def __repr__(self) -> str:
        return f"Schedule({self._changes!r})"

    def segments(self, names: Sequence[str]) -> tuple[Segment, ...]:
        found: list[Segment] = []
        positions = [*self._changes]
        for position, end in zip(positions, [*positions[1:], None], strict=True):
            given, where = self._changes[position], f"the weights of a Schedule at position {position // self._unit}"
            if not isinstance(given, Ramp):
                found.append(Segment(position, _parts(given, names, where)))
                continue
            over = self._length(given, position, end)
            if given.start is not None:
                begin = _parts(given.start, names, f"{where}, start of the Ramp")
            elif found:
                begin = found[-1].parts
            else:
                raise InvalidArgumentError("a Ramp at position 0 needs weights to begin with. Give Ramp(..., start=)")
            parts = _parts(given.to, names, f"{where}, end of the Ramp")
            found.append(Segment(position, parts, over, begin))
            if position + over != end:
                found.append(Segment(position + over, parts))
        return tuple(found)

    def _length(self, ramp: Ramp, position: int, end: int | None) -> int:
        over = at_least_one("Ramp(over=)", ramp.over)
        if end is not None and position + over * self._unit > end:
            raise InvalidArgumentError(
                f"the Ramp at position {position // self._unit} must end at most at {end // self._unit}, got {over=}"
            )
        if over * self._unit > MAX_RAMP:
            raise InvalidArgumentError(f"a Ramp must be at most {MAX_RAMP:,} samples long, got {over * self._unit:,}")
        return over * self._unit


@dataclass(frozen=True)
class Segment:
    """Part of a mixture's order, in which the weights are constant or change by one ramp."""

    start: int
    parts: tuple[int, ...]
    """Weight of each source as a whole number; for a ramp, the weights at its end."""
    over: int = 0
    """Length of the ramp in samples; 0 without one. A change during the run may cut it short."""
    begin: tuple[int, ...] = ()
    """Weights at the beginning of the ramp; empty without one."""

    def with_more(self, parts: tuple[int, ...]) -> Segment:
        begin = (*self.begin, *parts) if self.over else ()
        return replace(self, parts=(*self.parts, *parts), begin=begin)

    def described(self) -> dict[str, Any]:
        ramp = {"over": self.over, "begin": list(self.begin)} if self.over else {}
        return {"start": self.start, "parts": list(self.parts), **ramp}


def segments_of(weights: Weights | Schedule, names: Sequence[str]) -> tuple[Segment, ...]:
    if isinstance(weights, Schedule):
        return weights.segments(names)
    return (Segment(0, _parts(weights, names, "the weights")),)


def _parts(weights: Any, names: Sequence[str], where: str) -> tuple[int, ...]:
    keys = names if isinstance(weights, Mapping) else None
    if isinstance(weights, Mapping):
        unknown = [name for name in weights if name not in names]
        if unknown:
            raise InvalidArgumentError(
                f"{where} must name sources of the Mixture ({', '.join(names)}), got {unknown[0]!r}"
            )
        weights = [weights.get(name, 0) for name in names]
    elif isinstance(weights, str) or not isinstance(weights, Sized) or len(weights) != len(names):
        count = f"a {type(weights).__name__}"
        if isinstance(weights, Sized) and not isinstance(weights, str):
            count = f"{len(weights)} weights"
        raise InvalidArgumentError(f"{where} must be one weight for each of {len(names)} sources, got {count}")
    try:
        return parts_of(weights, keys)
    except InvalidArgumentError as error:
        if where == "the weights":
            raise
        raise InvalidArgumentError(f"{where}: {error}") from None


def _position(given: Any, unit: int) -> int:
    position: int | None = whole("a position of a Schedule", given)
    if isinstance(given, bool) or position is None or not 0 <= position * unit < NUMBER_LIMIT:
        raise InvalidArgumentError(
            f"a position of a Schedule must be from 0 to {(NUMBER_LIMIT - 1) // unit}, got {given!r}"
        )
    return position


def with_later_weights(was: Any, now: Any, position: int, inner: int) -> Any:
    """Return a state's description `was`, with weights and added sources from `now` for each mixture that yields the
    same samples before the saved position by both: a run may be resumed with a Schedule that has other weights later,
    or with more sources of weight 0 until then, or without the data of a source that has none from then on. All other
    differences stay. A damaged description raises KeyError, TypeError or AttributeError.

    `position`: first that no worker has reached, for a mixture that the loader takes directly or through Mapped.
    `inner`: upper bound of it for a mixture inside another one, which counts its own samples.
    """
    if not isinstance(was, Mapping) or not isinstance(now, Mapping) or was.get("kind") != now.get("kind"):
        return was
    if was["kind"] == "Mapped" and was.get("skip_failures") == 0:
        if was.get("random") and depth_of(was) != depth_of(now):  # the function's random numbers depend on the depth
            return was
        return {**was, "source": with_later_weights(was.get("source"), now.get("source"), position, inner)}
    if was["kind"] != "Mixture":
        return was
    first, second = was["sources"], now["sources"]
    if len(first) > len(second):
        return was
    sources = [
        new
        if _is_unreadable(new) and not _is_read(now, number, position)
        else with_later_weights(old, new, inner, inner)
        for number, (old, new) in enumerate(zip(first, second, strict=False))
    ]
    found, count = {**was, "sources": sources}, len(second)
    if _before(was, position, count) != _before(now, position, count):
        return found
    changed = {name: value for name, value in found.items() if name not in ("parts", "schedule")}
    weights = {name: now[name] for name in ("parts", "schedule") if name in now}
    return {**changed, **weights, "sources": [*sources, *second[len(first) :]]}


def _is_unreadable(described: Any) -> bool:
    """Return True if the data of a described source are gone."""
    below = [*described.get("sources", ()), *([described["source"]] if "source" in described else [])]
    return UNREADABLE in described or any(map(_is_unreadable, below))


def _is_read(described: Mapping[str, Any], source: int, position: int) -> bool:
    """Return True if a Mixture gives a source a weight at `position` or later."""
    segments = _segments(described)
    ends = [segment["start"] for segment in segments[1:]] + [NUMBER_LIMIT]
    return any(
        part
        for segment, end in zip(segments, ends, strict=True)
        if end > position
        for name in ("parts", "begin")
        for part in segment.get(name, ())[source : source + 1]
    )


def _segments(described: Mapping[str, Any]) -> Any:
    return described.get("schedule") or [{"start": 0, "parts": described.get("parts") or []}]


def _before(described: Mapping[str, Any], position: int, count: int) -> list[Any]:
    """Return the segments that begin before `position`, with weights of `count` sources, 0 for added ones."""
    return [
        {
            name: [*value, *([0] * (count - len(value)))] if name in ("parts", "begin") else value
            for name, value in segment.items()
        }
        for segment in _segments(described)
        if segment["start"] < position
    ]
