"""Which worker takes a waiting slot: a pure function of what is known.

Only a worker that may run the input_fn (penstock.proto.allow); one that did not tell what it may run refuses by itself.
Of these, in this order: a worker where the slot was not lost again and again; one on the box's own host, where a batch
costs one memcpy instead of the network; the one with the smallest share of its capacity in use; the first by name, so
that the answer does not depend on the order of registration. One loss does not count against a worker: a runner that
was killed by hand or by the kernel for memory should come back on the host where it was.

Slots never move just because a better place has come up: a move costs a replay, and order does not depend on place.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.appliance.model import Slot, Worker
from penstock.proto.allow import module_of, under


def choose(slot: Slot, host_id: str, input_fn: str, workers: Iterable[Worker]) -> Worker | None:
    """The worker for `slot`, whose box is on `host_id`; None when no worker that may run it has a free place."""
    module = module_of(input_fn)

    def cost(worker: Worker) -> tuple[int, bool, float, str]:
        lost_here = sum(loss.worker == worker.name for loss in slot.losses)
        return (max(0, lost_here - 1), worker.host_id != host_id, len(worker.slots) / worker.capacity, worker.name)

    fitting = (worker for worker in workers if worker.free > 0 and _may_run(worker, module))
    return min(fitting, key=cost, default=None)


def _may_run(worker: Worker, module: str) -> bool:
    return not worker.allow or under(module, worker.allow)


def nobody_may(input_fn: str, workers: Iterable[Worker]) -> str:
    """Why no worker that is there may ever run the input_fn; "" if one may, or if there is none to ask."""
    module = module_of(input_fn)
    present = [worker for worker in workers if worker.registered and not worker.draining]
    if not present or any(_may_run(worker, module) for worker in present):
        return ""
    allowed = sorted({prefix for worker in present for prefix in worker.allow})
    return (
        f"input_fn {input_fn!r} is in module {module!r}, which none of the {len(present)} workers may run (allowed "
        f"prefixes: {', '.join(allowed) or 'none'}); start workers with --allow {module.partition('.')[0]}"
    )
