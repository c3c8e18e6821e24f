"""Batches per second through the whole public path, beside torch's DataLoader and a plain memcpy, in one run.

    python benchmarks/full_path.py [--rounds 3] [--json FILE]

The work is the same for all: a source that yields one ready uint8 tensor, taken by a loop that does nothing with it.
Penstock streams from one worker slot with everything on (round robin, deadlines, digests, snapshots' cadence), on the
same host's lane and on the TCP lane over loopback; the DataLoader has one worker process and no batching of its own.
Rounds are interleaved and the medians reported: these are ratios of one run on one machine, not absolute claims.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.data

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.ring import Ring, slots_for

SIZES = {4 << 10: 30_000, 64 << 10: 30_000, 1 << 20: 5_000, 8 << 20: 600}
"""Bytes of a batch -> batches of one round of ours."""
DATALOADER_SHARE = 20
"""torch's DataLoader gets so many times fewer batches: it is that much slower."""


class Ready(torch.utils.data.IterableDataset[torch.Tensor]):
    """One tensor, again and again: a new tensor object each time, over memory that is ready.

    The same object each time would flatter torch's DataLoader, which moves a tensor's memory to shared memory when it
    first sends it and then never copies again: no loader of real data has that luck.
    """

    def __init__(self, size: int, batches: int) -> None:
        self.size = size
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        ready = np.random.randint(0, 255, self.size, dtype=np.uint8)
        for _ in range(self.batches):
            yield torch.from_numpy(ready)


def source(size: int, batches: int) -> Ready:
    """The input_fn."""
    return Ready(size, batches)


def rate(batches: Any) -> tuple[float, float]:
    """(batches per second, microseconds of this thread's processor per batch), from the first batch on."""
    iterator = iter(batches)
    next(iterator)
    started, cpu, count = time.perf_counter(), time.thread_time(), 0
    for _ in iterator:
        count += 1
    return count / (time.perf_counter() - started), 1e6 * (time.thread_time() - cpu) / count


def penstock(appliance: Appliance, size: int, batches: int) -> tuple[float, float]:
    return rate(DataExecutor(DataLoader(source, size, batches), appliance=appliance))


def torch_dataloader(size: int, batches: int) -> tuple[float, float]:
    loader: Any = torch.utils.data.DataLoader(Ready(size, batches), batch_size=None, num_workers=1)
    return rate(loader)


def memcpy(size: int, batches: int) -> tuple[float, float]:
    """The floor: copies into the slots of a pre-faulted ring of the size that the runner would use."""
    ring = Ring.create(size, slots_for(size))
    data = torch.randint(0, 255, (size,), dtype=torch.uint8)
    address = data.data_ptr()

    def copies() -> Iterator[None]:
        for number in range(batches + 1):
            ctypes.memmove(ring.address + number % ring.slots * ring.slot_bytes, address, size)
            yield None

    return rate(copies())


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    with (
        Appliance(num_workers_per_box=1, timeout_s=60) as local,
        Appliance(num_workers_per_box=1, timeout_s=60, lane="tcp") as tcp,
    ):
        for size, batches in SIZES.items():
            modes = {
                "same host": partial(penstock, local, size, batches),
                "tcp lane": partial(penstock, tcp, size, max(batches // 3, 200)),
                "torch DataLoader, 1 worker": partial(torch_dataloader, size, max(batches // DATALOADER_SHARE, 100)),
                "memcpy": partial(memcpy, size, batches),
            }
            figures: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
            for _ in range(rounds):
                for mode, run in modes.items():
                    figures[mode].append(run())
            for mode, found in figures.items():
                per_second = statistics.median(f[0] for f in found)
                rows.append(
                    {
                        "bytes": size,
                        "mode": mode,
                        "batches_per_s": round(per_second),
                        "gb_per_s": round(per_second * size / 1e9, 2),
                        "loop_thread_us": round(statistics.median(f[1] for f in found), 1),
                        "spread": [round(min(f[0] for f in found)), round(max(f[0] for f in found))],
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the rows there too")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="'set_vital'")
    torch.set_num_threads(1)
    rows = measure(given.rounds)
    head = ("batch", "mode", "batches/s", "GB/s", "loop us", "to DataLoader", "to memcpy")
    print("{:>9}  {:28} {:>10} {:>7} {:>8}   {:>13} {:>10}".format(*head))
    for size in SIZES:
        of_size = {row["mode"]: row for row in rows if row["bytes"] == size}
        peer, floor = of_size["torch DataLoader, 1 worker"], of_size["memcpy"]
        for mode, row in of_size.items():
            print(
                f"{size >> 10:5} KiB  {mode:28} {row['batches_per_s']:10,} {row['gb_per_s']:7.2f} "
                f"{row['loop_thread_us']:8.1f}   {row['batches_per_s'] / peer['batches_per_s']:12.1f}x "
                f"{row['batches_per_s'] / floor['batches_per_s']:9.2f}"
            )
    if given.json:
        with open(given.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
