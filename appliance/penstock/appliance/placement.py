"""Which worker takes a waiting slot: a function of what is known, and the order in which it is found fast.

In this order: a worker where the slot was not lost again and again; one on the box's own host, where a batch costs one
memcpy instead of the network; the one with the smallest share of its capacity in use; the first by name, so that the
answer does not depend on the order of registration. One loss does not count against a worker: a runner that was
killed by hand or by the kernel for memory should come back on the host where it was.

Slots never move just because a better place has come up: a move costs a replay, and order does not depend on place.

To look at all workers for each slot takes minutes when a job of 10,000 slots starts. Among workers where nothing speaks
against the slot, the best one is the least (load, name) of the box's host, or else of all hosts; so those are kept in
heaps, and a choice costs the logarithm of the fleet. An entry is never looked for and removed: it counts as long as it
says what is true of its worker, and whoever changes a worker offers it again. A worker where the slot was lost again
and again is passed over; only if nothing else is free are such workers compared, and there are few.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from penstock.appliance.model import Slot, Worker

_Entry = tuple[float, str]
"""Load and name of a worker."""


def cost(slot: Slot, host_id: str, worker: Worker) -> tuple[int, bool, float, str]:
    """The least is the best."""
    return (max(0, _lost_at(slot, worker.name) - 1), worker.host_id != host_id, _load(worker), worker.name)


def _lost_at(slot: Slot, worker: str) -> int:
    return sum(loss.worker == worker for loss in slot.losses)


def _load(worker: Worker) -> float:
    return len(worker.slots) / worker.capacity


class Room:
    """The workers that have a free place.

    Args:
        workers: all of the fleet, by name; looked at, never changed.
    """

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._everywhere: list[_Entry] = []
        self._by_host: dict[str, list[_Entry]] = {}

    def offer(self, worker: Worker) -> None:
        """To be called whenever something has changed about the worker."""
        if worker.free <= 0:
            return
        entry = (_load(worker), worker.name)
        heapq.heappush(self._everywhere, entry)
        heapq.heappush(self._by_host.setdefault(worker.host_id, []), entry)
        if len(self._everywhere) > 64 + 4 * len(self._workers):
            self._rebuild()

    def _rebuild(self) -> None:
        """Drops what is no longer true of anybody."""
        self._everywhere, self._by_host = [], {}
        for worker in self._workers.values():
            if worker.free > 0:
                self._everywhere.append((_load(worker), worker.name))
                self._by_host.setdefault(worker.host_id, []).append((_load(worker), worker.name))
        for heap in (self._everywhere, *self._by_host.values()):
            heapq.heapify(heap)

    def choose(self, slot: Slot, host_id: str) -> Worker | None:
        """The worker for `slot`, whose box is on `host_id`; None when no worker has a free place."""
        avoided = {loss.worker for loss in slot.losses if _lost_at(slot, loss.worker) > 1}
        near = self._by_host.get(host_id, [])
        best = self._best(near, host_id, avoided) or self._best(self._everywhere, None, avoided)
        if best is None:
            among = [self._workers[name] for name in avoided if name in self._workers]
            best = min((w for w in among if w.free > 0), key=lambda w: cost(slot, host_id, w), default=None)
        return best

    def _best(self, heap: list[_Entry], host_id: str | None, avoided: set[str]) -> Worker | None:
        """The first worker in the heap that is not to be avoided. Entries that are not true any more leave it."""
        passed: list[_Entry] = []
        found = None
        while heap and found is None:
            load, name = heap[0]
            worker = self._workers.get(name)
            true = worker is not None and worker.free > 0 and _load(worker) == load
            if worker is not None and true and host_id in (None, worker.host_id):
                if name not in avoided:
                    found = worker
                    break
                passed.append((load, name))
            heapq.heappop(heap)
        for entry in set(passed):
            heapq.heappush(heap, entry)
        return found
