"""Placement: the choice of the worker for a waiting slot, as a pure function, with heaps that make the choice fast.

Only workers that may run the slot's input_fn qualify (penstock.proto.state.allowed_modules). A worker that did not
report its allowed modules checks them itself. Among these workers the order of preference is: a worker where the slot
was not lost repeatedly; a worker on the box's own host, where a batch costs one memcpy instead of a transfer; the
worker with the smallest share of its capacity in use; the first by name, so that the choice does not depend on the
order of registration. A single loss does not count against a worker: a runner that was killed by hand, or by the kernel
for lack of memory, should restart on the same host.

A slot does not move only because a better worker has registered: a move costs a replay, and the order of batches does
not depend on where a slot runs.

Comparing all workers for each slot would take minutes when a job of 10,000 slots starts. Among the workers that did not
lose the slot repeatedly, the best one has the smallest (load, name) on the box's host, or else on any host. Heaps keep
the workers in this order, with a few heaps for each set of allowed prefixes. So a choice costs the logarithm of the
fleet's size. A heap entry is valid while it matches its worker. A stale entry is skipped, and code that changes a
worker adds a new entry for it. Workers that lost the slot repeatedly are compared only if no other one has free
capacity.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Set

from penstock.appliance.core.entities import Slot, Worker
from penstock.proto.state.allowed_modules import module_of, under

_Entry = tuple[float, str]
"""Load (used share of the capacity) and name of a worker."""


def cost(slot: Slot, host_id: str, worker: Worker) -> tuple[int, bool, float, str]:
    """Return the sort key of a worker for the slot, whose box is on `host_id`. The best worker has the smallest key."""
    return (max(0, _lost_at(slot, worker.name) - 1), worker.host_id != host_id, worker.load, worker.name)


def _lost_at(slot: Slot, worker: str) -> int:
    return sum(loss.worker == worker for loss in slot.losses)


def why_not_allowed(input_fn: str, workers: Iterable[Worker]) -> str:
    """Return why no worker may run the input_fn ("module:function"), with the remedy; "" if some worker may, or if
    there is none. Only workers that are registered and do not drain count."""
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


class _Heaps:
    """Heaps of the workers that allow the same set of modules. Each heap is in the order of load and name."""

    def __init__(self) -> None:
        self.everywhere: list[_Entry] = []
        self.by_host: dict[str, list[_Entry]] = {}


class FreeCapacity:
    """Index of the workers with free capacity.

    Args:
        workers: all workers of the fleet, by name. The index reads the dict and never changes it.
    """

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._heaps: dict[tuple[str, ...], _Heaps] = {}
        self._entries = 0
        """Number of entries added since the heaps were last rebuilt. Above a limit, `offer` rebuilds the heaps to
        remove stale entries."""

    def offer(self, worker: Worker) -> None:
        """Add an entry for the worker. Call this method whenever the worker has changed."""
        if worker.free <= 0:
            return
        entry, heaps = (worker.load, worker.name), self._heaps.setdefault(worker.allow, _Heaps())
        heapq.heappush(heaps.everywhere, entry)
        heapq.heappush(heaps.by_host.setdefault(worker.host_id, []), entry)
        self._entries += 1
        if self._entries > 64 + 4 * len(self._workers):
            self._rebuild()

    def _rebuild(self) -> None:
        self._heaps, self._entries = {}, 0
        for worker in self._workers.values():
            if worker.free > 0:
                entry, heaps = (worker.load, worker.name), self._heaps.setdefault(worker.allow, _Heaps())
                heaps.everywhere.append(entry)
                heaps.by_host.setdefault(worker.host_id, []).append(entry)
        for heaps in self._heaps.values():
            for heap in (heaps.everywhere, *heaps.by_host.values()):
                heapq.heapify(heap)

    @property
    def is_full(self) -> bool:
        return all(self._best(heaps.everywhere, allow, None, set()) is None for allow, heaps in self._heaps.items())

    def choose(self, slot: Slot, host_id: str, input_fn: str, barred: Set[str] = frozenset()) -> Worker | None:
        """Return the best worker for `slot`, whose box is on `host_id`; None if no worker that may run `input_fn` has
        free capacity. `barred`: names of workers that are excluded."""
        module = module_of(input_fn)
        fitting = [(allow, heaps) for allow, heaps in self._heaps.items() if not allow or under(module, allow)]
        lost_at = {loss.worker for loss in slot.losses if _lost_at(slot, loss.worker) > 1}
        avoided = lost_at | barred
        best = [self._best(heaps.by_host.get(host_id, []), allow, host_id, avoided) for allow, heaps in fitting]
        if not any(best):
            best = [self._best(heaps.everywhere, allow, None, avoided) for allow, heaps in fitting]
        if not any(best):
            among = [self._workers[name] for name in lost_at - barred if name in self._workers]
            best = [worker for worker in among if worker.free > 0 and worker.may_run(module)]
        found = [worker for worker in best if worker is not None]
        return min(found, key=lambda worker: cost(slot, host_id, worker), default=None)

    def _best(
        self, heap: list[_Entry], allow: tuple[str, ...], host_id: str | None, avoided: Set[str]
    ) -> Worker | None:
        """Return the first worker of the heap that is not in `avoided`, None if no worker is left. Entries before it
        that do not match their worker any more are removed."""
        passed: list[_Entry] = []
        found = None
        while heap and found is None:
            load, name = heap[0]
            worker = self._workers.get(name)
            true = worker is not None and worker.free > 0 and worker.load == load and worker.allow == allow
            if worker is not None and true and host_id in (None, worker.host_id):
                if name not in avoided:
                    found = worker
                    break
                passed.append((load, name))
            heapq.heappop(heap)
        for entry in set(passed):
            heapq.heappush(heap, entry)
        return found
