"""Which worker takes a waiting slot: a pure function of what is known.

In this order: a worker where the slot was not lost again and again; one on the box's own host, where a batch costs one
memcpy instead of the network; the one with the smallest share of its capacity in use; the first by name, so that the
answer does not depend on the order of registration. One loss does not count against a worker: a runner that was
killed by hand or by the kernel for memory should come back on the host where it was.

Slots never move just because a better place has come up: a move costs a replay, and order does not depend on place.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.appliance.model import Slot, Worker


def choose(slot: Slot, host_id: str, workers: Iterable[Worker]) -> Worker | None:
    """The worker for `slot`, whose box is on `host_id`; None when no worker has a free place."""

    def cost(worker: Worker) -> tuple[int, bool, float, str]:
        lost_here = sum(loss.worker == worker.name for loss in slot.losses)
        return (max(0, lost_here - 1), worker.host_id != host_id, len(worker.slots) / worker.capacity, worker.name)

    return min((worker for worker in workers if worker.free > 0), key=cost, default=None)
