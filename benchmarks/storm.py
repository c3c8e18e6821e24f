"""Check that all requests succeed when many jobs open, or many boxes save, at the same moment.

    python -m benchmarks.storm [--jobs 50] [--timeout-s 120]
    python -m benchmarks.storm --save [--boxes 200] [--rounds 3] [--timeout-s 600]

Both run a coordinator and two worker daemons on this machine, with enough slots. Each prints one JSON object, with the
largest number of processes and memory (PSS of all, MiB) at a time, the highest load, and the lost slots and workers.

The first command starts jobs. Each has a seed of its own, so each needs an interpreter of its own on the workers, and
takes 20 batches. The command prints the number of jobs, and the seconds until their first batches (median, longest).
Ends with 1 if a job failed, or a slot or a worker was lost.

The second command saves. It runs one job of --boxes boxes with one worker each. After every few steps all boxes call
`state_dict()` at once, at a step that was not announced as a checkpoint step; after the last round they do so once more
at an announced one. The command prints the seconds from the call to the state by round (median, longest), and whether
batches and states are correct. Ends with 1 if they are not, a box failed, a worker missed its lease, or a slot moved.
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
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.processes import tree
from benchmarks.recovery import Fleet, Slow, slow_batches

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.state.assignment import current_assignment

__all__ = ["boxes_batches", "main"]

STEPS = 20
"""Number of batches of each job."""
BETWEEN = 7
"""Number of steps from one save of all boxes to the next."""
LOST = ("worker lost", "slot lost", "slot moved")
"""Kinds of events that must not be in the coordinator's event log."""
APART = 10**6
"""Difference between the numbers that one box delivers and those of the next box."""


def _job(fleet: Fleet, number: int, timeout_s: float, together: threading.Barrier) -> float:
    """Run one job to its end. Return the seconds until its first batch. `together`: barrier at which all jobs wait, to
    open at the same moment."""
    name = f"storm{number}"
    appliance = Appliance(fleet.address, job=name, seed=number, num_boxes=1, box=0, timeout_s=timeout_s)
    loader = DataLoader(slow_batches)
    together.wait()
    began = time.monotonic()
    first = 0.0
    for _ in DataExecutor(loader, num_steps=STEPS, appliance=appliance):
        first = first or time.monotonic() - began
    loader.close()
    appliance.close()
    return first


class Numbered(Slow):
    """Loader of numbers that tell their box and step, so that each delivered batch can be checked."""

    def __iter__(self) -> Iterator[int]:
        first = APART * current_assignment().box
        return (first + number for number in super().__iter__())


def boxes_batches() -> Numbered:
    """Return the loader of the boxes that save: the input_fn."""
    return Numbered()


class Savers:
    """Boxes of one job that save at the same moments."""

    def __init__(self, fleet: Fleet, boxes: int, rounds: int, timeout_s: float) -> None:
        self._fleet, self._boxes, self._timeout_s = fleet, boxes, timeout_s
        self.steps = [BETWEEN * (number + 1) for number in range(rounds + 1)]
        """Steps at which all boxes save. Only the last one is announced as a checkpoint step."""
        self._together = threading.Barrier(boxes)
        self._lock = threading.Lock()
        self.seconds: dict[int, list[float]] = {step: [] for step in self.steps}
        self.states: dict[int, set[str]] = {step: set() for step in self.steps}
        self.firsts: list[float] = []
        """Seconds until the first batch of each box."""
        self.wrong: list[str] = []
        """Descriptions of the batches that were not the expected ones."""

    def run(self, box: int) -> None:
        """Run the loop of one box, with all its saves, from its start to its end."""
        try:
            with Appliance(
                self._fleet.address,
                job="saves",
                num_workers_per_box=1,
                num_boxes=self._boxes,
                box=box,
                timeout_s=self._timeout_s,
            ) as appliance:
                self._train(box, appliance)
        except BaseException:
            self._together.abort()  # the others would wait for this one
            raise

    def _train(self, box: int, appliance: Appliance) -> None:
        loader = DataLoader(boxes_batches)
        executor = DataExecutor(loader, self.steps[-1], self.steps[-1:], appliance=appliance)
        began = time.monotonic()
        for step, batch in enumerate(executor, 1):
            if step == 1:
                self.firsts.append(time.monotonic() - began)
            if batch != APART * box + step:
                self.wrong.append(f"box {box}, step {step}: {batch}")
            if step in self.seconds:
                self._together.wait(self._timeout_s)
                began = time.monotonic()
                state = loader.state_dict()
                took = time.monotonic() - began
                text = repr(state)
                with self._lock:
                    self.seconds[step].append(took)
                    self.states[step].add(text)
        self._together.wait(self._timeout_s)
        loader.close()


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


