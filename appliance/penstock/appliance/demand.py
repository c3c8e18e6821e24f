"""How many workers the open runs need, from what is measured.

Demand. A loop that took r steps a second and waited through a share w of the time would take r / (1 - w) if it never
waited. Supply. A slot whose batches take it b seconds of work gives 1 / b of them a second. So a box needs
r / (1 - w) * b slots, and some more, for batches do not all take equally long.

A run's number of workers is fixed while it is open, so what it should have is for its next start
(`Appliance(num_workers_per_box=)`), and the number of daemons is that which holds all slots that open runs have, or
should have if that is more. An autoscaler may follow it: penstock_workers_recommended in docs/metrics.md.
"""

from __future__ import annotations

import math
from statistics import fmean, median

from penstock.appliance.books import Books
from penstock.appliance.bottleneck import LEAST_S
from penstock.appliance.model import Attempt, Place
from penstock.proto.v1 import coordinator_pb2 as pb

MOST_TIMES = 4
"""What is measured with so many workers says little of many times as many: then it is to be measured there."""
HEADROOM = 1.25
"""Times what would do if all batches took equally long."""
MOST_WAITED = 0.98
"""A loop that does nothing but wait asks for any number of workers."""


def workers_per_box(attempt: Attempt) -> int:
    """That the run should have; 0 if too little is known yet."""
    boxes = [box for box in attempt.boxes.values() if box.place is Place.LIVE]
    took = [slot.batch_s for box in boxes for slot in box.slots if slot.phase == pb.READY and slot.batch_s > 0]
    seen = [box for box in boxes if box.usual_span_s >= LEAST_S]
    rates = [box.usual_steps_per_s / (1 - min(box.waits.share, MOST_WAITED)) for box in seen]
    if not took or not any(rates):
        return 0
    return max(1, min(math.ceil(max(rates) * fmean(took) * HEADROOM), MOST_TIMES * attempt.num_workers))


def daemons(books: Books) -> int:
    """Worker daemons of the size that is usual among those that are there, for all open runs."""
    slots = 0
    for attempt in books.open_attempts():
        boxes = sum(box.place is Place.LIVE for box in attempt.boxes.values())
        slots += boxes * max(attempt.num_workers, workers_per_box(attempt))
    capacities = [worker.capacity for worker in books.workers.values() if worker.registered and not worker.draining]
    return math.ceil(slots / (median(capacities) if capacities else 1))
