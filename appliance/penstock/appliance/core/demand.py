"""Number of workers that the open runs need, from measurements.

Demand. A loop that took r steps a second and waited for a share w of the time would take r / (1 - w) steps a second if
it never waited. Supply. A slot whose batches take b seconds of work each makes 1 / b batches a second. So a box needs
r / (1 - w) * b slots, and some more, because batches do not all take equally long. Time in which a runner waited for a
processor does not count as work, because more slots would only wait more.

Cores. A slot that takes c seconds of processor time for b seconds of work keeps c / b cores busy. So n cores carry
n * b / c slots, and more slots on the same machines add no throughput.

A run's number of workers is fixed while it is open, so the advice is for its next start
(`Appliance(num_workers_per_box=)`), on the present machines. The recommended number of worker daemons has capacity for
all slots that open runs have or need, whichever is more. Cores do not limit that number, because new machines bring
their own. An autoscaler may follow it: penstock_workers_recommended in docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from penstock.appliance.core.cluster_state import ClusterState
from penstock.appliance.model.entities import Attempt, Box, BoxPresence, Slot, Worker
from penstock.appliance.policies.bottleneck import LEAST_S
from penstock.proto.v1 import coordinator_pb2 as pb

MAX_GROWTH = 4
"""Largest factor of recommended over present workers, because measurements of few slots do not predict many more."""
HEADROOM = 1.25
"""Factor of spare slots, because batches do not all take equally long."""
MAX_WAIT_SHARE = 0.98
"""Largest share of waiting that counts: a loop that only waits would need any number of workers."""


@dataclass(frozen=True)
class WorkerAdvice:
    """Advice for one run; all 0 if too little is measured yet."""

    needed: int = 0
    """Slots that a box needs if there are enough cores."""
    workers_per_box: int = 0
    """Recommended slots of a box on the present machines."""
    busy_cores: int = 0
    """Cores of these machines, if the slots that the run has keep them all busy; else 0."""


def advise(attempt: Attempt, cores: int) -> WorkerAdvice:
    """Return how many slots the run should have. `cores`: cores of all its workers' machines; 0 = not known."""
    boxes = _live(attempt)
    slots = [slot for box in boxes for slot in box.slots if slot.phase == pb.READY and slot.batch_s > 0]
    needed = _needed(attempt, boxes, slots)
    if not needed:
        return WorkerAdvice()
    most = _carried(cores, slots) / len(boxes)
    busy = cores if most < attempt.num_workers + 0.5 else 0
    return WorkerAdvice(needed, max(1, round(min(needed, most))), busy)


def cores(workers: Iterable[Worker]) -> int:
    """Return the number of cores of all machines with workers that take slots; 0 if one did not report it.

    The daemons of one machine share its cores.
    """
    found: dict[str, int] = {}
    for worker in workers:
        if worker.registered and not worker.draining:
            if not worker.cores:
                return 0
            found[worker.host_id] = max(found.get(worker.host_id, 0), worker.cores)
    return sum(found.values())


def daemons(cluster: ClusterState) -> int:
    """Return the number of worker daemons that all open runs need, each of the median capacity of the present ones."""
    slots = 0
    for attempt in cluster.open_attempts():
        slots += len(_live(attempt)) * max(attempt.num_workers, advise(attempt, 0).needed)
    capacities = [worker.capacity for worker in cluster.workers.values() if worker.registered and not worker.draining]
    return math.ceil(slots / (median(capacities) if capacities else 1))


def _live(attempt: Attempt) -> list[Box]:
    return [box for box in attempt.boxes.values() if box.presence is BoxPresence.LIVE]


def _needed(attempt: Attempt, boxes: list[Box], slots: list[Slot]) -> int:
    seen = [box for box in boxes if box.usual_span_s >= LEAST_S]
    rates = [box.usual_steps_per_s / (1 - min(box.waits.share, MAX_WAIT_SHARE)) for box in seen]
    if not slots or not any(rates):
        return 0
    needed = math.ceil(max(rates) * fmean(map(_work_s, slots)) * HEADROOM)
    return max(1, min(needed, MAX_GROWTH * attempt.num_workers))


def _carried(cores: int, slots: list[Slot]) -> float:
    """Return how many slots like these keep `cores` cores busy."""
    cpu_s = fmean(slot.batch_cpu_s for slot in slots)
    return cores * fmean(map(_work_s, slots)) / cpu_s if cores and cpu_s else math.inf


def _work_s(slot: Slot) -> float:
    """Return the seconds that the slot would take for a batch if it had a core of its own."""
    return max(slot.batch_s - slot.batch_delay_s, min(slot.batch_cpu_s, slot.batch_s))
