"""Speed of many worker slots that deliver to one box, and the time until the first batch. The program prints one line
of JSON.

    python -m benchmarks.slots --slots 16 --seconds 3 [--lane auto]

Each slot's source sleeps 20 ms for a batch, so the sum of the sources' rates is known, and 64 of them need no more than
two cores. Each batch holds its slot and its number there: the order is checked at every batch. One slot measures the
start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Generator
from itertools import islice
from typing import Any, cast

from benchmarks.loaders import Asleep, asleep
from benchmarks.measure import percentile
from benchmarks.penstock_path import ROLES
from benchmarks.processes import adopt_orphans, cpu_by_role, memory_by_role, ring_bytes

from penstock.client import Appliance, DataExecutor, DataLoader

PAUSE_S = 1.0
"""Seconds for which the loop pauses, so that each source can fill its ring: 20 ms a batch, at most 32 entries."""
WAIT_S = 0.002
"""Seconds of a `next()` above which it counts as having waited for a source."""


class Order:
    """Check of the order of batches: the slots must come in turn, and each slot's batches in their order."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.step = 0

    def check(self, batch: Any) -> None:
        slot, index = int(batch[0]), int(batch[1])
        if (slot, index) != (self.step % self.slots, self.step // self.slots):
            raise SystemExit(
                f"step {self.step} must be batch {self.step // self.slots} of slot {self.step % self.slots}, got batch "
                f"{index} of slot {slot}: a fault in the order of batches"
            )
        self.step += 1


def one_source(seconds: float) -> float:
    """Return the batches per second of one source (the dataset of a slot) that is iterated in this process, without
    Penstock."""
    batches, count = iter(Asleep(0)), 0
    started = time.perf_counter()
    while time.perf_counter() < started + seconds:
        next(batches)
        count += 1
    return count / (time.perf_counter() - started)


def ready_batches(batches: Generator[Any, None, None], order: Order, rate: float) -> float:
    """Return the number of batches that are ready after the loop has paused: the number that the loop then gets without
    a wait, minus the number that the sources made meanwhile.

    rate: batches per second of all sources together.
    """
    time.sleep(PAUSE_S)
    started = now = time.perf_counter()
    count = 0
    for batch in batches:
        before, now = now, time.perf_counter()
        order.check(batch)
        if now - before > WAIT_S:
            break
        count += 1
    return max(0.0, count - (now - started) * rate)


def run(slots: int, seconds: float, lane: str) -> dict[str, Any]:
    root = os.getpid()
    alone = one_source(min(1.0, seconds))
    os.environ["PENSTOCK_LANE"] = lane
    begun = time.perf_counter()
    with Appliance(num_workers_per_box=slots, timeout_s=60) as appliance:
        created = time.perf_counter()
        batches = cast(Generator[Any, None, None], iter(DataExecutor(DataLoader(asleep), appliance=appliance)))
        order = Order(slots)
        order.check(next(batches))
        first = time.perf_counter()
        for batch in islice(batches, slots - 1):
            order.check(batch)
        last = time.perf_counter()
        # Batches that were prepared during the start do not count.
        until = time.perf_counter() + seconds / 4
        while time.perf_counter() < until:
            order.check(next(batches))
        used, count, waits = cpu_by_role(root, ROLES), 0, list[float]()
        started = now = time.perf_counter()
        while now < started + seconds or count % slots:
            batch = next(batches)
            before, now = now, time.perf_counter()
            waits.append(now - before)
            order.check(batch)
            count += 1
        span = time.perf_counter() - started
        used = {role: s - used.get(role, 0.0) for role, s in cpu_by_role(root, ROLES).items()}
        memory, rings = memory_by_role(root, ROLES), ring_bytes(root)
        ready = ready_batches(batches, order, alone * slots)
        batches.close()
        second = _second_start(appliance)
    return {
        "slots": slots,
        "alone": alone,
        "rate": count / span,
        "share": count / span / (alone * slots),
        "appliance_s": created - begun,
        "first_batch_s": first - created,
        "last_slot_s": last - created,
        "second_loader_s": second,
        "cpu_s": {role: s / span for role, s in used.items()},
        "memory": memory,
        "rings": rings,
        "ready": ready,
        "steps": order.step,
        "latency_us": {"p50": 1e6 * percentile(waits, 0.5), "p99": 1e6 * percentile(waits, 0.99)},
    }


def _second_start(appliance: Appliance) -> float:
    """Return the seconds from `iter()` to the first batch of a second loader, whose workers' daemon runs already."""
    loader = DataLoader(asleep)
    started = time.perf_counter()
    batches = cast(Generator[Any, None, None], iter(DataExecutor(loader, appliance=appliance)))
    next(batches)
    took = time.perf_counter() - started
    batches.close()
    loader.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of the span of the rate")
    parser.add_argument("--lane", default="auto", help="auto or tcp")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="'set_vital'")
    adopt_orphans()
    print(json.dumps(run(given.slots, given.seconds, given.lane)))


if __name__ == "__main__":
    main()
