"""Where a worker stands in a sharded source's order, as a state; and all workers' states as one, for any topology.

Beside the integers of ordering/progress.py a state has the marks of the shards that the worker has to do with
(shard_cursors.py), and what was found out on the way: of a finite source with unknown lengths which shards are over, of
an endless one how the batches grew (endless_order.py). The integers alone say which samples have been dealt out; marks
only save the reading of them again. So states are put together without care for who had which shard: of each the
furthest mark that does not lie beyond the place.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.data.ordering.order_states import OrderProgress, Topology, check_format, others_of
from penstock.data.ordering.partition import Partition
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.endless_order import EndlessOrder
from penstock.data.sharded.protocol import ShardedSource
from penstock.data.sharded.round_robin import RoundRobin, Tail
from penstock.data.sharded.shard_cursors import CursorStates
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    StateCorruptError,
    StateMismatchError,
    StateVersionError,
)

__all__ = ["FixedOrder", "ShardedPosition", "check_order", "differences"]

FORMAT = 2
MOST = 1 << 62
"""Of any number in a state."""
KIND = ("a ShardLoader", FORMAT, "shards")
"""What `check_format` knows its states by."""


@dataclass(frozen=True)
class ShardedPosition:
    """Of one worker, or of all of them together."""

    progress: OrderProgress
    """`start` is a position in a finite source's epoch, or in an endless one's stream."""
    marks: CursorStates = field(default_factory=CursorStates)
    ended: Mapping[int, int] = field(default_factory=dict)
    """Shard -> length, as far as it was found by reading."""
    endless_order: EndlessOrder | None = None
    """Of an endless source."""

    def state(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Marks lie in columns, for a thousand of them are encoded in 60 us then, and one by one in 740."""
        indices, tokens = self.marks.columns
        more: dict[str, Any] = {
            "shards": list(indices),
            "indices": list(indices.values()),
            "tokens": list(tokens.values()),
        }
        if self.endless_order is not None:
            more["block"] = self.endless_order.block
        else:
            more["ended"], more["lengths"] = list(self.ended), list(self.ended.values())
        return {"format": FORMAT, **self.progress.plain(), "order": dict(order), **more}


