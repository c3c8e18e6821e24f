"""Demand: the number of workers that the open runs need, computed from measurements.

A loop that makes r steps per second and waits for a share w of the time would make r / (1 - w) without waits. A slot
whose batches take b seconds of work gives 1 / b batches per second. So a box needs r / (1 - w) * b slots, and some
more. Waiting for a processor is not work, because additional slots would only wait more. A slot that takes c seconds of
processor time for b of work keeps c / b cores busy, so n cores run n * b / c slots at full speed.

A run's number of workers is fixed while it is open, so the advice is for its next start,
`Appliance(num_workers_per_box=)`, on the present machines. The recommended number of daemons has capacity for all slots
that open runs have or need; cores do not limit it, because new machines bring their own. An autoscaler can use it:
penstock_workers_recommended in docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from penstock.appliance.core.bottleneck import LEAST_S
from penstock.appliance.core.entities import Attempt, Box, BoxPresence, Slot, Worker
from penstock.proto.v1 import coordinator_pb2 as pb

MAX_GROWTH = 4
"""Largest ratio of recommended to present slots: few slots do not predict the behaviour of many more."""
HEADROOM = 1.25
"""Factor on the computed number of slots, because batches do not all take equally long."""
MAX_WAIT_SHARE = 0.98
"""Largest share of waiting that the formula uses: a loop that only waits would need infinitely many workers."""


@dataclass(frozen=True)
class WorkerAdvice:
    """Advice for one run. All fields are 0 if too little is measured yet."""

    needed: int = 0
    """Slots that each box would need if there were enough cores."""
    workers_per_box: int = 0
    """Recommended slots per box on the present machines."""
    busy_cores: int = 0
    """Cores of the workers' machines if the run's slots keep all of them busy; else 0."""


def advise(attempt: Attempt, cores: int) -> WorkerAdvice:
    """Return the advice for the attempt. `cores`: of all workers' machines; 0 = not known."""
    boxes = _live(attempt)
    slots = [slot for box in boxes for slot in box.slots if slot.phase == pb.READY and slot.batch_s > 0]
    needed = _needed(attempt, boxes, slots)
    if not needed:
        return WorkerAdvice()
    most = _carried(cores, slots) / len(boxes)
    busy = cores if most < attempt.num_workers + 0.5 else 0
    return WorkerAdvice(needed, max(1, round(min(needed, most))), busy)


def cores(workers: Iterable[Worker]) -> int:
    """Return the cores of all machines whose workers take slots, each once; 0 if a worker reported none."""
    found: dict[str, int] = {}
    for worker in workers:
        if worker.registered and not worker.draining:
            if not worker.cores:
                return 0
            found[worker.host_id] = max(found.get(worker.host_id, 0), worker.cores)
    return sum(found.values())


def daemons(attempts: Iterable[Attempt], workers: Iterable[Worker]) -> int:
    """Return the daemons that all open runs need, each of the median capacity of those that take slots, or 1."""
    slots = 0
    for attempt in attempts:
        slots += len(_live(attempt)) * max(attempt.num_workers, advise(attempt, 0).needed)
    capacities = [worker.capacity for worker in workers if worker.registered and not worker.draining]
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
    """Return the number of slots that keep `cores` cores busy, if they work like `slots`; inf if not known."""
    cpu_s = fmean(slot.batch_cpu_s for slot in slots)
    return cores * fmean(map(_work_s, slots)) / cpu_s if cores and cpu_s else math.inf


def _work_s(slot: Slot) -> float:
    """Return the seconds of work for a batch, if the slot had a core of its own."""
    return max(slot.batch_s - slot.batch_delay_s, min(slot.batch_cpu_s, slot.batch_s))
