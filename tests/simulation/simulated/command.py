"""`make simulate`: thousands of histories over two processes, or one with its diary.

Prints the seeds that failed, each with the promise that was broken. A seed that failed fails again, anywhere, until the
code has changed: `make simulate SEED=n` shows what happened.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
from collections import Counter

from simulated.scenario import simulate

__all__ = ["main"]

PROCESSES = 2


def quiet() -> None:
    """Without the coordinator's complaints."""
    logging.getLogger("penstock.appliance").setLevel(logging.CRITICAL)  # full disks are ours


def _one(seed: int) -> int:
    outcome = simulate(seed, tracing=True)
    print(*outcome.diary, f"seed {seed}: {outcome.broken or 'every promise was kept'}", sep="\n")
    return 1 if outcome.broken else 0


def _many(first: int, count: int) -> int:
    faults: Counter[str] = Counter()
    failed: list[int] = []
    with multiprocessing.get_context("spawn").Pool(PROCESSES, quiet) as pool:
        for outcome in pool.imap(simulate, range(first, first + count), chunksize=20):
            faults.update(outcome.faults)
            if outcome.broken:
                failed.append(outcome.seed)
                print(f"seed {outcome.seed} FAILED: {outcome.broken}", flush=True)
    print("injected: " + ", ".join(f"{number} x {kind}" for kind, number in faults.most_common()))
    print(f"{len(failed)} of {count} seeds failed: {failed}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed, with its diary")
    parser.add_argument("--seeds", type=int, default=2000, help="so many")
    parser.add_argument("--first", type=int, default=0, help="from this one on")
    arguments = parser.parse_args()
    quiet()
    return _one(arguments.seed) if arguments.seed is not None else _many(arguments.first, arguments.seeds)
