"""Plan of the downloads of a run: shards and bytes for each node and epoch, the disk space, and how long steps wait.

The plan is computed from a dataset's index, the loader's own order and a model of the cache. Nothing is fetched. A
*node* is a machine whose boxes' workers share a cache; a box is one data-parallel rank. A *unit* is what is fetched as
a whole: a shard, or a part of a large file. The model has three rules, and is exact where the cache has no limit and no
bandwidth is given:

- A unit's fetch begins `predownload` samples before the first sample that needs the unit.
- With a limit the least recently used unit is evicted first. A prefetch never evicts a unit that the next `predownload`
  samples need. The order of use is resolved to ticks: at most 4096 in an epoch, each of one or more whole steps.
- With a bandwidth a node transfers one unit after another at this speed, and a step takes `step_s` once its data have
  arrived. Decompression, decoding and the latency of requests take no time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.data.formats.ranges.file_ranges import has_ranges, part_shard
from penstock.data.formats.shards import Shard
from penstock.data.ordering.epoch_plan import EpochPlan
from penstock.data.ordering.permutation import Ints
from penstock.data.ordering.sharded_order import ShardedOrder

__all__ = ["EpochFetches", "Fetches", "NodeFetches", "PlannedRun", "planned"]

TICKS = 4096
"""Largest number of ticks into which the model divides an epoch. In a tick, a unit counts as used once, at its first
use."""
EXAMINED_AT_ONCE = 1 << 20
"""Largest number of positions whose samples are looked up in one call."""


@dataclass(frozen=True)
class Fetches:
    """Units of a dataset: shards, or parts of large files, that are fetched as a whole. Each array has shape
    (units,)."""

    starts: Ints
    """Number of the first sample of each unit (shard, or part of a large file)."""
    transferred: Ints
    """Number of bytes to transfer for each unit (shard, or part of a large file): those of the compressed file, if the
    dataset has compressed files."""
    kept: Ints
    """Number of bytes that the cache keeps for each unit: those of its decompressed files."""

    @staticmethod
    def of(shards: Sequence[Shard]) -> Fetches:
        """Return the units into which the fetches of these shards are divided."""
        found: list[tuple[int, int, int]] = []
        for shard in shards:
            alone = has_ranges(shard) and not shard.is_verifiable
            parts = [part_shard(shard, part) for part in range(len(shard.parts))] if alone else [shard]
            for part in parts:
                found.append((part.samples, sum((file.packed or file.raw).size for file in part.files), part.size))
        samples, transferred, kept = np.array(found, np.int64).reshape(-1, 3).T
        return Fetches(np.cumsum(samples) - samples, transferred, kept)


@dataclass(frozen=True)
class PlannedRun:
    """Settings of the run that is planned."""

    batch: int
    """Number of rows of all boxes' batches together."""
    boxes: int
    nodes: int
    """Number of nodes (machines, each with a cache). Box b is on node b * nodes // boxes."""
    workers: int
    """Number of workers of each box. They begin their first batches at the same time."""
    predownload: int
    """Number of upcoming samples, over all boxes, whose shards are prefetched."""
    epochs: int = 1
    cache_limit: int | None = None
    """Largest size of a node's cache in bytes; None: no limit."""
    bandwidth: float | None = None
    """Bandwidth of a node in bytes per second; None: times are not computed."""
    step_s: float = 0.0
    """Seconds that a training step takes once its batch has arrived."""

    def steps(self, order: ShardedOrder) -> int:
        """Return the number of steps in an epoch."""
        return EpochPlan(len(order), "emit").remainder(0, 0, self.batch, self.boxes).batches

    @property
    def ahead(self) -> int:
        """Number of steps whose shards are prefetched."""
        return -(-self.predownload // self.batch)


@dataclass
class EpochFetches:
    """Downloads of one node (a machine whose boxes share a cache) for the steps of one epoch. Those for its first steps
    may take place in the epoch before."""

    shards: int = 0
    """Number of downloads of units (shards, or parts of large files), with the repeated ones."""
    again: int = 0
    """Number of repeated downloads. A unit (shard, or part of a large file) is downloaded again if the cache evicted it
    after its first download in this epoch."""
    bytes: int = 0
    """Number of bytes that were transferred to the node."""
    wait_s: float = 0.0
    """Seconds that steps wait for downloads; 0 if no bandwidth is given."""
    waiting_steps: int = 0


@dataclass
class NodeFetches:
    """Downloads of one node (a machine whose boxes share a cache) in a run."""

    node: int
    epochs: list[EpochFetches]
    first_shards: int = 0
    """Number of units (shards, or parts of large files) that the first batches of all workers of the node need."""
    first_bytes: int = 0
    first_batch_s: float = 0.0
    """Seconds from the start of the run until the node has the data of its first step; 0 if no bandwidth is given."""
    peak_bytes: int = 0
    """Largest number of bytes in the node's cache at any time."""
    working_bytes: int = 0
    """Size of the working set in bytes: the largest total size of units that are needed at one time. A unit is needed
    from the beginning of its fetch to its last use in an epoch. A cache of this size that evicts what is not needed any
    more fetches no unit twice in an epoch."""


@dataclass(frozen=True)
class _Uses:
    """Uses of units (shards, or parts of large files) by a node (a machine), in the order of time. An epoch is divided
    into ticks. There is one entry for each unit and each tick in which it is used."""

    tick: Ints
    """Number of the tick, counted over all epochs."""
    step: Ints
    """Training step of the unit's first use in the tick, counted over all epochs."""
    last: Ints
    """Training step of the unit's last use in the tick, counted over all epochs."""
    fetch: Ints
    """Number of the unit."""


@dataclass
class _Cache:
    """Model of the cache of a node (a machine)."""

    limit: int | None
    there: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Unit -> its size in bytes, for the units in the cache, the least recently used one first."""
    bytes: int = 0

    def make_room(self, size: int, spared: npt.NDArray[np.int64] | None) -> bool:
        """Evict units until `size` bytes fit. Return False if they do not fit. `spared`: for each unit, its number of
        coming uses; units with coming uses are not evicted. None: any unit is evicted."""
        if self.limit is None:
            return True
        excess = self.bytes + size - self.limit
        evicted = []
        for fetch, own in self.there.items():
            if excess <= 0:
                break
            if spared is None or not spared[fetch]:
                evicted.append(fetch)
                excess -= own
        if spared is not None and excess > 0:
            return False
        for fetch in evicted:
            self.bytes -= self.there.pop(fetch)
        return excess <= 0


def planned(run: PlannedRun, order: ShardedOrder, fetches: Fetches) -> list[NodeFetches]:
    """Return the downloads of each node (a machine whose boxes share a cache). `fetches`: units of the dataset;
    `order`: order in which its samples are read."""
    steps = run.steps(order)
    return [_Node(run, steps, fetches, _uses(run, order, fetches, node), node).result() for node in range(run.nodes)]


def _uses(run: PlannedRun, order: ShardedOrder, fetches: Fetches, node: int) -> _Uses:
    """Return the uses of units by one node in all epochs."""
    own = np.flatnonzero(np.arange(run.batch) % run.boxes * run.nodes // run.boxes == node)
    steps, length = run.steps(order), len(order)
    in_tick = -(-steps // TICKS)
    found: list[tuple[Ints, Ints, Ints, Ints]] = []
    for epoch in range(run.epochs):
        several = max(1, EXAMINED_AT_ONCE // max(1, len(own)) // in_tick) * in_tick
        for begin in range(0, steps, several):
            # the rest of an epoch may make its last batch larger
            end = -(-length // run.batch) if begin + several >= steps else begin + several
            at = (np.arange(begin, end)[:, None] * run.batch + own).ravel()
            at = at[at < length]
            if not len(at):
                continue
            fetch = np.searchsorted(fetches.starts, order.ids(epoch, at), side="right") - 1
            step = np.minimum(at // run.batch, steps - 1)
            found.append(_by_tick(fetch, epoch * steps + step, (epoch * steps + step - step % in_tick) // in_tick))
    return _Uses(*(np.concatenate([np.zeros(0, np.int64), *column]) for column in zip(*found, strict=True)))


def _by_tick(fetch: Ints, step: Ints, tick: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return four arrays with an entry for each pair of tick (part of an epoch) and unit: the tick, the first and the
    last training step that uses the unit in the tick, and the unit. `fetch`, `step`, `tick`: unit, training step and
    tick of each use, in ascending order of the steps."""
    key = (tick - tick[0]) * (int(fetch.max()) + 1) + fetch
    _, first = np.unique(key, return_index=True)
    _, from_end = np.unique(key[::-1], return_index=True)
    last = len(key) - 1 - from_end
    turn = np.argsort(first, kind="stable")
    first, last = first[turn], last[turn]
    return tick[first], step[first], step[last], fetch[first]


class _Node:
    """Model of a node (a machine) in a run: its cache, its transfers and its clock."""

    def __init__(self, run: PlannedRun, steps: int, fetches: Fetches, uses: _Uses, node: int) -> None:
        self._run, self._steps, self._fetches, self._uses = run, steps, fetches, uses
        self._cache = _Cache(run.cache_limit)
        self._coming = np.zeros(len(fetches.kept), np.int64)
        """Number of uses that each unit has in the next `predownload` samples."""
        self._fetched_in = np.full(len(fetches.kept), -1, np.int64)
        """Epoch in which each unit was transferred last; -1: never."""
        self._arrivals: list[tuple[int, int, int]] = []
        """(step at which a transfer may begin, step that needs the transferred unit, size in bytes) for each transfer,
        in their order."""
        self._found = NodeFetches(node, [EpochFetches() for _ in range(run.epochs)])

    def result(self) -> NodeFetches:
        self._simulate()
        self._count_first()
        self._found.working_bytes = self._working_set()
        if self._run.bandwidth is not None:
            self._clock(self._run.bandwidth)
        return self._found

    def _simulate(self) -> None:
        uses, ahead = self._uses, self._run.ahead
        steps, fetch = uses.step.tolist(), uses.fetch.tolist()
        bounds = [0, *(np.flatnonzero(np.diff(uses.tick)) + 1).tolist(), len(steps)]
        seen = 0
        waiting: deque[int] = deque()
        """Indexes in `uses` of the uses that lie in the next `predownload` samples and are not prefetched yet."""
        for begin, end in pairwise(bounds):
            now = steps[begin] if begin < len(steps) else 0
            until = (steps[end] if end < len(steps) else now) + ahead
            while seen < len(steps) and (seen < end or steps[seen] <= until):
                self._coming[fetch[seen]] += 1
                waiting.append(seen)
                seen += 1
            for use in range(begin, end):
                self._touch(fetch[use], now, steps[use])
            while waiting and self._ahead(fetch[waiting[0]], now, steps[waiting[0]], used=waiting[0] < end):
                waiting.popleft()
            self._coming[uses.fetch[begin:end]] -= 1

    def _touch(self, fetch: int, now: int, needed: int) -> None:
        """Model a use of unit `fetch`, with its transfer if the unit is not in the cache. `now`: present training step;
        `needed`: training step that uses the unit."""
        cache = self._cache
        if fetch in cache.there:
            cache.there.move_to_end(fetch)
        else:
            size = int(self._fetches.kept[fetch])
            if not cache.make_room(size, self._coming):
                cache.make_room(size, None)
            self._transfer(fetch, now, needed)

    def _ahead(self, fetch: int, now: int, needed: int, *, used: bool) -> bool:
        """Model the prefetch of unit `fetch`. Return False if the cache has no space for it. `now`, `needed`: as in
        `_touch`; `used`: True if the use is modelled already, so that there is nothing to prefetch."""
        cache = self._cache
        if used or fetch in cache.there:
            return True
        if not cache.make_room(int(self._fetches.kept[fetch]), self._coming):
            return False
        self._transfer(fetch, now, needed)
        return True

    def _transfer(self, fetch: int, now: int, needed: int) -> None:
        cache, size, kept = self._cache, int(self._fetches.transferred[fetch]), int(self._fetches.kept[fetch])
        cache.there[fetch] = kept
        cache.bytes += kept
        self._found.peak_bytes = max(self._found.peak_bytes, cache.bytes)
        number = needed // self._steps
        epoch = self._found.epochs[number]
        epoch.shards += 1
        epoch.bytes += size
        epoch.again += int(self._fetched_in[fetch] == number)
        self._fetched_in[fetch] = number
        self._arrivals.append((now, needed, size))

    def _count_first(self) -> None:
        first = np.unique(self._uses.fetch[self._uses.step < self._run.workers])
        self._found.first_shards = len(first)
        self._found.first_bytes = int(self._fetches.transferred[first].sum())

    def _working_set(self) -> int:
        """Return the size of the working set in bytes, see `NodeFetches.working_bytes`."""
        uses, largest = self._uses, 0
        for epoch in range(self._run.epochs):
            here = uses.step // self._steps == epoch
            fetches, first, inverse = np.unique(uses.fetch[here], return_index=True, return_inverse=True)
            ends = np.zeros(len(fetches), np.int64)
            np.maximum.at(ends, inverse, uses.last[here])
            begins = np.maximum(epoch * self._steps, uses.step[here][first] - self._run.ahead)
            size = self._fetches.kept[fetches]
            at = np.concatenate([begins, ends + 1])
            # free the space of units after their last use before new units take space
            turn = np.lexsort((np.repeat([1, 0], len(fetches)), at))
            largest = max(largest, int(np.cumsum(np.concatenate([size, -size])[turn]).max(initial=0)))
        return largest

    def _clock(self, bandwidth: float) -> None:
        """Compute how long steps wait for their data. A step begins when the previous step has ended and all data of
        the step have arrived."""
        step_s, steps = self._run.step_s, self._steps
        wait, free = 0.0, 0.0
        begun: dict[int, float] = {0: 0.0}
        """Training step -> time in seconds at which it began, for each step at which a transfer may begin."""
        pending = sorted({now for now, _, _ in self._arrivals} | {needed for _, needed, _ in self._arrivals})
        arrived: dict[int, float] = {}
        number = 0
        for step in pending:
            begun[step] = step * step_s + wait
            while number < len(self._arrivals) and self._arrivals[number][0] <= step:
                now, needed, size = self._arrivals[number]
                free = max(free, begun[now]) + size / bandwidth
                arrived[needed] = max(arrived.get(needed, 0.0), free)
                number += 1
            late = arrived.pop(step, 0.0) - begun[step]
            if late > 0:
                wait += late
                epoch = self._found.epochs[step // steps]
                epoch.wait_s += late
                epoch.waiting_steps += 1
                begun[step] += late
            if step == 0:
                self._found.first_batch_s = begun[0]
