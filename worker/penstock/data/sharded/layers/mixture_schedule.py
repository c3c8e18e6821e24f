"""Weights of a mixture that change with the position: `Schedule` and `Ramp`, which users write, and the segments of the
mixture's order that are made from them.

A position is the number of samples that the mixture has given before, in all shards and on all boxes. So the same
sample has the same weights on any number of boxes and workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from penstock.data.arguments import at_least_one, whole
from penstock.data.sharded.layers.layer import NUMBER_LIMIT
from penstock.data.sharded.layers.mixture_shares import Weight, parts_of
from penstock.proto.errors import InvalidArgumentError

__all__ = ["MAX_RAMP", "Ramp", "Schedule", "Segment", "Weights", "segments_of"]

Weights: TypeAlias = Sequence[Weight] | Mapping[str, Weight]
"""Weights of the sources: a list in the order of the sources, or a dict by their names; a name that is left out has
weight 0."""

MAX_RAMP = 1 << 31
"""Largest number of samples of a ramp. A ramp of this length has 32,768 steps."""


@dataclass(frozen=True)
class Ramp:
    """Linear change of a mixture's weights, as a value of a Schedule.

        Schedule({0: {"web": 0.7, "code": 0.3}, 50_000: Ramp({"web": 0.5, "code": 0.5}, over=10_000)})

    Each source's share of all weights changes linearly, from its share before the ramp to its share in `to`. After the
    ramp it stays. Here the share of "web" is 0.7 at position 50,000, 0.6 at 55,000, and 0.5 from 60,000 on.
    """

    to: Weights
    """Weights at the ramp's end."""
    over: int
    """Length of the ramp, in the unit of the Schedule's positions. The ramp must end before the Schedule's next
    position, or at it."""
    start: Weights | None = None
    """Weights at the ramp's beginning; None: the weights that the Schedule has before the ramp."""


class Schedule:
    """Weights of a Mixture by position, for its argument `weights`.

        Mixture({"web": web, "code": code}, Schedule({0: {"web": 0.7, "code": 0.3}, 50_000: {"code": 1}}))

    The weights of each position apply from there to the next position. A source is not read while its weight is 0, and
    continues later where it stopped.
    """

    def __init__(self, changes: Mapping[int, Weights | Ramp], *, rows_per_step: int = 1) -> None:
        """
        Args:
            changes: dict from positions to weights or a Ramp. The first position is 0, and the others ascend. A
                position is the number of samples that the mixture has given before, on all boxes together. A mixture
                inside another one counts its own samples.
            rows_per_step: unit of the positions, in samples. Give the number of samples in a global batch, for
                positions in steps of the training loop.

        Raises InvalidArgumentError for invalid arguments. Weights are checked by Mixture.
        """
        if not isinstance(changes, Mapping) or not changes:
            raise InvalidArgumentError(
                "Schedule needs a dict from positions to weights, such as {0: {'web': 0.7, 'code': 0.3}, 50_000: "
                f"{{'code': 1}}}}, got {changes!r:.200}. Pass such a dict"
            )
        unit, before = at_least_one("rows_per_step", rows_per_step), -1
        found: dict[int, Weights | Ramp] = {}
        for given, weights in changes.items():
            position = _position(given, unit)
            if before < 0 and position:
                raise InvalidArgumentError(
                    f"the first position of a Schedule must be 0, got {position}. Give the weights from the beginning"
                )
            if position <= before:
                raise InvalidArgumentError(
                    f"the positions of a Schedule must ascend, got {position} after {before}. Sort the positions"
                )
            found[position * unit], before = weights, position
        self._changes, self._unit = found, unit

    def __repr__(self) -> str:
        return f"Schedule({self._changes!r})"

    def segments(self, names: Sequence[str]) -> tuple[Segment, ...]:
        """Return the segments that these weights and ramps mean, by ascending position. Raises InvalidArgumentError for
        invalid ones. `names`: names of the mixture's sources, in their order."""
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
                raise InvalidArgumentError(
                    "a Ramp at position 0 of a Schedule must have weights to begin with, got start=None. Give "
                    "Ramp(..., start=)"
                )
            parts = _parts(given.to, names, f"{where}, end of the Ramp")
            found.append(Segment(position, parts, over, begin))
            if position + over != end:
                found.append(Segment(position + over, parts))
        return tuple(found)

    def _length(self, ramp: Ramp, position: int, end: int | None) -> int:
        over = at_least_one("Ramp(over=)", ramp.over)
        if end is not None and position + over * self._unit > end:
            raise InvalidArgumentError(
                f"the Ramp at position {position // self._unit} of a Schedule must end at or before the next position, "
                f"{end // self._unit}, got over={over}. Make it at most {(end - position) // self._unit} long"
            )
        if over * self._unit > MAX_RAMP:
            raise InvalidArgumentError(
                f"a Ramp must be at most {MAX_RAMP:,} samples long, got {over * self._unit:,}. Divide it into several"
            )
        return over * self._unit


@dataclass(frozen=True)
class Segment:
    """Part of a mixture's order, from its first position to the next segment, in which the weights are constant or
    change by one ramp."""

    start: int
    """Position of the segment's first sample."""
    parts: tuple[int, ...]
    """Weight of each source as a whole number; for a ramp, the weights at its end."""
    over: int = 0
    """Length of the ramp in samples; 0 if the weights are constant. The next segment may begin before the ramp's end,
    if the weights were changed during the run."""
    begin: tuple[int, ...] = ()
    """Weight of each source at the beginning of the ramp, as a whole number; empty if the weights are constant."""

    def with_more(self, parts: tuple[int, ...]) -> Segment:
        """Return a copy of the segment for a mixture with more sources. `parts`: weights of the added sources in this
        segment, as whole numbers."""
        begin = (*self.begin, *parts) if self.over else ()
        return replace(self, parts=(*self.parts, *parts), begin=begin)

    def described(self) -> dict[str, Any]:
        """Return the segment as a JSON value, for the mixture's description in states."""
        ramp = {"over": self.over, "begin": list(self.begin)} if self.over else {}
        return {"start": self.start, "parts": list(self.parts), **ramp}


def segments_of(weights: Weights | Schedule, names: Sequence[str]) -> tuple[Segment, ...]:
    """Return the segments that the argument `weights` of a Mixture means: one segment for constant weights. Raises
    InvalidArgumentError for invalid weights. `names`: names of the mixture's sources, in their order."""
    if isinstance(weights, Schedule):
        return weights.segments(names)
    return (Segment(0, _parts(weights, names, "the weights")),)


def _parts(weights: Any, names: Sequence[str], where: str) -> tuple[int, ...]:
    keys = names if isinstance(weights, Mapping) else None
    if isinstance(weights, Mapping):
        unknown = [name for name in weights if name not in names]
        if unknown:
            raise InvalidArgumentError(
                f"{where} must name sources of the Mixture ({', '.join(names)}), got {unknown[0]!r}. Correct the name"
            )
        weights = [weights.get(name, 0) for name in names]
    elif isinstance(weights, str) or not isinstance(weights, Sized) or len(weights) != len(names):
        count = f"a {type(weights).__name__}"
        if isinstance(weights, Sized) and not isinstance(weights, str):
            count = f"{len(weights)} weights"
        raise InvalidArgumentError(
            f"{where} must be one weight for each of {len(names)} sources, got {count}. Pass as many weights as sources"
        )
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
            f"a position of a Schedule must be a whole number >= 0, at most {(NUMBER_LIMIT - 1) // unit}, got "
            f"{given!r}. Correct the position"
        )
    return position
