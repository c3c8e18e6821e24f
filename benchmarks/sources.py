"""Speed of Penstock's sources compared with torch's DataLoader and torchdata's StatefulDataLoader: reading, seeking
(resuming in the middle of an epoch), saving.

    python -m benchmarks.sources [--rounds 5] [--quick] [--json FILE] [--write benchmarks/README.md]

One process, one run, the same data in memory; in each round each reader has one turn, and medians are reported. Ratios
are of these medians. The peers are set up as their documentation recommends. IBM's rescalable layers are not a package
that can be installed; packing is compared with a hand-written loop instead.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from benchmarks import machine
from benchmarks.processes import busy_cores, cpu_s, machine_s
from benchmarks.report import between
from benchmarks.sources_cases import BATCH, LINE, ByHand, Make, Numbers, Rows, documents, packed, readers
from benchmarks.sources_report import BEGIN, END, judge, markdown
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.data import MapLoader
from penstock.proto.state.codec import encode_state

__all__ = ["Amounts", "figures", "main", "run", "sizes"]

SHARDS = (1, 64)
AT = 0.9
"""Share of the epoch at which a seek resumes."""


@dataclass(frozen=True)
class Amounts:
    """Amounts of data that a run reads."""

    rows: int
    documents: int
    batches: int
    """Number of batches that each reader reads in a round; readers of packed lines read a quarter of this number."""
    lengths: tuple[int, ...]
    """Numbers of samples of the datasets in which Penstock seeks."""
    theirs: int
    """Largest number of samples of a dataset in which StatefulDataLoader seeks. It replays each index, so larger ones
    take too long."""
    processes: tuple[int, ...] = (0, 2)


FULL = Amounts(400_000, 4_000, 2_000, (10**6, 9 * 10**6, 10**9), 9 * 10**6)
QUICK = Amounts(20_000, 200, 100, (10**6, 10**9), 10**6)


def rate(make: Make, batches: int) -> float:
    """Return the batches per second of the loader that `make` returns, measured over `batches` batches from the second
    one on."""
    iterator = iter(make())
    next(iterator)
    began = time.perf_counter()
    taken = sum(1 for _ in islice(iterator, batches))
    return taken / (time.perf_counter() - began)


def saving(make: Make, batches: int) -> dict[str, float]:
    """Measure a loader whose state is taken after each batch. Return "rate", its batches per second, and "cost", the
    time of all calls of state_dict() divided by the remaining time. This ratio is more reliable than the difference of
    two runs, which other load may disturb."""
    loader: Any = make()
    iterator = iter(loader)
    next(iterator)
    clock, spent, taken = time.perf_counter, 0.0, 0
    began = clock()
    for _ in islice(iterator, batches):
        asked = clock()
        loader.state_dict()
        spent += clock() - asked
        taken += 1
    took = clock() - began
    return {"rate": taken / took, "cost": spent / (took - spent)}


def times(saved: dict[str, float], samples: int) -> dict[str, float]:
    """Return a result of `saving` with its "rate" in samples (or tokens) per second instead of batches. `samples`:
    number of them in a batch."""
    return {**saved, "rate": samples * saved["rate"]}


def penstock_seek_s(length: int) -> float:
    """Return the seconds in which a new MapLoader loads a state at 90% of a shuffled epoch and yields its next batch.
    `length`: number of samples of the dataset."""
    dataset = Numbers(length)

    def make() -> MapLoader:
        return MapLoader(dataset, batch_size=BATCH, shuffle=True, seed=1)

    state = make().state_after(int(length * AT) // BATCH)
    began = time.perf_counter()
    loader = make()
    loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - began


def stateful_seek_s(length: int) -> float:
    """Return the seconds in which a new StatefulDataLoader loads a state at 90% of a shuffled epoch and yields its next
    batch. The state is one after the first batch, in which the counts are changed to those at 90%: reading up to there
    would take minutes, and loading takes as long as with a real state."""
    dataset = Numbers(length)

    def make() -> Any:
        return StatefulDataLoader(dataset, BATCH, shuffle=True, generator=torch.Generator().manual_seed(1))

    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    batches = int(length * AT) // BATCH
    moved = _moved(state, batches)
    began = time.perf_counter()
    loader = make()
    loader.load_state_dict(moved)
    next(iter(loader))
    return time.perf_counter() - began


def _moved(state: Any, batches: int) -> Any:
    """Return a state of StatefulDataLoader in which the counts of batches and samples are changed to those after
    `batches` batches."""
    samples = batches * BATCH
    counts = {"_num_yielded": batches, "_sampler_iter_yielded": batches, "samples_yielded": samples, "yielded": samples}
    if isinstance(state, dict):
        return {
            key: counts[key] if key in counts and isinstance(value, int) else _moved(value, batches)
            for key, value in state.items()
        }
    return state


def size(state: Any) -> int:
    """Return the number of bytes of a state when it is saved."""
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


def figures(rows: Rows, texts: list[Any], amounts: Amounts) -> dict[str, Any]:
    """Run one round: measure each figure once, for Penstock and the other libraries in turn. Return the figures by
    name."""
    found: dict[str, Any] = {"read": {}, "saved": {}, "seek": {}, "packed": {}}
    for processes in amounts.processes:
        makes = readers(rows, processes)
        found["read"][str(processes)] = {name: BATCH * rate(make, amounts.batches) for name, make in makes.items()}
        found["saved"][str(processes)] = {
            name: times(saving(makes[name], amounts.batches), BATCH) for name in ("Penstock", "StatefulDataLoader")
        }
    for length in amounts.lengths:
        found["seek"][str(length)] = {"Penstock": penstock_seek_s(length)}
        if length <= amounts.theirs:
            found["seek"][str(length)]["StatefulDataLoader"] = stateful_seek_s(length)
    lines = max(20, amounts.batches // 4)
    for shards in SHARDS:
        make = partial(packed, texts, shards)
        tokens = 8 * LINE
        found["packed"][str(shards)] = {
            "plain": tokens * rate(make, lines),
            "saved": times(saving(make, lines), tokens),
        }
    by_hand = partial(torch.utils.data.DataLoader, ByHand(texts), 8)
    found["packed"]["by hand"] = {"plain": 8 * LINE * rate(by_hand, lines)}
    return found


def sizes(rows: Rows, texts: list[Any], processes: int) -> dict[str, int]:
    """Return the number of bytes of each reader's state in the middle of an epoch, by the reader's name."""
    found = {}
    for name, make in readers(rows, processes).items():
        if name in ("Penstock", "StatefulDataLoader"):
            loader: Any = make()
            list(islice(loader, len(rows) // BATCH // 2))
            found[f"{name}, shuffled map-style, {processes} processes"] = size(loader.state_dict())
    for shards in SHARDS:
        lines = packed(texts, shards)
        list(islice(lines, 20))
        found[f"Penstock, packed and shuffled in {shards} shards"] = len(encode_state(lines.state_dict()))
    return found


def run(amounts: Amounts, rounds: int) -> dict[str, Any]:
    """Run all rounds. Return the results, which --json writes to a file."""
    torch.set_num_threads(1)
    rows, texts = Rows(amounts.rows), documents(amounts.documents)
    busy, load = busy_cores(1.0), os.getloadavg()[0]
    began, all_s, own_s = time.monotonic(), machine_s(), cpu_s(os.getpid())
    found = [figures(rows, texts, amounts) for _ in range(rounds)]
    took = time.monotonic() - began
    return {
        "machine": machine.describe(),
        "command": " ".join(["python -m benchmarks.sources", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": machine.commit(),
        "took_s": took,
        "noise": {
            "busy_before": busy,
            "load_before": load,
            "others": max(0.0, (machine_s() - all_s - (cpu_s(os.getpid()) - own_s)) / took),
        },
        "rounds": found,
        "sizes": sizes(rows, texts, max(amounts.processes)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small amounts, to see that it runs")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--write", type=Path, help="document whose tables are replaced")
    arguments = parser.parse_args()
    results = run(QUICK if arguments.quick else FULL, arguments.rounds)
    text = markdown(results)
    print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    if arguments.write:
        arguments.write.write_text(between(arguments.write.read_text(), text, BEGIN, END))
    return 1 if any(verdict.met is False for verdict in judge(results)) and not arguments.quick else 0


if __name__ == "__main__":
    raise SystemExit(main())
