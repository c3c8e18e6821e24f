"""Measurement of one mode (way to deliver batches), in four parts: a warm-up, then throughput and processor time,
memory, and latency.

The loop only holds a batch until it takes the next one, as a `for` loop does. For the throughput the clock is read
about a hundred times a second, not at each batch. For the latency each `next()` is timed by itself, later. This module
imports only the standard library, because it runs in the peers' environments too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, Times
from benchmarks.processes import CONSUMER, Role, cpu_by_role, cpu_s, memory_by_role, ring_bytes

__all__ = ["batch_bytes", "consume", "count_of", "latencies", "measure", "percentile"]

Clock = Callable[[], float]
CHECK_S = 0.01
"""Seconds between two readings of the clock while throughput is measured."""


def consume(
    batches: Iterator[Any], seconds: float, at_least: int, at_most_s: float, clock: Clock = time.perf_counter
) -> tuple[int, float]:
    """Take batches for `seconds` seconds. Return their number, and the seconds that this took.

    at_least: smallest number of batches to take, even if this takes longer, up to `at_most_s` seconds.
    """
    started = now = clock()
    count, group = 0, 1
    batch: Any = None
    while (now < started + seconds or count < at_least) and now < started + at_most_s:
        for batch in islice(batches, group):  # noqa: B007  # held until the next one comes
            count += 1
        before, now = now, clock()
        group = max(1, min(group * 2, round(group * CHECK_S / max(now - before, 1e-9))))
    return count, now - started


def latencies(
    batches: Iterator[Any], seconds: float, at_least: int, at_most_s: float, clock: Clock = time.perf_counter
) -> list[float]:
    """Take batches for `seconds` seconds, and return the seconds of each single `next()`. at_least, at_most_s: as for
    consume()."""
    times = [started := clock()]
    batch: Any = None
    for batch in batches:  # noqa: B007
        now = clock()
        times.append(now)
        if (now >= started + seconds and len(times) > at_least) or now >= started + at_most_s:
            break
    return [after - before for before, after in pairwise(times)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value such that a share of at least `share` of all values is not above it (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def batch_bytes(batch: Any) -> int:
    """Return the number of bytes in all tensors or arrays of a batch, of torch, numpy or TensorFlow."""
    if isinstance(batch, dict):
        return sum(batch_bytes(leaf) for leaf in batch.values())
    if isinstance(batch, int):
        return batch  # a floor (plain copy) yields no batch but the number of bytes that it moved
    nbytes = getattr(batch, "nbytes", None)
    return int(nbytes if nbytes is not None else batch.numpy().nbytes)


def count_of(counter: str) -> int:
    """Return the number in a file in which a source counts the calls of its state_dict; 0 without a file."""
    return int.from_bytes(Path(counter).read_bytes(), sys.byteorder) if counter else 0


def measure(batches: Iterator[Any], case: Case, times: Times, roles: Sequence[Role]) -> dict[str, Any]:
    """Measure one mode with one case. batches: iterator without end over the case's batches. ValueError is raised for a
    batch of another size.

    Return a dict: `batches`, `span_s`, `thread_s` (processor seconds of this thread), `cpu_s` (processor seconds by
    role), `states` (calls of the source's state_dict in the span, where it counts them), `memory` (see
    memory_by_role), `rings` (bytes of each), `latency_us` (p50, p99, samples).
    """
    root = os.getpid()
    first = next(batches)
    if batch_bytes(first) != case.nbytes:
        raise ValueError(
            f"a batch must have {case.nbytes} bytes, as its case says, got {batch_bytes(first)}: correct the source of "
            "this mode"
        )
    del first
    consume(batches, times.warm_s, 3, times.at_most_s)
    states = count_of(case.counter)
    # Reading /proc of a whole tree takes milliseconds. So that they do not count, this process's own time is read after
    # /proc at the start, and before it at the end.
    before = {**cpu_by_role(root, roles), CONSUMER: cpu_s(root)}
    thread = time.thread_time()
    count, span = consume(batches, times.span_s, times.at_least, times.at_most_s)
    thread = time.thread_time() - thread
    own = cpu_s(root)
    after = {**cpu_by_role(root, roles), CONSUMER: own}
    states = count_of(case.counter) - states
    memory, rings = memory_by_role(root, roles), ring_bytes(root)
    # Batches were prepared during these reads, so the first ones after them would show no latency.
    consume(batches, times.latency_s / 4, 3, times.at_most_s)
    waits = latencies(batches, times.latency_s, times.at_least, times.at_most_s)
    return {
        "batches": count,
        "span_s": span,
        "thread_s": thread,
        "cpu_s": {role: after[role] - before.get(role, 0.0) for role in after},
        "states": states,
        "memory": memory,
        "rings": rings,
        "latency_us": {
            "p50": 1e6 * percentile(waits, 0.5),
            "p99": 1e6 * percentile(waits, 0.99),
            "samples": len(waits),
        },
    }
