"""Comparison of torch's default_collate, whose batches are copied into the ring, with penstock.worker.collate, which
builds batches in the ring, in one run.

    python benchmarks/collate.py [--rounds 5] [--json FILE]

A torch DataLoader (num_workers=0) stacks 64 ready samples to a batch; the consuming loop does nothing with them. One
worker slot, the lane of the same host, all features on. The processor time is that of the runner, the process that runs
the loader, for user code and Penstock together; on a shared machine it is more reliable than the rate. The compared
kinds take turns in each round, and medians over the rounds are reported.

"shared" is default_collate as in a worker process of torch's DataLoader, which makes shared memory for each batch.
"held" is Penstock's collate in a loader that still references its batch at the yield, so that the batch must be copied.
"ready" yields one finished batch repeatedly, with the copy into the ring and no stacking.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.worker import collate, current_assignment

ROWS = 64
SIZES = {1 << 10: 6000, 16 << 10: 3000, 128 << 10: 500}
"""Number of batches of one round, by the size of a sample in bytes."""
KINDS = ("shared", "default", "ours", "held", "ready")
WARM = 50
"""Number of batches at the start of each round that are not measured."""


class Ready(torch.utils.data.Dataset[torch.Tensor]):
    """Map-style dataset that repeats a few samples, which are in memory already."""

    def __init__(self, size: int, batches: int) -> None:
        self.samples = [torch.full((size // 4,), float(number)) for number in range(4 * ROWS)]
        self.batches = batches

    def __len__(self) -> int:
        return self.batches * ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index % len(self.samples)]


class Timed:
    """Wrapper of a loader, in the runner, that writes to a file how much processor time its process used for all
    batches after the first WARM."""

    def __init__(self, loader: Any, kind: str, batches: int, out: str) -> None:
        self.loader = loader
        self.kind = kind
        self.batches = batches
        self.out = out
        self.count = 0
        self.started = 0.0

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.loader)
        return self

    def __next__(self) -> Any:
        self.count += 1
        if self.count == WARM:
            self.started = time.process_time()
        if self.count == self.batches:
            with open(self.out, "w") as out:
                out.write(str((time.process_time() - self.started) / (self.batches - WARM)))
        if self.kind == "held":
            self.last = next(self.iterator)
            return self.last
        return next(self.iterator)


def as_in_a_worker_process(samples: list[torch.Tensor]) -> torch.Tensor:
    """Collate samples as default_collate does in a worker process of torch's DataLoader: into new shared memory for
    each batch."""
    first = samples[0]
    storage = first._typed_storage()._new_shared(sum(one.numel() for one in samples))  # type: ignore[no-untyped-call]
    out = first.new(storage).resize_(len(samples), *first.shape)
    return torch.stack(samples, 0, out=out)


def source(kind: str, size: int, batches: int, out: str) -> Timed:
    """Return the loader of one kind. This is the input_fn, which Penstock calls in the runner."""
    current_assignment()
    data = Ready(size, batches)
    collates = {"shared": as_in_a_worker_process, "default": None, "ours": collate, "held": collate}
    loader: Any
    if kind == "ready":
        ready = torch.stack(data.samples[:ROWS])
        loader = (ready.view(ready.shape) for _ in range(batches))
    else:
        loader = torch.utils.data.DataLoader(data, batch_size=ROWS, collate_fn=collates[kind])
    return Timed(loader, kind, batches, out)


def measure(kind: str, size: int, batches: int, out: str) -> tuple[float, float]:
    """Measure one kind once. Return batches per second, and the runner's processor time for each batch in
    microseconds."""
    with Appliance(num_workers_per_box=1, seed=1) as appliance:
        iterator = iter(
            DataExecutor(DataLoader(source, kind, size, batches, out), num_steps=batches, appliance=appliance)
        )
        for _ in range(WARM):
            next(iterator)
        started, count = time.perf_counter(), 0
        for _ in iterator:
            count += 1
        wall = time.perf_counter() - started
    with open(out) as cpu:
        return count / wall, 1e6 * float(cpu.read())


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seen: dict[tuple[int, str], list[tuple[float, float]]] = {}
    with tempfile.NamedTemporaryFile() as out:
        for _ in range(options.rounds):
            for size, batches in SIZES.items():
                for kind in KINDS:
                    seen.setdefault((size, kind), []).append(measure(kind, size, batches, out.name))
    print(f"{'64 samples of':>14}  {'kind':<8}{'runner us/batch':>16}{'(spread)':>16}{'batches/s':>12}{'(spread)':>18}")
    for (size, kind), rounds in seen.items():
        rates, times = ([one[which] for one in rounds] for which in (0, 1))
        print(
            f"{size >> 10:>10} KiB  {kind:<8}{statistics.median(times):>16.0f}"
            f"{f'{min(times):.0f}-{max(times):.0f}':>16}{statistics.median(rates):>12,.0f}"
            f"{f'{min(rates):,.0f}-{max(rates):,.0f}':>18}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump([[size, kind, rounds] for (size, kind), rounds in seen.items()], file)


if __name__ == "__main__":
    main()
