"""Mixture of several sources by weight. In every prefix of its order, each source has its share of the samples.

Which source a sample comes from is a function of the sample's position among the samples of all shards. The function
for constant weights is in mixture_shares.py, for weights that change in mixture_order.py. So there is no counter that a
change of topology could reset. In each shard, the number of samples that a source has given is part of that source's
saved position.

If the weights are shares of tokens, the order also depends on the lengths of documents, so each shard counts the tokens
of each source (mixture_by_tokens.py).

Each source gets its own seed. Otherwise two sources that read the same data would give the same samples in the same
order.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Literal, get_args

import numpy as np

from penstock.data.arguments import one_of
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.layers.layer import checked, entered, position_function
from penstock.data.sharded.layers.mixture_by_tokens import ByTokens, TokenWeights
from penstock.data.sharded.layers.mixture_members import MixtureMembers, ended_early, members_of
from penstock.data.sharded.layers.mixture_order import SegmentedOrder, order_of
from penstock.data.sharded.layers.mixture_schedule import Schedule, Segment, Weights, segments_of
from penstock.data.sharded.layers.mixture_shares import MixtureShares, shares_of
from penstock.data.sharded.layers.repeated import Repeated
from penstock.data.sharded.protocol import Cursor, Origin, PositionOf, SavedPosition, ShardedSource, cursor_origin
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.state.generators import derive_seed

__all__ = ["By", "Mixture", "Stop"]

Stop = Literal["never", "first", "last"]
By = Literal["samples", "tokens"]

AT_ONCE = 1 << 14
"""Largest number of samples that are skipped at once, which limits the memory for their sources' numbers."""
FEW = 16
"""Largest number of samples that are skipped one by one, which takes about 1 us each. More are skipped at once, by
computing with arrays, which takes 40 us for any number."""


