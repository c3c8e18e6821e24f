"""Check that no process takes more and more memory in a long run over both kinds of lanes (same host, TCP).

    python -m benchmarks.soak [--batches 200000] [--lanes auto,tcp]

Embedded mode, one worker slot, batches that are dicts of 20 tensors. Measured after the first tenth of the batches and
at the end: for each process its own memory in bytes (RssAnon: its allocations, without rings and mapped files) and its
open descriptors; and the bytes of all files that the processes have open, rings included. Exits with 1 if a process
grows by more than 1 byte a batch or by more than 1 descriptor, or the files by more than 1 byte a batch. The C library
returns memory in pages and late, so runs much below 200,000 batches show little; tests/client/test_growth.py counts to
the byte, within one process.
"""

from __future__ import annotations

import argparse
import gc
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from benchmarks.penstock_path import ROLES
from benchmarks.processes import role_of, tree

from penstock.client import Appliance, DataExecutor, DataLoader

LEAVES = 20
MOST_BYTES = 1.0
"""Largest allowed growth, in bytes for each batch, of the memory of each process, and of all open files."""
MOST_DESCRIPTORS = 1


def source() -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches without end, with new tensor objects over the same memory each time: the input_fn."""
    leaves = {f"leaf{number}": torch.full((8, 4), number) for number in range(LEAVES)}
    while True:
        yield {name: leaf.view_as(leaf) for name, leaf in leaves.items()}


@dataclass(frozen=True)
class Sample:
    step: int
    memory: dict[str, int]
    """Own memory (RssAnon) of each process in bytes, by the process's role."""
    descriptors: dict[str, int]
    files: int
    """Size in bytes of all files that the processes have open, each counted once."""


def opened(pid: int) -> Iterator[os.stat_result]:
    """Yield the os.stat result of each file that a process has open."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the descriptor with which this listing was read
            yield os.stat(f"/proc/{pid}/fd/{fd}")


def sample(step: int) -> Sample:
    """Return what this process and its descendants use now: memory, descriptors, open files. `step`: number of batches
    taken so far."""
    gc.collect()
    root = os.getpid()
    family = tree(root)
    memory, descriptors, files = dict[str, int](), dict[str, int](), dict[tuple[int, int], int]()
    for process in family.values():
        role = role_of(process, family, root, ROLES)
        try:
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            found = list(opened(process.pid))
        except OSError:
            continue
        files |= {(one.st_dev, one.st_ino): one.st_size for one in found if stat.S_ISREG(one.st_mode)}
        anonymous = 1024 * sum(int(line.split()[1]) for line in status if line.startswith(("RssAnon:", "VmSwap:")))
        memory[role] = memory.get(role, 0) + anonymous
        descriptors[role] = descriptors.get(role, 0) + len(found)
    return Sample(step, memory, descriptors, sum(files.values()))


def soak(lane: Literal["auto", "tcp"], batches: int) -> bool:
    """Take `batches` batches over one kind of lane, and print how much each process has grown. Return True if the
    growth is within the limits."""
    first, started = batches // 10, time.perf_counter()
    os.environ["PENSTOCK_LANE"] = lane
    with (
        Appliance(num_workers_per_box=1) as appliance,
        closing(cast(Any, iter(DataExecutor(DataLoader(source), appliance=appliance)))) as stream,
    ):
        for _ in range(first):
            next(stream)
        before = sample(first)
        for _ in range(batches - first):
            next(stream)
        after = sample(batches)
    count, fits = after.step - before.step, True
    print(f"lane {lane}: {count:,} batches, {batches / (time.perf_counter() - started):,.0f} a second")
    for role, held in after.memory.items():
        kept = (held - before.memory.get(role, 0)) / count
        more = after.descriptors[role] - before.descriptors.get(role, 0)
        fits = fits and kept <= MOST_BYTES and more <= MOST_DESCRIPTORS
        print(f"  {role:12} {held / 1e6:8.1f} MB {kept:8.3f} B a batch {more:4} descriptors")
    kept = (after.files - before.files) / count
    print(f"  {'files':12} {after.files / 1e6:8.1f} MB {kept:8.3f} B a batch", flush=True)
    return fits and kept <= MOST_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200_000, help="batches of each lane")
    parser.add_argument("--lanes", default="auto,tcp")
    options = parser.parse_args()
    fits = True
    for lane in cast(list[Literal["auto", "tcp"]], options.lanes.split(",")):
        fits = soak(lane, options.batches) and fits
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    main()
