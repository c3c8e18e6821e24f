"""States of a ShardLoader: of one worker, and the aggregated state of all. A state contains:

- the progress (ordering/order_states.py), which determines which samples were delivered;
- for a finite source with unknown lengths, those found by reading; for an endless source, its order's block;
- cursor states (shard_cursors.py), which only save a resume from reading all samples before again;
- `taken`, if `advance_state` advanced it: the number of batches at which the loader returned it. It may lack changes of
  weights that were ordered since and begin at this position or later (mixture_changes.py).

A cursor cannot go back. So an aggregated state takes, for each shard, the furthest cursor state of all workers that
does not lie beyond the aggregated position.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import msgspec

from penstock.data.arguments import one_of
from penstock.data.ordering.order_states import (
    FORMAT,
    TAKEN,
    Count,
    Number,
    OrderProgress,
    Topology,
    check_format,
    check_same_order,
    common_progress,
    differences,
    others_of,
)
from penstock.data.ordering.partition import APART, Partition, WorkerTurn
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.layers.layer import checked
from penstock.data.sharded.layers.mixture_schedule import with_later_weights
from penstock.data.sharded.layers.restart import LayersRestart
from penstock.data.sharded.protocol import ShardedSource
from penstock.data.sharded.shard_cursors import CursorStates
from penstock.data.sharded.shard_orders import EndlessOrder, RoundRobin, Tail
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    StateMismatchError,
)
from penstock.proto.state.envelope import damaged_state

KIND = ("a ShardLoader", "shards")


TurnOf = Callable[[int], WorkerTurn]
"""From the worker of a box that makes the first batch to what another worker of it makes."""


@dataclass(frozen=True)
class ShardedPosition:
    progress: OrderProgress
    """`start` is a number of samples from the epoch's beginning."""
    cursors: CursorStates = field(default_factory=dict)
    ended: Mapping[int, int] = field(default_factory=dict)
    """Number of samples in each shard whose end was found by reading."""
    endless_order: EndlessOrder | None = None
    cut: tuple[tuple[int, int | None], ...] | None = None
    """(shard, index) of the documents that the last change of layers (layers/restart.py) has cut; None without one."""

    def state(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The cursor states are three lists: a thousand take 60 us to encode, and 740 us as separate dicts."""
        more: dict[str, Any] = {
            "shards": list(self.cursors),
            "indices": [index for index, _ in self.cursors.values()],
            "saved_positions": [saved for _, saved in self.cursors.values()],
        }
        if self.endless_order is not None:
            more["block"] = self.endless_order.block
        else:
            more["ended"], more["lengths"] = list(self.ended), list(self.ended.values())
        if self.cut is not None:
            more["cut"] = [list(each) for each in self.cut]
        return {"format": FORMAT, **msgspec.to_builtins(self.progress), "order": dict(order), **more}


class _Entries(msgspec.Struct):
    """Entries of a state besides the progress."""

    shards: list[Number]
    indices: list[Number]
    saved_positions: list[Any]
    block: Count | None = None
    ended: list[Number] = []
    lengths: list[Number] = []
    taken: Number = 0
    cut: tuple[tuple[Number, Number | None], ...] | None = None


@dataclass(frozen=True)
class FixedOrder:
    """Source and settings that decide the order, and stay the same in a whole run."""

    source: ShardedSource
    partitions: int
    tail: Tail
    block: int | None
    """Block size of an endless order, if the user gave it; None: that of the state, or the first global batch."""

    def round_robin(self, epoch: int, ended: Mapping[int, int]) -> RoundRobin:
        """Return the order of a finite source's epoch, from the lengths that it reports, or those found by reading."""
        lengths = self.source.lengths(epoch)
        if lengths is not None and len(lengths) != self.source.num_shards:
            raise DatasetError(f"lengths() of the source must have {self.source.num_shards} items, got {len(lengths)}")
        if lengths is not None and len(lengths) and min(lengths) < 0:
            raise DatasetError(f"lengths() of the source must be at least 0, got {min(lengths)} in epoch {epoch}")
        return RoundRobin(self.source.num_shards, ended if lengths is None else [int(length) for length in lengths])

    def endless_order(self, block: int) -> EndlessOrder | None:
        return EndlessOrder(self.source.num_shards, self.partitions, block) if self.source.endless else None

    def _endless_order_of(self, block: int | None) -> EndlessOrder | None:
        if not self.source.endless:
            return None
        if block is None:
            raise ValueError("its entry 'block' is missing")
        if self.block not in (None, block):
            raise StateMismatchError(f"block must be {block}, as in the saved state, got {self.block}. Leave block out")
        return self.endless_order(block)

    def read(self, state: Any) -> ShardedPosition:
        check_format(state, *KIND)
        try:
            progress, entries = OrderProgress.parsed(state), msgspec.convert(state, _Entries)
            shards, endless_order = entries.shards, self._endless_order_of(entries.block)
            places = zip(entries.indices, entries.saved_positions, strict=True)
            cursors = dict(zip(shards, places, strict=True))
            ended = {} if endless_order is not None else dict(zip(entries.ended, entries.lengths, strict=True))
            if progress.start < 0 or max([*shards, *ended], default=0) >= self.source.num_shards:
                raise ValueError(f"its shards must be below {self.source.num_shards}, and its start at least 0")
            length = None if endless_order is not None else self.round_robin(progress.epoch, ended).length
            if length is not None and progress.start > length:
                raise ValueError(f"its position must be within the {length} samples of the epoch, got {progress}")
        except ValueError as error:
            raise damaged_state("the ShardLoader's state is damaged", error) from error
        return ShardedPosition(progress, cursors, ended, endless_order, entries.cut)

    def aggregated(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        positions = [self.read(state) for state in states]
        check_same_order(states)
        progress, dones = common_progress([each.progress for each in positions])
        now, workers = [each for each in positions if each.progress.epoch == progress.epoch], progress.topology.workers
        ended = {shard: length for each in now for shard, length in each.ended.items()}
        cuts = [each.cut for each in now if each.cut is not None]
        cut = tuple(dict.fromkeys(each for own in cuts for each in own)) if cuts else None
        whole = ShardedPosition(progress, {}, ended, now[0].endless_order, cut)
        whole = replace(whole, cursors=self._furthest(whole, now))
        taken = {}
        if any(TAKEN in state for state in states):
            known = [min(done, state.get(TAKEN, done)) for state, done in zip(states, dones, strict=True)]
            turns = [progress.turn(number % workers) for number in range(len(states))]
            taken[TAKEN] = max(turn.batch(done - 1) + 1 if done else 0 for turn, done in zip(turns, known, strict=True))
        others = {
            str(number): each.state({})
            for number, each in enumerate(positions)
            if each.progress != whole.progress.of_worker(number % workers)
        }
        return {**whole.state(states[0]["order"]), **taken, "workers": len(states), "others": others}

    def part(
        self, state: Mapping[str, Any], number: int, workers: int, topology: Topology
    ) -> tuple[ShardedPosition, bool]:
        """Return a worker's start in an aggregated state, and True if the caller must check that a batch is left."""
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
        """Share the rest of the epoch among another topology's workers. `first`: who makes the first batch."""
        epoch, start = whole.progress.epoch, self._position(whole)
        endless_order = whole.endless_order
        # at the beginning of a run, the global batch size of the new topology becomes the block size
        if (epoch, start, self.block) == (0, 0, None):
            endless_order = self.endless_order(topology.batch)
        return replace(whole, progress=OrderProgress(epoch, start, 0, topology, first), endless_order=endless_order)

    def with_later_weights(
        self, state: Mapping[str, Any], order: Mapping[str, Any], turn: TurnOf, until: int | None = None
    ) -> Mapping[str, Any]:
        """Return a state of an endless source for comparison: mixtures' weights that differ from `order` only after its
        position (or `until`) are replaced by those of `order`."""
        check_format(state, *KIND)
        was = state["order"]
        if not self.source.endless or was.get("source") == order["source"] or "shards" not in was:
            return state
        if was["shards"] != order["shards"] or was.get("partitions") != order["partitions"]:
            return state
        (_, position), endless_order = self.reached(state, turn), self.read(state).endless_order
        assert endless_order is not None
        inner = int(endless_order.counts(position).max()) * self.source.num_shards
        position = position if until is None else min(position, until)
        try:
            source = with_later_weights(was["source"], order["source"], position, inner)
        except (AttributeError, KeyError, TypeError):
            return state
        return {**state, "order": {**was, "source": source}}

    def taken(self, state: Mapping[str, Any], turn: TurnOf) -> tuple[int, int]:
        """Return the (epoch, position) up to which a state lists all changes: `reached` before it was advanced."""
        if TAKEN not in state:
            return self.reached(state, turn)
        progress = msgspec.structs.replace(self.read(state).progress, done=state[TAKEN])
        if "others" in state:
            return progress.epoch, _after(progress, progress.done)
        return progress.epoch, _reached(progress, turn(progress.first))

    def reached(self, state: Mapping[str, Any], turn: TurnOf) -> tuple[int, int]:
        """Return (epoch, first position that no worker has reached); `turn`: for an endless source's worker state."""
        progress = self.read(state).progress
        if "others" not in state:
            return progress.epoch, _reached(progress, turn(progress.first))
        found = [(progress.epoch, _after(progress, progress.done))]
        for number, other in others_of(state).items():
            own = self.read(other).progress
            found.append((own.epoch, _reached(own, own.turn(int(number) if number.isdecimal() else 0))))
        return max(found)

    def _partition(self, position: ShardedPosition) -> Partition | None:
        """Return the division of the rest of the epoch into batches; None if endless or while a length is unknown."""
        progress = position.progress
        if position.endless_order is not None:
            return None
        length = self.round_robin(progress.epoch, position.ended).length
        if length is None:
            return None
        return Partition(length, progress.start, progress.topology.batch, progress.topology.boxes, self.tail)

    def _position(self, position: ShardedPosition) -> int:
        """Return the position of the first batch that is not done, where a resume on another topology continues."""
        progress = position.progress
        if (partition := self._partition(position)) is not None:
            return partition.position(progress.done)
        return progress.start + progress.done * progress.topology.batch

    def before_restart(self, state: Mapping[str, Any], restart: LayersRestart) -> tuple[ShardedPosition, Ints]:
        """Return the position in an aggregated state of other layers, and the number of their samples before it, by
        shard. Raises StateMismatchError if the lengths that the new layers report cannot be true for this epoch."""
        was = replace(self, source=restart.documents) if restart.one_to_one else self
        position = was.read(state)
        counts, epoch = was.counts(position), position.progress.epoch
        if self.source.endless:
            return position, counts
        lengths = restart.documents.lengths(epoch) if restart.one_to_one else None
        if lengths is None and self.source.lengths(epoch) is not None:
            raise StateMismatchError(
                "layers='restart' needs layers of unknown lengths for the rest of this epoch, because the saved run's "
                "were unknown. Keep a Filtered or Packed that yields all, or change the layers at the epoch's end"
            )
        ends = position.ended if lengths is None else dict(enumerate(lengths))
        ended = {shard: count for shard, count in enumerate(counts.tolist()) if count == ends.get(shard)}
        return replace(position, ended=ended), counts

    def counts(self, whole: ShardedPosition) -> Ints:
        """Return the number of samples before an aggregated position, by shard."""
        position = self._position(whole)
        if whole.endless_order is not None:
            return whole.endless_order.counts(position)
        return self.round_robin(whole.progress.epoch, whole.ended).counts(position)

    def _furthest(self, whole: ShardedPosition, positions: Sequence[ShardedPosition]) -> CursorStates:
        """Return, for each shard, the furthest cursor state among all workers that does not lie beyond `whole`."""
        counts = self.counts(whole)
        found: CursorStates = {}
        for each in positions:
            for shard, (index, saved) in each.cursors.items():
                if found.get(shard, (-1, None))[0] < index <= counts[shard]:
                    found[shard] = index, saved
        return found


def _after(progress: OrderProgress, batches: int) -> int:
    return progress.start + batches * progress.topology.batch


def _reached(progress: OrderProgress, turn: WorkerTurn) -> int:
    """Return the position after a worker's last batch; an upper bound if `turn` is for another number of workers."""
    workers, done = progress.topology.workers, progress.done
    if turn.of != workers:
        return _after(progress, done * workers)
    return _after(progress, turn.batch(done - 1) + 1 if done else 0)


def check_order(state: Any, order: Mapping[str, Any], *, strict: bool) -> None:
    """Raise StateMismatchError if a state has another order. strict=False: only warn about differences that leave the
    position meaningful, which are not those of shards, partitions and `endless`."""
    check_format(state, *KIND)
    found = differences(state["order"], order)
    if not found:
        return
    message = f"the state was saved with another order of samples: {', '.join(found.values())}"
    fixed = [name for name in ("shards", "partitions", "endless") if name in found]
    if fixed:
        raise StateMismatchError(
            f"{message}. Use the settings of the saved run: the position depends on {' and '.join(fixed)}"
        )
    if strict:
        raise StateMismatchError(
            f"{message}. Use the settings of the saved run; or load with layers='restart', if you change layers over "
            "the same documents (length, tokenizer, filter, window); or with strict=False"
        )
    warnings.warn(f"{message}. Samples may be missing or repeated in this epoch", UserWarning, stacklevel=4)


def described(source: ShardedSource) -> Any:
    """Return a source's description, which must be JSON: others may differ between processes or when saved."""
    found = source.described()
    try:
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"described() of {type(source).__name__} must return a JSON value: {error}"
        ) from None
    return found


def check_source(source: ShardedSource, partitions: int, block: int | None, tail: str) -> None:
    shards = checked(source, "ShardLoader").num_shards
    one_of("tail", tail, [name for name in get_args(Tail) if name != APART])
    if shards < 1:
        raise InvalidArgumentError(f"num_shards of the source must be at least 1, got {shards}")
    if not source.endless and partitions != 1:
        raise InvalidArgumentError(f"partitions must be 1 for a finite source, got {partitions}. Wrap it in Repeated")
    if not source.endless and block is not None:
        raise InvalidArgumentError(f"block must be None for a finite source, got {block}")
    if shards % partitions:
        raise InvalidArgumentError(f"partitions must divide the source's {shards} shards, got {partitions}")
