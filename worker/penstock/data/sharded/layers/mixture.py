"""Mixture of several sources by weight. Which source a sample comes from is a function of its position
(mixture_order.py), so no change of topology resets a counter; for shares of tokens, each shard counts tokens by source.
Each source gets its own seed; otherwise two that read the same data would give the same order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal, get_args

import numpy as np
import torch

from penstock.data.arguments import one_of
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.layers.layer import NUMBER_LIMIT, checked, entered, position_function
from penstock.data.sharded.layers.mixture_order import MixtureShares, Phase, SegmentedOrder, order_of, shares_of
from penstock.data.sharded.layers.mixture_schedule import Schedule, Segment, Weights, segments_of
from penstock.data.sharded.layers.repeated import Repeated
from penstock.data.sharded.protocol import (
    NOWHERE,
    Cursor,
    Origin,
    PositionOf,
    SavedPosition,
    ShardedSource,
    cursor_origin,
)
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateCorruptError
from penstock.proto.state.generators import derive_seed

Stop = Literal["never", "first", "last"]
By = Literal["samples", "tokens"]

AT_ONCE = 1 << 14
"""Most samples that are skipped at once, which limits the memory for their sources' numbers."""
FEW = 16
"""Most samples that are skipped one by one (1 us each); an array computation takes 40 us for any number."""


