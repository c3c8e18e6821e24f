"""Placement: the choice of the worker for a waiting slot, as a pure function, with heaps that make the choice fast.

Among workers that speak the training job's lane protocol (their lanes would refuse it otherwise) and may run the slot's
input_fn (penstock.proto.state.allowed_modules; one that did not report its allowed modules checks them itself), the
order is: one where the slot was not lost repeatedly (a single loss does not count: a runner killed by hand or for lack
of memory should restart on the same host); one on the box's own host, where a batch costs one memcpy; the smallest
share of capacity in use; the first by name. A slot does not move only because a better worker has registered: a move
costs a replay.

Comparing all workers for each slot would take minutes for a job of 10,000 slots. So heaps, a few for each kind of
worker, keep the workers of a host and of all hosts by (load, name). Code that changes a worker adds a new entry for it;
stale entries are skipped. Workers that lost the slot repeatedly are compared only if no other has free capacity.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Set

from penstock.appliance.core.entities import Slot, Worker, lane_protocol_of
from penstock.proto.state.allowed_modules import module_of, under
from penstock.proto.v1 import coordinator_pb2 as pb

_Entry = tuple[float, str]
"""Load (used share of the capacity) and name of a worker."""
_Kind = tuple[tuple[str, ...], int]
"""Allowed prefixes and lane protocol of a worker."""


def cost(slot: Slot, host_id: str, worker: Worker) -> tuple[int, bool, float, str]:
    """Return the sort key of a worker for the slot; the best has the smallest key."""
    return (max(0, _lost_at(slot, worker.name) - 1), worker.host_id != host_id, worker.load, worker.name)


def _lost_at(slot: Slot, worker: str) -> int:
    return sum(loss.worker == worker for loss in slot.losses)


def why_not_allowed(input_fn: str, workers: Iterable[Worker]) -> str:
    """Return why no worker may run the input_fn ("module:function"), with the remedy; "" if one may, or none exists."""
    module = module_of(input_fn)
    present = [worker for worker in workers if worker.registered and not worker.draining]
    if not present or any(worker.may_run(module) for worker in present):
        return ""
    allowed = sorted({prefix for worker in present for prefix in worker.allow})
    return (
        f"module {module!r} of input_fn {input_fn!r} must be under a prefix that a worker allows "
        f"({', '.join(allowed) or 'none'}), but none of the {len(present)} workers may run the module: start workers "
        f"with --allow {module.partition('.')[0]}"
    )


def why_not_spoken(opening: pb.OpenRunRequest, lane_protocols: Mapping[int, int]) -> str:
    """Return how many workers cannot serve the job for their lane protocol, with the remedy; "" if none. The numbers
    of workers by lane protocol are given."""
    ours = lane_protocol_of(opening)
    others = {theirs: count for theirs, count in sorted(lane_protocols.items()) if theirs != ours}
    if not others:
        return ""
    told = [f"{count} worker{'s speak' if count > 1 else ' speaks'}" for count in others.values()]
    each = (f"{workers} lane protocol {theirs}" for workers, theirs in zip(told, others, strict=True))
    remedy = "upgrade the job, or keep workers of its release" if max(others) > ours else "upgrade the workers"
    return f"{' and '.join(each)}, this job {ours}: {remedy}"


class FreeCapacity:
    """Index of the workers with free capacity. It reads the dict `workers` (by name) and never changes it."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._heaps: dict[_Kind, dict[str | None, list[_Entry]]] = {}
        """Kind -> host -> heap of workers, by load and name; None = of all hosts."""
        self._entries = 0
        """Entries added since the last rebuild, which removes stale ones."""
        self._counted: dict[str, tuple[_Kind, int, int]] = {}
        """Worker -> its kind, free slots and slots, as they are in the sums."""
        self._free: Counter[_Kind] = Counter()
        self._slots: Counter[_Kind] = Counter()
        self.grown = 0
        """Number of times that a worker had more free slots than before, or other ones."""

    def offer(self, worker: Worker) -> None:
        """Add an entry for the worker; call it whenever the worker has changed."""
        takes = worker.registered and not worker.draining
        self._count(worker.name, _kind_of(worker), max(0, worker.free), worker.capacity if takes else 0)
        if worker.free <= 0:
            return
        self._entries += 1
        if self._entries > 64 + 4 * len(self._workers):
            self._heaps, self._entries = {}, 0
            for other in self._workers.values():
                self.offer(other)
        heaps = self._heaps.setdefault(_kind_of(worker), {})
        for host_id in (None, worker.host_id):
            heapq.heappush(heaps.setdefault(host_id, []), (worker.load, worker.name))

    def forget(self, name: str) -> None:
        """Leave out a worker that has been removed."""
        if name in self._counted:
            self._count(name, self._counted[name][0], 0, 0)
            del self._counted[name]

    def _count(self, name: str, kind: _Kind, free: int, slots: int) -> None:
        before, free_before, slots_before = self._counted.get(name, (kind, 0, 0))
        self.grown += free > free_before or (kind != before and free > 0)
        self._free[before] -= free_before
        self._slots[before] -= slots_before
        self._free[kind] += free
        self._slots[kind] += slots
        self._counted[name] = kind, free, slots

    def room(self, opening: pb.OpenRunRequest) -> tuple[int, int]:
        """Return the free slots, and all slots, of the workers that can serve the job. Large assignments may leave
        less free than that (ASSIGNMENTS_MAX)."""
        module, spoken = module_of(opening.loader.input_fn), lane_protocol_of(opening)
        kinds = [kind for kind in self._slots if _fits(kind, module, spoken)]
        return sum(self._free[kind] for kind in kinds), sum(self._slots[kind] for kind in kinds)

    def share(self, one: pb.OpenRunRequest, other: pb.OpenRunRequest) -> bool:
        """Return whether some worker can serve both jobs."""
        jobs = [(module_of(opening.loader.input_fn), lane_protocol_of(opening)) for opening in (one, other)]
        return any(all(_fits(kind, *job) for job in jobs) for kind in self._slots)

    @property
    def is_full(self) -> bool:
        return all(self._best(heaps[None], kind, None, set()) is None for kind, heaps in self._heaps.items())

    def choose(self, slot: Slot, opening: pb.OpenRunRequest, barred: Set[str] = frozenset()) -> Worker | None:
        """Return the best worker for `slot` that is not `barred`; None if none that can serve it has free capacity."""
        module, spoken, host_id = module_of(opening.loader.input_fn), lane_protocol_of(opening), opening.host_id
        fitting = [(kind, heaps) for kind, heaps in self._heaps.items() if _fits(kind, module, spoken)]
        lost_at = {loss.worker for loss in slot.losses if _lost_at(slot, loss.worker) > 1}
        avoided = lost_at | barred
        best = [self._best(heaps.get(host_id, []), kind, host_id, avoided) for kind, heaps in fitting]
        if not any(best):
            best = [self._best(heaps[None], kind, None, avoided) for kind, heaps in fitting]
        if not any(best):
            among = [self._workers[name] for name in lost_at - barred if name in self._workers]
            best = [worker for worker in among if worker.free > 0 and worker.can_serve(opening)]
        found = [worker for worker in best if worker is not None]
        return min(found, key=lambda worker: cost(slot, host_id, worker), default=None)

    def _best(self, heap: list[_Entry], kind: _Kind, host_id: str | None, avoided: Set[str]) -> Worker | None:
        """Return the first worker of the heap that is not in `avoided`; stale entries before it are removed."""
        passed: list[_Entry] = []
        found = None
        while heap and found is None:
            load, name = heap[0]
            worker = self._workers.get(name)
            true = worker is not None and worker.free > 0 and worker.load == load and _kind_of(worker) == kind
            if worker is not None and true and host_id in (None, worker.host_id):
                if name not in avoided:
                    found = worker
                    break
                passed.append((load, name))
            heapq.heappop(heap)
        for entry in set(passed):
            heapq.heappush(heap, entry)
        return found


def _fits(kind: _Kind, module: str, spoken: int) -> bool:
    return kind[1] == spoken and (not kind[0] or under(module, kind[0]))


def _kind_of(worker: Worker) -> _Kind:
    return worker.allow, worker.lane_protocol
