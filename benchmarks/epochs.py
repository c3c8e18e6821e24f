"""Cost of an epoch of a pure loader, which is made in a process of its own, beside the same loader vouched, which is
one object in one process over all epochs.

    python -m benchmarks.epochs [--epochs 60] [--megabytes 200]

Both loaders yield 32 small batches an epoch without any work. They are measured in turn, in one slot: "ms" is the
median time of an epoch in the training loop, and "cpu_ms" the processor time of the slot's processes for each epoch.
"pss_mb" is the memory of the processes of four slots, in proportional shares, in the middle of the third epoch, if each
loader holds so many megabytes of Python objects: "read" of which the epoch has read each one, or "held" none. It prints
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from benchmarks.processes import tree

from penstock.client import Appliance, DataExecutor, DataLoader

SHORT, LONG = 32, 256
"""Batches in an epoch whose time or memory is measured: a long one is still being made when the loop is in its middle.
"""
TARGETS = {"more_ms": 15.0, "cpu_ms": 25.0, "pss": 1.05}
_OBJECT = 1024
"""Size of one object in bytes, so that its header of a few words is not what is measured."""
TICKS = os.sysconf("SC_CLK_TCK")


class Loader:
    """Yields small batches. objects: number of Python objects that it holds; reads: whether an epoch reads them."""

    def __init__(self, batches: int, objects: int, reads: bool) -> None:
        self.objects = [str(number).ljust(_OBJECT) for number in range(objects)]
        self.batches, self.reads, self.place = batches, reads, 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.place, self.batches):
            self.place = number + 1
            if self.reads:
                for text in self.objects[number :: self.batches]:
                    hash(text[:1])
            yield torch.full((256,), number)
        self.place = 0

    def set_epoch(self, epoch: int) -> None:
        pass

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Vouched(Loader):
    exact_states = True


def pure(*given: Any) -> Any:
    return Loader(*given)


def vouched(*given: Any) -> Any:
    return Vouched(*given)


def _of_slots() -> list[int]:
    """Return the processes that run this program's slots, whatever their kind."""
    titles = ("penstock-runner", "penstock-epoch")
    return [process.pid for process in tree(os.getpid()).values() if process.command.startswith(titles)]


def _processor_ms(pids: list[int]) -> float:
    """Return the processor time of processes and of their reaped children."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15]))
    return total * 1000 / TICKS


def _pss_mb() -> float:
    total = 0
    for pid in _of_slots():
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


class _Runs:
    def __init__(self, input_fn: Any, slots: int, batches: int, objects: int = 0, reads: bool = False) -> None:
        self.appliance = Appliance(num_workers_per_box=slots, seed=7)
        self.loader = DataLoader(input_fn, batches, objects, reads)

    def epoch(self) -> float:
        started = time.perf_counter()
        for _ in DataExecutor(self.loader, appliance=self.appliance):
            pass
        return 1000 * (time.perf_counter() - started)

    def in_the_middle(self, slots: int) -> float:
        batches = iter(DataExecutor(self.loader, appliance=self.appliance))
        list(islice(batches, slots * LONG // 2))
        found = _pss_mb()
        list(batches)
        return found


def times(epochs: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for _ in range(2):
        for input_fn in (vouched, pure):
            runs = _Runs(input_fn, 1, SHORT)
            with runs.appliance:
                for _ in range(4):
                    runs.epoch()
                pids = [min(_of_slots())]
                before = _processor_ms(pids)
                spans = [runs.epoch() for _ in range(epochs)]
                spent = (_processor_ms(pids) - before) / epochs
            best = found.setdefault(input_fn.__name__, {"ms": float("inf"), "cpu_ms": float("inf")})
            best["ms"] = min(best["ms"], round(statistics.median(spans), 2))
            best["cpu_ms"] = min(best["cpu_ms"], round(spent, 2))
    return found


def memory(megabytes: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for reads in (False, True):
        row = found[("held", "read")[reads]] = {}
        for input_fn in (vouched, pure):
            runs = _Runs(input_fn, 4, LONG, (megabytes << 20) // _OBJECT, reads)
            with runs.appliance:
                for _ in range(2):
                    runs.epoch()
                row[input_fn.__name__] = round(runs.in_the_middle(4), 1)
        row["ratio"] = round(row["pure"] / row["vouched"], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--megabytes", type=int, default=200, help="0: measure no memory")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = times(given.epochs)
    more = {name: round(found["pure"][name] - found["vouched"][name], 2) for name in ("ms", "cpu_ms")}
    pss = memory(given.megabytes) if given.megabytes else {}
    print(json.dumps({"times": found, "more": more, "pss_mb": pss, "targets": TARGETS}))


if __name__ == "__main__":
    main()