class Mixture:
    """Layer that mixes the samples of several sources by weight.

        Mixture({"code": code, "text": text}, {"code": 0.3, "text": 0.7})

    In every prefix of a ShardLoader's order, each source's number of samples deviates from its share by less than one;
    with stop="first" or "last" in every prefix before the first end of a source or shard. This is only approximate if
    the mixture is the source of another mixture, or of a layer that changes the number of samples or reads ahead. So
    apply Packed and WindowShuffled to the sources, and make one mixture with products of weights instead of nested
    ones. Below a Packed, use `by="tokens"`; otherwise sources of long documents get more than their share.

    Pass a Schedule for weights that change in the course of a run. The deviation is then counted from the latest change
    of weights, and is below 9/4 samples within a Ramp.
    """

    keyed = True

    def __init__(
        self,
        sources: Sequence[ShardedSource] | Mapping[str, ShardedSource],
        weights: Weights | Schedule,
        *,
        stop: Stop = "never",
        by: By = "samples",
        names: Sequence[str] | None = None,
    ) -> None:
        """
        Args:
            sources: sources with the same number of shards: a list, or a dict from names to sources.
            weights: list with one weight for each source, at least 0, or by name a dict, where a missing name has
                weight 0. Only their ratio matters: [7, 3] and [0.7, 0.3] are the same. A source of weight 0 is never
                read. A Schedule gives weights by position, and needs stop="never". Weights become whole numbers
                (parts), exactly (0.1 is a tenth) if these sum up to at most 65,536; otherwise they are rounded to that
                sum. States contain the parts.
            stop: what happens when a source has no more samples in a shard. "never": finite sources are repeated,
                independently. "first": the shard of the mixture ends where its next sample would come from that source.
                "last": the samples come from the other sources, by their weights, until all have ended in this shard.
            by: unit of the weights. "samples": shares of samples. "tokens": shares of tokens; samples must be documents
                (tensors, arrays or lists of integers with one dimension), which are yielded whole. In every prefix of a
                shard, a source's number of tokens deviates from its share by at most the longest document. One document
                of each source is read ahead.
            names: name of each source in counts (see `Counts`) and in weights, which decides nothing else; None: the
                names in `sources` if it is a dict, otherwise their numbers.
        """
        one_of("stop", stop, get_args(Stop))
        one_of("by", by, get_args(By))
        if isinstance(sources, Mapping):
            if names is not None:
                raise InvalidArgumentError("names must be left out if the sources are a dict")
            names, sources = [*sources], [*sources.values()]
        if not isinstance(sources, Sized) or not isinstance(weights, Sized | Schedule):
            raise InvalidArgumentError(
                f"Mixture needs two lists or dicts, got a {type(sources).__name__} and a {type(weights).__name__}"
            )
        if not sources:
            raise InvalidArgumentError("Mixture needs at least one source, got none. Pass a list with sources")
        count = len(sources) if isinstance(weights, Mapping | Schedule) else len(weights)
        if count != len(sources):
            raise InvalidArgumentError(f"Mixture needs one weight for each of {len(sources)} sources, got {count}")
        shards = [checked(source, "Mixture").num_shards for source in sources]
        if len(set(shards)) > 1:
            raise InvalidArgumentError(f"the sources of a Mixture must have the same number of shards, got {shards}")
        endless = [number for number, source in enumerate(sources) if source.endless]
        if endless and stop != "never":
            raise InvalidArgumentError(
                f"stop={stop!r} needs finite sources, got sources[{endless[0]}]. Put Repeated around the Mixture"
            )
        self.stop, self.by = stop, by
        self.names = _checked_names(names, len(sources))
        self._segments = segments_of(weights, self.names)
        if self.changes and stop != "never":
            raise InvalidArgumentError(f"a Schedule needs stop='never', got {stop!r}")
        self.parts = self._segments[0].parts
        self.sources = [Repeated(source) if stop == "never" and not source.endless else source for source in sources]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._weights().items())
        return f"Mixture({self.sources!r}, {given}, stop={self.stop!r}, by={self.by!r})"

    @property
    def num_shards(self) -> int:
        return self.sources[0].num_shards

    @property
    def endless(self) -> bool:
        return self.stop == "never"

    def described(self) -> dict[str, Any]:
        return {
            "kind": "Mixture",
            **self._weights(),
            "stop": self.stop,
            **({"by": self.by} if self.by != "samples" else {}),
            "sources": [source.described() for source in self.sources],
        }

    def _weights(self) -> dict[str, Any]:
        if self.changes:
            return {"schedule": [segment.described() for segment in self._segments]}
        return {"parts": list(self.parts)}

    def lengths(self, epoch: int) -> Sequence[int] | None:
        if self.stop != "last":
            return None
        total = np.zeros(self.num_shards, np.int64)
        for source, part in zip(self.sources, self.parts, strict=True):
            lengths = source.lengths(epoch) if part else np.zeros(self.num_shards, np.int64)
            if lengths is None:
                return None
            total += np.asarray(lengths, np.int64)
        return total.tolist()

    def open(
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        (index,), _ = entered(saved, "Mixture", "index")
        below, ended = members_of(saved, len(self.sources))

        def opened(number: int, saved: SavedPosition) -> Cursor:
            own = derive_seed(seed, "mixture", number)
            return self.sources[number].open(shard, epoch, own, saved)

        members = MixtureMembers(opened, below)
        if self.by == "tokens":
            at = position_function(position_of, shard, self.num_shards)
            return ByTokens(self, members, at, ended, index, saved, f"shard {shard} in epoch {epoch}")
        return _Cursor(self, members, _Positions(position_of, shard, self.num_shards), ended, index)

    @property
    def order(self) -> SegmentedOrder:
        return order_of(self._segments)

    def wanted(self, position: int = 0) -> list[float]:
        """Return each source's share of all weights at a position: 0.7 and 0.3 for weights 7 and 3."""
        return self.order.shares(position)

    def wanted_by_name(self, position: int) -> dict[str, float]:
        return dict(zip(self.names, self.wanted(position), strict=True))

    def parts_at(self, position: int) -> tuple[int, ...]:
        return [segment for segment in self._segments if segment.start <= position][-1].parts

    def changed_from(self, position: int, parts: Mapping[str, int], added: Mapping[str, ShardedSource]) -> Mixture:
        """Return a copy with the weights `parts` (a missing name means 0) and the sources `added` from `position` on.
        Before it, the order is the same; later changes, and the rest of a ramp, are dropped."""
        found = copy.copy(self)
        found.names = _checked_names([*self.names, *added], len(self.names) + len(added))
        unknown = [name for name in parts if name not in found.names]
        if unknown:
            raise InvalidArgumentError(
                f"changed weights must name sources of the Mixture ({', '.join(found.names)}), got {', '.join(unknown)}"
            )
        if not any(parts.values()):
            raise InvalidArgumentError(f"one of the changed weights must be above 0, got {dict(parts)}")
        for name, source in added.items():
            if source.num_shards != self.num_shards:
                raise InvalidArgumentError(
                    f"the added source {name!r} must have {self.num_shards} shards, got {source.num_shards}"
                )
        found.sources = [*self.sources, *(one if one.endless else Repeated(one) for one in added.values())]
        more = (0,) * len(added)
        kept = [segment.with_more(more) for segment in self._segments if segment.start < position]
        found._segments = (*kept, Segment(position, tuple(parts.get(name, 0) for name in found.names)))
        found.parts = found._segments[0].parts
        return found

    @property
    def changes(self) -> bool:
        return len(self._segments) > 1


def _checked_names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if names is None:
        return tuple(map(str, range(count)))
    found = () if isinstance(names, str) else tuple(names)
    if len(set(found)) != count or not all(isinstance(name, str) and name and "/" not in name for name in found):
        raise InvalidArgumentError(
            f"the names of a Mixture's sources must be {count} different texts without '/', got {names!r:.200}"
        )
    return found


class _Positions:
    def __init__(self, position_of: PositionOf | None, shard: int, shards: int) -> None:
        self._given, self._shard, self._shards = position_of, shard, shards
        self.at = position_function(position_of, shard, shards)

    def many(self, first: int, count: int) -> Ints:
        if self._given is None:
            return np.arange(first, first + count) * self._shards + self._shard
        return np.fromiter(map(self._given, range(first, first + count)), np.int64, count)


class _Cursor(Iterator[Any]):
    def __init__(
        self, mixture: Mixture, members: MixtureMembers, positions: _Positions, ended: set[int], index: int
    ) -> None:
        self._members, self._positions, self._ended, self._index = members, positions, ended, index
        self._parts, self._stop, self._names = mixture.parts, mixture.stop, mixture.names
        self._order = mixture.order if mixture.changes else shares_of(mixture.parts)
        self._last = 0
        self._schedule = self._live_schedule()

    def __next__(self) -> Any:
        while self._schedule is not None:
            number = self._schedule.at(self._positions.at(self._index))
            for sample in self._members.moving(number):
                self._index += 1
                self._last = number
                return sample
            self._end(number)
        raise StopIteration

    @property
    def origin(self) -> Origin:
        return cursor_origin(self._members.moving(self._last)).within(self._names[self._last])

    def skip(self, count: int) -> int:
        left = count
        while left and self._schedule is not None:
            left -= self._skip_some(1 if left <= FEW else min(left, AT_ONCE), self._schedule)
        return count - left

    def saved_position(self) -> SavedPosition:
        return {"index": self._index, "ended": sorted(self._ended), "sources": self._members.saved_positions()}

    def close(self) -> None:
        self._members.close()

    def _skip_some(self, count: int, schedule: MixtureShares | SegmentedOrder) -> int:
        """Skip up to `count` samples, to the first one whose source has ended. Return how many."""
        if count == 1:
            number = schedule.at(self._positions.at(self._index))
            passed = self._members.moving(number).skip(1)
            if not passed:
                self._end(number)
            self._index += passed
            return passed
        order = schedule.many(self._positions.many(self._index, count))
        before = self._members.saved_positions() if self._stop != "never" else []
        passed, ending = self._skip_each(order), None
        if passed < count and self._stop == "never":
            self._end(int(order[passed]))
        if passed < count:  # other sources have skipped samples after the position where the schedule changes: go back
            ending = int(order[passed])
            self._members.restore(before)
            self._skip_each(order[:passed])
        self._index += passed
        if ending is not None:
            self._end(ending)
        return passed

    def _skip_each(self, order: Ints) -> int:
        """Skip a sample of each source in `order`, up to the first that lacks one; other cursors may have skipped
        more."""
        whole = len(order)
        for number, turns in enumerate(np.bincount(order, minlength=len(self._parts)).tolist()):
            if turns and (passed := self._members.moving(number).skip(turns)) < turns:
                whole = min(whole, int(np.flatnonzero(order == number)[passed]))
        return whole

    def _end(self, number: int) -> None:
        if self._stop == "never":
            raise ended_early(number)
        self._ended.add(number)
        self._members.drop(number)
        self._schedule = self._live_schedule()

    def _live_schedule(self) -> MixtureShares | SegmentedOrder | None:
        """Return the order from now on, with weight 0 for ended sources; None if the mixture has ended."""
        if not self._ended:
            return self._order
        live = tuple(0 if number in self._ended else part for number, part in enumerate(self._parts))
        return shares_of(live) if any(live) and self._stop != "first" else None


def ended_early(number: int) -> DatasetError:
    return DatasetError(
        f"sources[{number}] of a Mixture must be endless, as its attribute `endless` says, but has ended. Set the "
        "attribute to False, so that the Mixture repeats the source"
    )


def members_of(saved: SavedPosition, count: int) -> tuple[list[SavedPosition], set[int]]:
    """Return each source's saved position, None if it was added later, and the numbers of ended ones."""
    if saved is None:
        return [None] * count, set()
    below, ended = saved.get("sources"), saved.get("ended")
    if isinstance(below, list) and len(below) <= count and isinstance(ended, list):
        numbers = {number for number in ended if type(number) is int and 0 <= number < count}
        if len(numbers) == len(ended):
            return [*below, *([None] * (count - len(below)))], numbers
    raise StateCorruptError(f"the saved position of a Mixture of {count} sources is damaged: {saved!r:.200}")


class MixtureMembers:
    """Cursors of a mixture's sources in one shard. `saved_positions` asks only those that may have moved."""

    def __init__(self, opened: Callable[[int, SavedPosition], Cursor], saved: Sequence[SavedPosition]) -> None:
        self._opened, self._saved = opened, list(saved)
        self._cursors: dict[int, Cursor] = {}
        self._moved: set[int] = set()

    def moving(self, number: int) -> Cursor:
        if number not in self._cursors:
            self._cursors[number] = self._opened(number, self._saved[number])
        self._moved.add(number)
        return self._cursors[number]

    def saved_positions(self) -> list[SavedPosition]:
        for number in self._moved:
            self._saved[number] = self._cursors[number].saved_position()
        self._moved.clear()
        return self._saved.copy()

    def restore(self, saved: Sequence[SavedPosition]) -> None:
        self.close()
        self._saved = list(saved)

    def drop(self, number: int) -> None:
        cursor = self._cursors.pop(number, None)
        if cursor is not None:
            cursor.close()
        self._moved.discard(number)
        self._saved[number] = None

    def close(self) -> None:
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()
        self._moved.clear()


def _given_of(saved: SavedPosition, count: int, phase: Phase) -> list[int]:
    """Return the tokens that each source has given in a phase; zeros for another phase, and for added sources."""
    if saved is None:
        return [0] * count
    given, begun = saved.get("given"), saved.get("piece", [0, 0])
    least = -NUMBER_LIMIT if "piece" in saved else -1
    if (
        isinstance(given, list)
        and len(given) <= count
        and all(type(n) is int and least < n < NUMBER_LIMIT for n in given)
        and isinstance(begun, list)
    ):
        # The counts are those of another phase if the Schedule was changed after the position was saved.
        kept = given if begun == [phase.segment, phase.start] else []
        return [*kept, *([0] * (count - len(kept)))]
    raise StateCorruptError(f"the saved position of a Mixture(by='tokens') is damaged: {saved!r:.200}")


def _carried(given: Sequence[int], parts: Sequence[int]) -> list[int]:
    """Return by how many tokens each source exceeds its share, which is rounded down."""
    total, whole = sum(given), sum(parts)
    return [had - part * total // whole for had, part in zip(given, parts, strict=True)]


class ByTokens(Iterator[Any]):
    """Cursor of one shard of a mixture whose weights are shares of tokens.

    Documents are yielded whole. A source is eligible if its tokens do not exceed its share of all tokens so far. The
    next document comes from the eligible source whose next document would finish first in a mixture of single tokens.
    This is worst-case fair weighted fair queueing (J. Bennett and H. Zhang, "WF2Q", INFOCOM 1996), whose deviation is
    at most the longest document for any number of sources; to choose the source that lacks most tokens has one that
    grows with it. The choice needs lengths, so one document of each source is read ahead; the saved position lies
    before it.

    Counts of tokens begin at 0 with each phase, except that between two steps of a ramp a source keeps what it has
    beyond its share, or lacks.
    """

    def __init__(
        self,
        mixture: Mixture,
        members: MixtureMembers,
        position_of: PositionOf,
        ended: set[int],
        index: int,
        saved: SavedPosition,
        where: str,
    ) -> None:
        self._members, self._position_of, self._ended, self._index = members, position_of, ended, index
        self._order, self._changes, self._stop, self._names = (
            mixture.order,
            mixture.changes,
            mixture.stop,
            mixture.names,
        )
        self._where = where
        self._phase = self._phase_of(index - 1 if saved is not None and index else index)
        """Of the last document. Set with the next one, so that no saved position depends on later weights."""
        self._parts, self._given = self._phase.parts, _given_of(saved, len(self._names), self._phase)
        self._next: dict[int, tuple[int, Any, SavedPosition, Origin]] = {}
        """By source: the document read ahead, as (tokens, document, saved position before it, origin)."""
        self.origin = NOWHERE
        self._over = False

    def __next__(self) -> Any:
        number = self._due()
        if number is None:
            raise StopIteration
        return self._take(number)

    def skip(self, count: int) -> int:
        for passed in range(count):
            number = self._due()
            if number is None:
                return passed
            self._take(number)
        return count

    def saved_position(self) -> SavedPosition:
        below = self._members.saved_positions()
        for number, (_, _, before, _) in self._next.items():
            below[number] = before
        phase = {"piece": [self._phase.segment, self._phase.start]} if self._changes else {}
        found = {"index": self._index, "ended": sorted(self._ended), "given": self._given.copy(), "sources": below}
        return {**found, **phase}

    def close(self) -> None:
        self._next.clear()
        self._over = True
        self._members.close()

    def _phase_of(self, index: int) -> Phase:
        return self._order.phase(self._position_of(index) if self._changes else 0)

    def _take(self, number: int) -> Any:
        length, document, _, origin = self._next.pop(number)
        self.origin = origin.within(self._names[number])
        self._given[number] += length
        self._index += 1
        return document

    def _enter(self, phase: Phase) -> None:
        if phase == self._phase:
            return
        joined = phase.segment == self._phase.segment
        self._given = _carried(self._given, self._parts) if joined else [0] * len(self._given)
        self._phase, self._parts = phase, phase.parts

    def _due(self) -> int | None:
        """Return the source of the next document; None if the shard has ended."""
        if self._changes:
            self._enter(self._phase_of(self._index))
        while not self._over:
            live = [number for number, part in enumerate(self._parts) if part and number not in self._ended]
            missing = [number for number in live if number not in self._next and not self._read(number)]
            if missing and self._stop == "last":
                self._end(missing)
            elif live and (best := self._first_due(live)) in self._next:
                return best
            else:
                self._over = True
        return None

    def _first_due(self, live: list[int]) -> int:
        whole, total = sum(self._parts[number] for number in live), sum(self._given[number] for number in live)
        best, due = -1, 0
        for number in live:
            given, part = self._given[number], self._parts[number]
            if given * whole > part * total:
                continue  # the source has given more than its share
            until = given + (self._next[number][0] if number in self._next else 0)
            if best < 0 or until * self._parts[best] < due * part:
                best, due = number, until
        return best

    def _read(self, number: int) -> bool:
        cursor = self._members.moving(number)
        before = cursor.saved_position()
        for document in cursor:
            self._next[number] = (self._length(document, number), document, before, cursor_origin(cursor))
            return True
        if self._stop == "never":
            raise ended_early(number)
        return False

    def _end(self, numbers: list[int]) -> None:
        """From now on all documents come from the other sources, whose tokens are counted from 0 again."""
        for number in numbers:
            self._ended.add(number)
            self._members.drop(number)
        self._given = [0] * len(self._given)

    def _length(self, document: Any, number: int) -> int:
        if isinstance(document, (torch.Tensor, np.ndarray)) and document.ndim == 1:
            return len(document)
        if isinstance(document, (list, tuple)):
            return len(document)
        kind = type(document).__name__
        if isinstance(document, (torch.Tensor, np.ndarray)):
            kind += f" of shape {tuple(document.shape)}"
        raise DatasetError(
            f"sources[{number}] of a Mixture(by='tokens'), {self._where}: samples must be lists of tokens, got {kind}"
        )