@dataclass(frozen=True)
class FixedOrder:
    """What of the order does not move."""

    source: ShardedSource
    partitions: int
    tail: Tail
    block: int | None
    """Of an endless source's grid, if it was said; None: that of the state, or the batch with which the run begins."""

    def rounds(self, epoch: int, ended: Mapping[int, int]) -> RoundRobin:
        """With all lengths where the source says them, else with those that were found."""
        lengths = self.source.lengths(epoch)
        if lengths is not None and len(lengths) != self.source.num_shards:
            raise DatasetError(f"the source has {self.source.num_shards} shards, and lengths of {len(lengths)}")
        if lengths is not None and len(lengths) and min(lengths) < 0:
            raise DatasetError(f"the source has a shard of {min(lengths)} samples in epoch {epoch}")
        return RoundRobin(self.source.num_shards, ended if lengths is None else [int(length) for length in lengths])

    def endless_order(self, block: int) -> EndlessOrder | None:
        """Of an endless source, in blocks of this size."""
        return EndlessOrder(self.source.num_shards, self.partitions, block) if self.source.endless else None

    def _endless_order_of(self, state: Mapping[str, Any]) -> EndlessOrder | None:
        """Raises StateMismatchError or StateVersionError for an order in other blocks."""
        if not self.source.endless:
            return None
        if state["format"] < FORMAT:
            raise StateVersionError(
                "the state of an endless source was written by an older Penstock, whose order followed the batch size: "
                "it cannot be gone on with. Start without it"
            )
        block = state["block"]
        if type(block) is not int or not 1 <= block < MOST:
            raise ValueError(f"block {block!r:.100}")
        if self.block not in (None, block):
            raise StateMismatchError(
                f"the state was saved with another order of samples: block was {block} and is {self.block}. Leave "
                "block out to go on as it was"
            )
        return self.endless_order(block)

    def read(self, state: Any) -> ShardedPosition:
        """What a state says. Raises StateMismatchError, StateVersionError or StateCorruptError for what is no such
        state, a newer one, or damaged."""
        check_format(state, *KIND)
        try:
            progress = OrderProgress.parsed(state)
            marks = CursorStates(
                *(dict(zip(state["shards"], state[name], strict=True)) for name in ("indices", "tokens"))
            )
            numbers = [progress.start, *state["indices"]]
            endless_order = self._endless_order_of(state)
            ended = {} if endless_order is not None else dict(zip(state["ended"], state["lengths"], strict=True))
            numbers += [*ended.values(), *(self.source.num_shards - 1 - shard for shard in (*marks.indices, *ended))]
            if any(type(number) is not int or not 0 <= number < MOST for number in (*numbers, *marks.indices, *ended)):
                raise ValueError(f"{progress}, {ended}, marks at {state['indices']}"[:400])
            length = None if endless_order is not None else self.rounds(progress.epoch, ended).length
            if length is not None and progress.start > length:
                raise ValueError(f"{progress} of {length} samples")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise StateCorruptError(f"a ShardLoader's state that cannot be: {error!r}") from error
        return ShardedPosition(progress, marks, ended, endless_order)

    def aggregated(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state from those of all workers, in order of global_worker_id. Only the states know the shape."""
        if not states:
            raise InvalidArgumentError("aggregate_state_dict() of no states: it takes those of all workers")
        places = [self.read(state) for state in states]
        _check_same_order([{**state["order"], "topology": dict(state["topology"])} for state in states])
        newest = max((place.progress for place in places), key=lambda progress: progress.epoch)
        now = [place for place in places if place.progress.epoch == newest.epoch]
        workers = newest.topology.workers
        # Who is still at the end of the epoch before has done nothing of this one.
        dones = [place.progress.done if place in now else 0 for place in places]
        batches = min(newest.turn(number % workers).batch(done) for number, done in enumerate(dones))
        ended = {shard: length for place in now for shard, length in place.ended.items()}
        whole = ShardedPosition(replace(newest, done=batches), CursorStates(), ended, now[0].endless_order)
        whole = replace(whole, marks=self._furthest(whole, now))
        others = {
            str(number): place.state({})
            for number, place in enumerate(places)
            if place.progress != whole.progress.of_worker(number % workers)
        }
        return {**whole.state(states[0]["order"]), "workers": len(states), "others": others}

    def part(
        self, state: Mapping[str, Any], number: int, workers: int, topology: Topology
    ) -> tuple[ShardedPosition, bool]:
        """Of worker `number` (global_worker_id) of `workers` in all, which have this topology. And whether the workers
        are others, so that an epoch of which nothing is left is to be passed over."""
        whole = self.read(state)
        progress = whole.progress
        same = state.get("workers") == workers and progress.topology.workers == topology.workers
        if same and progress.topology == topology:
            other = others_of(state).get(str(number))
            if other is not None:
                return self.read(other), False
            return replace(whole, progress=progress.of_worker(number % topology.workers)), False
        first = (progress.first + progress.done) % topology.workers if same else 0
        return self.repartitioned(whole, topology, first=first), not same

    def repartitioned(self, whole: ShardedPosition, topology: Topology, *, first: int) -> ShardedPosition:
        """What is left, dealt out among workers of this topology; `first` of each box makes the first batch."""
        epoch, start = whole.progress.epoch, self._position(whole)
        endless_order = whole.endless_order
        if (epoch, start, self.block) == (0, 0, None):  # of a run that begins: its batch decides, and not who was asked
            endless_order = self.endless_order(topology.batch)
        return replace(whole, progress=OrderProgress(epoch, start, 0, topology, first), endless_order=endless_order)

    def _partition(self, place: ShardedPosition) -> Partition | None:
        """Of a finite source, once its lengths are known."""
        progress = place.progress
        if place.endless_order is not None:
            return None
        length = self.rounds(progress.epoch, place.ended).length
        if length is None:
            return None
        return Partition(length, progress.start, progress.topology.batch, progress.topology.boxes, self.tail)

    def _position(self, place: ShardedPosition) -> int:
        """Where the next dealing begins."""
        if (partition := self._partition(place)) is not None:
            return partition.position(place.progress.done)
        return place.progress.start + place.progress.done * place.progress.topology.batch

    def _furthest(self, whole: ShardedPosition, places: Sequence[ShardedPosition]) -> CursorStates:
        position = self._position(whole)
        if whole.endless_order is not None:
            counts: Ints = whole.endless_order.counts(position)
        else:
            counts = self.rounds(whole.progress.epoch, whole.ended).counts(position)
        found = CursorStates()
        for place in places:
            for shard, index in place.marks.indices.items():
                if found.indices.get(shard, -1) < index <= counts[shard]:
                    found.put(shard, index, place.marks.tokens[shard])
        return found


def _check_same_order(orders: Sequence[Mapping[str, Any]]) -> None:
    """Raises StateMismatchError if the workers do not all deal out the same order: what they took for the same list
    was another one in some process. Samples have been lost and repeated then."""
    for number, order in enumerate(orders):
        if order != orders[0] and (found := differences(orders[0], order)):
            raise StateMismatchError(
                f"worker {number} makes batches of another order than worker 0, so samples were lost and repeated: of "
                f"worker 0 and then of worker {number}, {', '.join(found.values())}. Make the same source in each, say "
                "from a sorted list of files"
            )


def check_order(state: Any, order: Mapping[str, Any], *, strict: bool) -> None:
    """Raises StateMismatchError if the state is a place in another order. Without `strict` it is a warning where shards
    and rows are laid out alike, so that a place in the one is one in the other. And what `FixedOrder.read` raises for
    what is no state at all."""
    check_format(state, *KIND)
    found = differences(state["order"], order)
    if not found:
        return
    message = f"the state was saved with another order of samples: {', '.join(found.values())}"
    fixed = [name for name in ("shards", "partitions", "endless") if name in found]
    if strict:
        raise StateMismatchError(f"{message}. Use what it was saved with, or load it with strict=False to go on anyway")
    if fixed:
        raise StateMismatchError(f"{message}. With other {' and '.join(fixed)} a place means nothing, strict or not")
    warnings.warn(f"{message}; samples may be missing or repeated in this epoch", UserWarning, stacklevel=4)


def differences(was: Any, now: Any, path: str = "") -> dict[str, str]:
    """What differs between two values of JSON: dotted path -> "path was ... and is ..."."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        found: dict[str, str] = {}
        for name in {**was, **now}:
            there = f"{path}.{name}" if path else str(name)
            if name not in now:
                found[there] = f"{there} was {was[name]!r:.200} and is not there"
            elif name not in was:
                found[there] = f"{there} was not there and is {now[name]!r:.200}"
            else:
                found.update(differences(was[name], now[name], there))
        return found
    if _is_list(was) and _is_list(now) and len(was) == len(now):
        pairs = enumerate(zip(was, now, strict=True))
        return {where: text for at, pair in pairs for where, text in differences(*pair, f"{path}[{at}]").items()}
    if _is_list(was) and _is_list(now):
        was, now = list(was), list(now)
    return {} if was == now else {path: f"{path} was {was!r:.200} and is {now!r:.200}"}


def _is_list(value: Any) -> bool:
    """A tuple comes back from JSON as a list."""
    return isinstance(value, list | tuple)
