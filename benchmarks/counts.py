"""Cost of counting by source and key (docs/counts.md): processor time of a batch with counts and without, in one run.

    python -m benchmarks.counts

Three figures are printed. `make`: the time in which a worker makes a batch of 64 rows. `send`: the time that the worker
needs in addition to count the batch and to send the counts. `take`: the time that the training thread needs to add up
the counts. Each is the least of several rounds, in which the compared kinds take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from penstock.client.stream.box_progress import DeliveredCounts
from penstock.data import Counts, LogicalShards, MapLoader, Mixture, Packed, Repeated, ShardLoader
from penstock.proto.lane.frames import COUNTED, HEAD, Frame, counts_of

__all__ = ["main"]

ROWS, ROUNDS = 64, 12


class Text:
    """Dataset of samples with 512 tokens each, in three languages."""

    def __init__(self) -> None:
        self.tokens = torch.arange(512)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": self.tokens, "language": "abc"[number % 3]}


def _mapped(counts: Counts | None, **options: Any) -> MapLoader:
    return MapLoader(Text(), batch_size=ROWS, seed=1, counts=counts, **options)


def _mixed(counts: Counts | None) -> ShardLoader:
    documents = [[np.arange(300 + number) for number in range(50)]]
    lines = [Packed(Repeated(LogicalShards(documents, shards=10)), length=2048) for _ in range(3)]
    return ShardLoader(Mixture(lines, [5, 3, 2]), batch_size=ROWS, seed=1, counts=counts)


CASES: dict[str, tuple[Callable[[Counts | None], Any], Counts]] = {
    "MapLoader": (_mapped, Counts(by="language")),
    "MapLoader, reseed=False": (lambda counts: _mapped(counts, reseed=False), Counts(by="language")),
    "ShardLoader, mixture": (_mixed, Counts(by=lambda line: int(line[0]) % 3)),
}


def _seconds(batches: Iterator[Any], count: int = 8) -> float:
    began = time.process_time()
    for _ in range(count):
        next(batches)
    return (time.process_time() - began) / count


def _least(work: Callable[[], object], count: int = 2000) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for _ in range(count):
            work()
        best = min(best, (time.process_time() - began) / count)
    return best


def main() -> None:
    """Measure all kinds, and print the figures."""
    print(f"us a batch of {ROWS} rows          make: without  by source  and by key      send      take")
    for name, (make, by_key) in CASES.items():
        loaders = [make(None), make(Counts()), make(by_key)]
        batches = [iter(loader) for loader in loaders]
        best = [float("inf")] * len(loaders)
        for _ in range(ROUNDS):
            best = [min(pair) for pair in zip(best, map(_seconds, batches), strict=True)]
        tally = loaders[-1].tally

        def send(tally: Any = tally) -> bytes:
            tally.add(tally.last)
            return bytes(tally.take())

        counts = send()
        frame = Frame(flags=COUNTED, rest=b"x" * 16 + counts + HEAD.pack(len(counts)))
        delivered = DeliveredCounts(1)

        def take(frame: Frame = frame, delivered: DeliveredCounts = delivered) -> None:
            delivered.take(0, counts_of(frame))

        figures = [*best, _least(send), _least(take)]
        print(f"{name:30s}", *(f"{1e6 * figure:13.2f}" for figure in figures))


if __name__ == "__main__":
    main()