class Mixture:
    """Layer that mixes the samples of several sources by weight.

        Mixture({"code": code, "text": text}, {"code": 0.3, "text": 0.7})

    In every prefix of a ShardLoader's order, each source's number of samples deviates from its share by less than one;
    with stop="first" or "last" in every prefix before the first end of a source or shard. This holds only approximately
    if the mixture is the source of another mixture, or of a layer that yields more or fewer samples than it takes, or
    that reads ahead. So apply Packed and WindowShuffled to the sources of a mixture and not to the mixture, and make
    one mixture with products of weights instead of nested mixtures. If a mixture is the source of Packed, use
    `by="tokens"`; otherwise sources of long documents get more of the lines than their share.

    Pass a Schedule for weights that change in the course of a run. The deviation is then counted from the latest change
    of weights, and is below 9/4 samples within a Ramp.
    """

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
            weights: list with one weight for each source, at least 0. Only their ratio matters: [7, 3] and [0.7, 0.3]
                are the same. A source of weight 0 is never read. If the sources have names, also a dict from names to
                weights, where a name that is left out has weight 0. A Schedule gives weights by position, and needs
                stop="never". Weights are converted to whole numbers (parts) in the same ratio. The conversion is exact
                (0.1 is a tenth) if the parts sum up to at most 65,536; otherwise they are rounded so that they sum up
                to 65,536. A saved state contains the parts.
            stop: what happens when a source has no more samples in a shard. "never": finite sources are repeated,
                independently of each other. "first": the shard of the mixture ends where its next sample would come
                from that source. "last": the samples come from the other sources, by their weights, until all have
                ended in this shard.
            by: unit of the weights. "samples": shares of samples. "tokens": shares of tokens; the sources' samples must
                be documents (tensors, arrays or lists of integers with one dimension), which are yielded whole. In
                every prefix of a shard, each source's number of tokens then deviates from its share by at most the
                longest document. One document of each source is read ahead.
            names: name of each source in counts (see `Counts`) and in weights; None: the names in `sources` if it is a
                dict, otherwise their numbers. A name decides nothing else.

        Raises InvalidArgumentError for invalid arguments.
        """
        one_of("stop", stop, get_args(Stop))
        one_of("by", by, get_args(By))
        if isinstance(sources, Mapping):
            if names is not None:
                raise InvalidArgumentError(
                    "names must be left out if the sources of a Mixture are a dict. Use its keys as names"
                )
            names, sources = [*sources], [*sources.values()]
        if not isinstance(sources, Sized) or not isinstance(weights, Sized | Schedule):
            raise InvalidArgumentError(
                f"Mixture needs a list of sources and a list of weights, got a {type(sources).__name__} and a "
                f"{type(weights).__name__}. Pass two lists, or two dicts by name"
            )
        if not sources:
            raise InvalidArgumentError("Mixture needs at least one source, got none. Pass a list with sources")
        count = len(sources) if isinstance(weights, Mapping | Schedule) else len(weights)
        if count != len(sources):
            raise InvalidArgumentError(
                f"Mixture needs one weight for each source, got {len(sources)} sources and {count} weights. Pass as "
                "many weights as sources"
            )
        shards = [checked(source, "Mixture").num_shards for source in sources]
        if len(set(shards)) > 1:
            other = next(number for number, count in enumerate(shards) if count != shards[0])
            raise InvalidArgumentError(
                f"the sources of a Mixture must have the same number of shards: sources[0] has {shards[0]}, "
                f"sources[{other}] has {shards[other]}. Pass the same number as `shards` to all of them"
            )
        endless = [number for number, source in enumerate(sources) if source.endless]
        if endless and stop != "never":
            raise InvalidArgumentError(
                f"stop={stop!r} needs finite sources, but sources[{endless[0]}] never ends. Use stop='never'; or, if "
                "the source is a Repeated, leave out this Repeated and put the whole Mixture into Repeated(...)"
            )
        self._stop, self._by = stop, by
        self.names = _checked_names(names, len(sources))
        self._segments = segments_of(weights, self.names)
        if self.changes and stop != "never":
            raise InvalidArgumentError(
                f"a Schedule needs stop='never', got {stop!r}: each epoch of a finite mixture begins at position 0, "
                "so its weights cannot depend on the position in the run. Leave stop out, or give constant weights"
            )
        self._parts = self._segments[0].parts
        self.sources = [Repeated(source) if stop == "never" and not source.endless else source for source in sources]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._weights().items())
        return f"Mixture({self.sources!r}, {given}, stop={self._stop!r}, by={self._by!r})"

    @property
    def num_shards(self) -> int:
        return self.sources[0].num_shards

    @property
    def endless(self) -> bool:
        return self._stop == "never"

    def described(self) -> dict[str, Any]:
        return {
            "kind": "Mixture",
            **self._weights(),
            "stop": self._stop,
            **({"by": self._by} if self._by != "samples" else {}),
            "sources": [source.described() for source in self.sources],
        }

    def _weights(self) -> dict[str, Any]:
        """Return the weights as a JSON value, for the mixture's description in states."""
        if self.changes:
            return {"schedule": [segment.described() for segment in self._segments]}
        return {"parts": list(self._parts)}

    def lengths(self, epoch: int) -> Sequence[int] | None:
        """Return the number of samples in each shard of the mixture: with stop="last" the sum over all sources. Return
        None if the numbers are unknown: with stop="never" shards do not end, with stop="first" the end of a shard
        depends on the order of its samples, and a source may not know its own lengths."""
        if self._stop != "last":
            return None
        total = np.zeros(self.num_shards, np.int64)
        for source, part in zip(self.sources, self._parts, strict=True):
            lengths = source.lengths(epoch) if part else np.zeros(self.num_shards, np.int64)
            if lengths is None:
                return None
            total += np.asarray(lengths, np.int64)
        counts: list[int] = total.tolist()
        return counts

    def open(
        self,
        shard: int,
        epoch: int,
        seed: int,
        saved: SavedPosition | None = None,
        position_of: PositionOf | None = None,
    ) -> Cursor:
        (index,), _ = entered(saved, "Mixture", "index")
        below, ended = members_of(saved, len(self.sources))

        def opened(number: int, saved: SavedPosition | None) -> Cursor:
            own = derive_seed(seed, "mixture", number)
            return self.sources[number].open(shard, epoch, own, saved)

        members, positions = MixtureMembers(opened, below), _Positions(position_of, shard, self.num_shards)
        if self._by == "tokens":
            where = f"shard {shard} in epoch {epoch}"
            weights = TokenWeights(order_of(self._segments), positions.at, self.changes)
            return ByTokens(members, weights, ended, self._stop, index, saved, where, self.names)
        order = order_of(self._segments) if self.changes else shares_of(self._parts)
        return _Cursor(members, order, self._parts, ended, self._stop, index, positions, self.names)

    def wanted(self, position: int = 0) -> list[float]:
        """Return the share that each source's weight has in the sum of all weights at a position: 0.7 and 0.3 for
        weights 7 and 3. `position`: number of samples that the mixture has given before, in all shards."""
        return order_of(self._segments).shares(position)

    def parts_at(self, position: int) -> tuple[int, ...]:
        """Return the weight of each source at a position, as a whole number; within a ramp, its weight at the ramp's
        end. `position`: number of samples that the mixture has given before, in all shards."""
        return [segment for segment in self._segments if segment.start <= position][-1].parts

    def changed_from(self, position: int, parts: Mapping[str, int], added: Mapping[str, ShardedSource]) -> Mixture:
        """Return a copy of this mixture that has other weights from `position` on, and may have more sources. Before
        `position`, its order is the same. Changes of weights that the mixture has after `position` are dropped, and so
        is the rest of a ramp.

        Args:
            position: number of samples that the mixture gives, in all shards, before the new weights apply.
            parts: new weight of each source as a whole number, by name; a name that is left out has weight 0.
            added: sources that the mixture did not have, by name. Their weight before `position` is 0.

        Raises InvalidArgumentError for unknown names, for weights that are all 0, and for an added source with another
        number of shards.
        """
        found = copy.copy(self)
        found.names = _checked_names([*self.names, *added], len(self.names) + len(added))
        unknown = [name for name in parts if name not in found.names]
        if unknown:
            raise InvalidArgumentError(
                f"the changed weights must name sources of the Mixture ({', '.join(found.names)}), got "
                f"{', '.join(unknown)}. Give the Mixture in the code the sources that it had when its weights were "
                "changed"
            )
        if not any(parts.values()):
            raise InvalidArgumentError(
                f"at least one of the changed weights must be above 0, got {dict(parts)}. Load a state from before "
                "this change"
            )
        for name, source in added.items():
            if source.num_shards != self.num_shards:
                raise InvalidArgumentError(
                    f"the added source {name!r} must have {self.num_shards} shards, as the others, got "
                    f"{source.num_shards}. Make it with shards={self.num_shards}"
                )
        found.sources = [*self.sources, *(one if one.endless else Repeated(one) for one in added.values())]
        more = (0,) * len(added)
        kept = [segment.with_more(more) for segment in self._segments if segment.start < position]
        found._segments = (*kept, Segment(position, tuple(parts.get(name, 0) for name in found.names)))
        found._parts = found._segments[0].parts
        return found

    @property
    def changes(self) -> bool:
        """True if the mixture's weights change with the position."""
        return len(self._segments) > 1

    @property
    def by(self) -> By:
        """Unit of the weights: "samples" or "tokens"."""
        return self._by


