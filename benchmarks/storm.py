"""Many jobs that are opened at the same moment: do all of them run, how long does it take, and what does it cost?

    python -m benchmarks.storm [--jobs 50] [--timeout-s 120]

A coordinator and two daemons on this machine, with room for all. Each job has a seed of its own, so each needs an
interpreter of its own, and takes 20 batches. Prints one JSON object: how many jobs ran, seconds to their first batches
(median, longest), the most processes and memory (PSS of all, MiB) at a time, the highest load, and what was lost. Ends
with 1 if a job failed, or a slot or a worker was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.processes import tree
from benchmarks.recovery import Fleet, slow_batches

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.rpc.calls import CoordinatorClient

__all__ = ["main"]

STEPS = 20


def _job(fleet: Fleet, number: int, timeout_s: float, together: threading.Barrier) -> float:
    """Seconds until its first batch."""
    name = f"storm{number}"
    appliance = Appliance(
        fleet.address, job=name, token=fleet.token, seed=number, num_boxes=1, box=0, timeout_s=timeout_s
    )
    loader = DataLoader(slow_batches)
    together.wait()
    began = time.monotonic()
    first = 0.0
    for _ in DataExecutor(loader, num_steps=STEPS, appliance=appliance):
        first = first or time.monotonic() - began
    loader.close()
    appliance.close()
    return first


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def _watch(peaks: dict[str, float], over: threading.Event) -> None:
    while not over.wait(1.0):
        processes = tree(os.getpid())
        memory = sum(map(_pss, processes)) / 1024
        for name, value in (("processes", len(processes)), ("memory_mib", memory), ("load", os.getloadavg()[0])):
            peaks[name] = max(peaks.get(name, 0.0), round(value, 1))


def run(jobs: int, timeout_s: float) -> dict[str, Any]:
    """Everything that was found."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Fleet(folder, slots=jobs)) as fleet:
        peaks: dict[str, float] = {}
        over, together = threading.Event(), threading.Barrier(jobs)
        watching = threading.Thread(target=_watch, args=(peaks, over))
        watching.start()
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(_job, fleet, number, timeout_s, together) for number in range(jobs)]
            failures = [str(error)[:500] for future in futures if (error := future.exception()) is not None]
            firsts = sorted(future.result() for future in futures if future.exception() is None)
        over.set()
        watching.join()
        with CoordinatorClient(fleet.address, fleet.token) as client:
            lost = [event.text for event in client.status().events if event.kind in ("slot lost", "worker lost")]
    middle, longest = (round(statistics.median(firsts), 1), round(firsts[-1], 1)) if firsts else (0.0, 0.0)
    return {
        "jobs": jobs,
        "ran": len(firsts),
        "first_batch_s": {"median": middle, "longest": longest},
        "most": peaks,
        "lost": lost,
        "failures": failures[:3],
    }


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    options = parser.parse_args()
    found = run(options.jobs, options.timeout_s)
    print(json.dumps(found, indent=1))
    return 0 if found["ran"] == options.jobs and not found["lost"] else 1


if __name__ == "__main__":
    sys.exit(main())
