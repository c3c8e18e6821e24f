"""Speed of batches to a device through Penstock's whole public path, compared with a plain copy of page-locked memory
and with torch's DataLoader.

    python benchmarks/device.py [--device cuda|cuda:N|cpu] [--workers N] [--rounds 3] [--max-bytes N] [--json FILE]

Every mode transfers the same bytes of ready batches, and the loop does nothing with them; the time ends when the device
has all of them.

    plain copy      from page-locked buffers, as many as a ring has slots, into memory that is there already: what the
                    link gives (with --device cpu: what memcpy gives while nothing else uses the memory)
    penstock        Appliance(device=...), N workers on this machine. Target on CUDA: 0.9 of the plain copy
    host batches    Appliance() without a device, and .to(device, non_blocking=True) in the loop
    torch           torch's DataLoader with N workers and pin_memory=True, and .to(device, non_blocking=True)

`loop us` is processor time of the loop's thread per batch. The last size is a dict of 8 tensors of 8 KiB, for the cost
of many leaves. One worker fills a ring at most at memcpy's speed, so use as many as the link needs. Rounds are
interleaved and medians reported; figures are comparable only within one run on one machine.

Exit codes: 0 measured; 3 nothing was measured, because there is no such device here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.data

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.stream.device import check_device
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.lane.ring import entries_for

SIZES = {64 << 10: 8000, 256 << 10: 4000, 1 << 20: 2000, 4 << 20: 600, 16 << 20: 150, 64 << 20: 40}
"""Number of batches that Penstock delivers in one round, by the size of a batch in bytes."""
LEAVES, LEAF = 8, 8 << 10
DATALOADER_SHARE = 8
"""Factor by which a round of torch's DataLoader has fewer batches, because it is slower."""
TARGET = 0.9
NO_DEVICE = 3