@contextlib.contextmanager
def _fleet(slots: int, found: dict[str, Any]) -> Iterator[Fleet]:
    """Context manager that runs a coordinator and two daemons with `slots` slots each. At its end it puts their cost
    and the lost slots and workers into `found`."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Fleet(folder, slots=slots)) as fleet:
        peaks: dict[str, float] = {}
        over = threading.Event()
        watching = threading.Thread(target=_watch, args=(peaks, over))
        watching.start()
        try:
            yield fleet
        finally:
            over.set()
            watching.join()
        with CoordinatorClient(fleet.address, fleet.token, insecure=True) as client:
            events = client.status().events
        found["most"] = peaks
        lost = Counter(event.kind for event in events)
        found["lost"] = {kind: lost[kind] for kind in LOST if lost[kind]}


def _spread(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"median": 0.0, "longest": 0.0}
    return {"median": round(statistics.median(seconds), 1), "longest": round(max(seconds), 1)}


def run(jobs: int, timeout_s: float) -> dict[str, Any]:
    """Open `jobs` jobs at the same moment, and return all results by name."""
    found: dict[str, Any] = {"jobs": jobs}
    with _fleet(jobs, found) as fleet, ThreadPoolExecutor(jobs) as pool:
        together = threading.Barrier(jobs)
        futures = [pool.submit(_job, fleet, number, timeout_s, together) for number in range(jobs)]
        failures = [str(error)[:500] for future in futures if (error := future.exception()) is not None]
        firsts = [future.result() for future in futures if future.exception() is None]
    return found | {"ran": len(firsts), "first_batch_s": _spread(firsts), "failures": failures[:3]}


def save(boxes: int, rounds: int, timeout_s: float) -> dict[str, Any]:
    """Save on all boxes at the same moments, and return all results by name."""
    found: dict[str, Any] = {"boxes": boxes}
    with _fleet(boxes, found) as fleet:
        savers = Savers(fleet, boxes, rounds, timeout_s)
        with ThreadPoolExecutor(boxes) as pool:
            futures = [pool.submit(savers.run, box) for box in range(boxes)]
            errors = [error for future in futures if (error := future.exception()) is not None]
    failures = [repr(error)[:500] for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    *unannounced, announced = savers.steps
    return found | {
        "first_batch_s": _spread(savers.firsts),
        "state_s": {
            "unannounced": [_spread(savers.seconds[step]) for step in unannounced],
            "announced": _spread(savers.seconds[announced]),
        },
        "batches_equal": not savers.wrong,
        "states_equal": all(len(states) == 1 for states in savers.states.values()),
        "failures": failures[:3],
    }


def main() -> int:
    """Run the check, and print its results. Return the exit status: 0 if all requests succeeded, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--save", action="store_true", help="boxes of one job that save at once, instead of jobs")
    parser.add_argument("--boxes", type=int, default=200, help="with --save")
    parser.add_argument("--rounds", type=int, default=3, help="with --save: saves at steps that were not announced")
    parser.add_argument("--timeout-s", type=float, help="120, or 600 with --save")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # recoveries warn, and are counted
    if options.save:
        found = save(options.boxes, options.rounds, options.timeout_s or 600.0)
        good = found["batches_equal"] and found["states_equal"] and not found["failures"]
    else:
        found = run(options.jobs, options.timeout_s or 120.0)
        good = found["ran"] == options.jobs
    print(json.dumps(found, indent=1))
    return 0 if good and not found["lost"] else 1


if __name__ == "__main__":
    # By its own name, because workers import the input from there.
    from benchmarks import storm

    sys.exit(storm.main())