def _checked_names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if names is None:
        return tuple(map(str, range(count)))
    found = () if isinstance(names, str) else tuple(names)
    if len(set(found)) != count or not all(isinstance(name, str) and name and "/" not in name for name in found):
        raise InvalidArgumentError(
            f"the names of a Mixture's sources must be {count} different texts without '/', one for each source, got "
            f"{names!r:.200}. Give each source a name of its own"
        )
    return found


class _Positions:
    """Converter from the index of a sample in one shard to the sample's position in the order of all shards'
    samples."""

    def __init__(self, position_of: PositionOf | None, shard: int, shards: int) -> None:
        self._given, self._shard, self._shards = position_of, shard, shards
        self.at = position_function(position_of, shard, shards)

    def many(self, first: int, count: int) -> Ints:
        if self._given is None:
            return np.arange(first, first + count) * self._shards + self._shard
        return np.fromiter(map(self._given, range(first, first + count)), np.int64, count)


class _Cursor:
    def __init__(
        self,
        members: MixtureMembers,
        order: MixtureShares | SegmentedOrder,
        parts: tuple[int, ...],
        ended: set[int],
        stop: Stop,
        index: int,
        positions: _Positions,
        names: tuple[str, ...],
    ) -> None:
        self._members, self._order, self._parts, self._ended, self._stop = members, order, parts, ended, stop
        self._index, self._positions, self._names = index, positions, names
        self._last = 0
        """Number of the source of the sample that was yielded last."""
        self._schedule = self._live_schedule()

    def __iter__(self) -> _Cursor:
        return self

    def __next__(self) -> Any:
        while self._schedule is not None:
            number = self._schedule.at(self._positions.at(self._index))
            for sample in self._members.moving(number):
                self._index += 1
                self._last = number
                return sample
            self._end(number)
        raise StopIteration

    traced = True

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
        """Skip `count` samples, but stop at the first sample whose source has ended, and mark that source as ended.
        Return the number of skipped samples."""
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
        """Skip one sample for each entry of `order`, which is the number of the sample's source. Return how many of
        them come before the first one that its source does not have: all if no source has ended. The cursors of other
        sources may have skipped more."""
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
        """Return the order of the samples from now on, with weight 0 for sources that have ended; None if the mixture
        has ended in this shard."""
        if not self._ended:
            return self._order
        live = tuple(0 if number in self._ended else part for number, part in enumerate(self._parts))
        return shares_of(live) if any(live) and self._stop != "first" else None