class Ready(torch.utils.data.IterableDataset[Any]):
    """Dataset that repeats one batch, as a new tensor object each time. torch's DataLoader moves each tensor that it
    sends to shared memory. It would not copy the same object a second time, and so seem too fast."""

    def __init__(self, size: int, leaves: int, batches: int) -> None:
        self.size = size
        self.leaves = leaves
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        ready = [np.random.randint(0, 255, self.size // max(1, self.leaves), np.uint8) for _ in range(self.leaves or 1)]
        for _ in range(self.batches):
            if self.leaves:
                yield {f"leaf{number}": torch.from_numpy(leaf) for number, leaf in enumerate(ready)}
            else:
                yield torch.from_numpy(ready[0])


def source(size: int, leaves: int, batches: int) -> Ready:
    """Return the loader of a worker, which yields `batches` batches of `size` bytes with `leaves` tensors each. This is
    the input_fn."""
    return Ready(size, leaves, batches)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a copy of a batch on the device. On the CPU the batch is cloned, because `to` would not copy it."""
    if isinstance(batch, dict):
        return {name: moved(leaf, device) for name, leaf in batch.items()}
    return batch.to(device, non_blocking=True, copy=True)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(batches: Iterable[Any], device: torch.device) -> tuple[float, float]:
    """Read all batches. Return batches per second, and this thread's processor time for each batch in microseconds,
    both from the first batch on."""
    iterator = iter(batches)
    next(iterator)
    settle(device)
    started, cpu, count = time.perf_counter(), time.thread_time(), 0
    for _ in iterator:
        count += 1
    cpu = time.thread_time() - cpu
    settle(device)
    return count / (time.perf_counter() - started), 1e6 * cpu / count


def plain_copy(device: torch.device, size: int, leaves: int, batches: int) -> tuple[float, float]:
    count = entries_for(size)
    host = [torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(count)]
    there = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(count)]

    def copies() -> Iterator[None]:
        for number in range(batches + 1):
            there[number % count].copy_(host[number % count], non_blocking=True)
            yield None

    return rate(copies(), device)


def penstock(
    appliance: Appliance, device: torch.device, move: bool, size: int, leaves: int, batches: int
) -> tuple[float, float]:
    workers = appliance.settings.num_workers_per_box
    loader = DataLoader(source, size, leaves, batches // workers + 1)
    executor = DataExecutor(loader, appliance=appliance)
    try:
        return rate((moved(batch, device) for batch in executor) if move else executor, device)
    finally:
        loader.close()


def torch_dataloader(device: torch.device, workers: int, size: int, leaves: int, batches: int) -> tuple[float, float]:
    loader: Any = torch.utils.data.DataLoader(
        Ready(size, leaves, max(2, batches // DATALOADER_SHARE // workers)),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
    )
    return rate((moved(batch, device) for batch in loader), device)


def measure(device: torch.device, workers: int, rounds: int, max_bytes: int) -> list[dict[str, Any]]:
    shapes = [(size, 0, batches) for size, batches in SIZES.items() if size <= max_bytes]
    shapes.append((LEAVES * LEAF, LEAVES, SIZES[64 << 10]))
    rows = []
    with (
        Appliance(num_workers_per_box=workers, timeout_s=60, device=str(device)) as ours,
        Appliance(num_workers_per_box=workers, timeout_s=60) as host,
    ):
        for size, leaves, batches in shapes:
            ways: dict[str, Callable[[int, int, int], tuple[float, float]]] = {
                "plain copy": partial(plain_copy, device),
                "penstock": partial(penstock, ours, device, False),
                "host batches": partial(penstock, host, device, True),
                "torch": partial(torch_dataloader, device, workers),
            }
            figures: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way, run in ways.items():
                    figures[way].append(run(size, leaves, batches))
            rates = {way: statistics.median(found[0] for found in figures[way]) for way in ways}
            for way, found in figures.items():
                rows.append(
                    {
                        "bytes": size,
                        "leaves": leaves,
                        "way": way,
                        "batches_per_s": round(rates[way], 1),
                        "gb_per_s": round(rates[way] * size / 1e9, 3),
                        "of_plain_copy": round(rates[way] / rates["plain copy"], 3),
                        "of_torch": round(rates[way] / rates["torch"], 2),
                        "loop_thread_us": round(statistics.median(each[1] for each in found), 1),
                        "spread": [round(min(each[0] for each in found), 1), round(max(each[0] for each in found), 1)],
                    }
                )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    head = ("batch", "way", "batches/s", "GB/s", "of plain", "of torch", "loop us")
    print("{:>14}  {:14} {:>10} {:>8} {:>9} {:>9} {:>9}".format(*head))
    for row in rows:
        size = f"{row['bytes'] >> 10} KiB" if not row["leaves"] else f"{row['leaves']} x {LEAF >> 10} KiB"
        print(
            f"{size:>14}  {row['way']:14} {row['batches_per_s']:10,.0f} {row['gb_per_s']:8.2f} "
            f"{row['of_plain_copy']:9.2f} {row['of_torch']:8.1f}x {row['loop_thread_us']:9.1f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=min(4, max(1, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-bytes", type=int, default=max(SIZES), help="leave out larger batches")
    parser.add_argument("--json", help="also write machine and rows to this file")
    given = parser.parse_args()
    try:
        device = torch.device(check_device(given.device))
    except InvalidArgumentError as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
        return NO_DEVICE
    torch.set_num_threads(1)
    machine = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": os.cpu_count(),
        "workers": given.workers,
        "rounds": given.rounds,
        "torch": torch.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    rows = measure(device, given.workers, given.rounds, given.max_bytes)
    show(rows)
    if device.type == "cuda":
        ours = [row["of_plain_copy"] for row in rows if row["way"] == "penstock" and not row["leaves"]]
        reached = sum(share >= TARGET for share in ours)
        print(f"target of {TARGET} of the plain copy: reached at {reached} of {len(ours)} sizes")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
