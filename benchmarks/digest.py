"""Cost of the stream digest: the stream without digests, with the default ones, and with digests over every byte, in
one run.

    python -m benchmarks.digest [--rounds 5] [--json FILE]

The source yields ready batches, with one worker slot, the same host's lane, and all other features on. "none" replaces
the digest by a constant in the runner and the loop, which no option does; only the chaining in the loop remains. The
kinds take turns within each round. Reported are medians over the rounds, and the share of the rate that a kind loses
against "none". On two cores the rate varies by more than the cost of a digest. So the call is also timed by itself,
over memory that was just written, as in the runner; `share` is its share of the time between two batches of the stream,
at the stream's fastest. Ready batches are the worst case, because the time of a real source hides the digest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal
from unittest.mock import patch

import torch
from benchmarks.cases import Case
from benchmarks.loaders import make

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.stream import lane_reader
from penstock.proto.batch.digest import batch_digest
from penstock.proto.batch.structure import Leaf, Structure
from penstock.worker import current_assignment

SIZES = {4 << 10: 60_000, 64 << 10: 40_000, 1 << 20: 12_000, 8 << 20: 1_500}
"""Number of batches of one round, by the size of a batch in bytes."""
KINDS = ("none", "sample", "full")
RING_SLOTS = 8
WARM_SHARE = 10
"""Divisor of the number of batches in a round: this part of them, at the start, is not measured."""


def source(kind: str, size: int) -> Iterator[Any]:
    """Yield ready batches of `size` bytes without end: the input_fn. `kind`: kind of digest that the runner
    computes."""
    current_assignment()
    if kind == "none":
        import penstock.worker.runner.runner as runner

        setattr(runner, "region_digest", lambda *_: 1)  # noqa: B010  # in this child only
    return iter(make(Case("ready", size)))


def rate(kind: str, size: int, batches: int) -> float:
    """Return the batches per second of a stream with one kind of digest, over `batches` batches."""
    digest: Literal["sample", "full"] = "full" if kind == "full" else "sample"
    with _unchecked(kind), Appliance(num_workers_per_box=1, seed=1, digest=digest) as appliance:
        stream = iter(DataExecutor(DataLoader(source, kind, size), num_steps=batches, appliance=appliance))
        for _ in range(batches // WARM_SHARE):
            next(stream)
        started, count = time.perf_counter(), 0
        for _ in stream:
            count += 1
        return count / (time.perf_counter() - started)


@contextmanager
def _unchecked(kind: str) -> Iterator[None]:
    """Context manager in which, for the kind "none", the training loop computes no digest and expects the constant that
    the runner sends in its place."""
    with patch.object(lane_reader, "region_digest", lambda *_: 1) if kind == "none" else nullcontext():
        yield


def call_s(size: int, *, full: bool) -> float:
    """Return the seconds in which the digest of a batch of `size` bytes is computed right after the batch was written,
    as in the runner. Several pieces of memory take turns."""
    region, batch = bytearray(size * RING_SLOTS), bytes(range(256)) * (size // 256)
    structure = Structure.of(Leaf("t", "uint8", 2))
    seconds = []
    for number in range(max(20, min(2_000, (256 << 20) // size))):
        offset = number % RING_SLOTS * size
        region[offset : offset + size] = batch
        started = time.perf_counter()
        batch_digest(structure, region, offset, size, (64, size // 64), full)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seen: dict[int, dict[str, list[float]]] = {size: {kind: [] for kind in KINDS} for size in SIZES}
    for _ in range(options.rounds):
        for size, batches in SIZES.items():
            for kind in KINDS:
                seen[size][kind].append(rate(kind, size, batches))
    print(f"{'batch':>10}  {'digest':<8}{'batches/s':>12}{'(spread)':>20}{'costs':>9}{'call':>10}{'share':>8}")
    rows = []
    for size, kinds in seen.items():
        for kind, rates in kinds.items():
            # Kinds are compared within a round, because other load in a round slows all of its kinds.
            cost = statistics.median(
                1 - with_it / without for with_it, without in zip(rates, kinds["none"], strict=True)
            )
            call = call_s(size, full=kind == "full") if kind != "none" else 0.0
            rows.append({"nbytes": size, "digest": kind, "rates": rates, "cost": cost, "call_s": call})
            print(
                f"{size >> 10:>6} KiB  {kind:<8}{statistics.median(rates):>12,.0f}"
                f"{f'{min(rates):,.0f}-{max(rates):,.0f}':>20}{cost:>9.1%}"
                f"{call * 1e6:>7.1f} us{call * max(rates):>8.1%}"
            )
    if options.json:
        with open(options.json, "w") as out:
            json.dump(rows, out, indent=2)


if __name__ == "__main__":
    main()
