"""`make simulate`: thousands of histories over two processes, or one with its diary.

Prints the rate, what was injected, and the seeds that failed, each with the promise that was broken. A seed that failed
fails again, anywhere, until the code has changed: `make simulate SEED=n` shows what happened.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from simulated.scenario import Outcome, simulate

__all__ = ["main"]

PROCESSES = 2


def quiet() -> None:
    """Without the coordinator's complaints."""
    logging.getLogger("penstock.appliance").setLevel(logging.CRITICAL)  # full disks are ours


def _one(seed: int) -> int:
    outcome = simulate(seed, tracing=True)
    print("\n".join(outcome.diary))
    print(f"seed {seed}: {outcome.events} events in {outcome.virtual_s:.1f} s of virtual time")
    print(f"seed {seed}: {outcome.broken or 'every promise was kept'}")
    return 1 if outcome.broken else 0


def _many(first: int, count: int) -> int:
    began = time.monotonic()
    faults: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    failed: list[Outcome] = []
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, spawning, initializer=quiet) as pool:
        for outcome in pool.map(simulate, range(first, first + count), chunksize=20):
            faults.update(outcome.faults)
            totals["events"] += outcome.events
            totals["batches"] += outcome.deliveries
            totals["states saved"] += outcome.saves
            totals["states refused by name"] += outcome.unsaved
            totals["virtual seconds"] += round(outcome.virtual_s)
            if outcome.broken:
                failed.append(outcome)
                print(f"seed {outcome.seed} FAILED: {outcome.broken}", flush=True)
    took_s = time.monotonic() - began
    print(f"{count} seeds in {took_s:.1f} s: {60 * count / took_s:.0f} a minute over {PROCESSES} processes")
    print(", ".join(f"{number} {what}" for what, number in totals.most_common()))
    print("injected: " + ", ".join(f"{number} x {kind}" for kind, number in faults.most_common()))
    print(f"{len(failed)} failed" + (f": {sorted(outcome.seed for outcome in failed)}" if failed else ""))
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed, with its diary")
    parser.add_argument("--seeds", type=int, default=2000, help="so many")
    parser.add_argument("--first", type=int, default=0, help="from this one on")
    arguments = parser.parse_args()
    quiet()
    return _one(arguments.seed) if arguments.seed is not None else _many(arguments.first, arguments.seeds)
