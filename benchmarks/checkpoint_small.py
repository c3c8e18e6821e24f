"""Checkpoints of many small entries: the cost of one entry, compared with torch's own functions.

    python -m benchmarks.checkpoint_small [--entries 3000] [--values 8] [--kept 2] [--rounds 5]

A dict of that many entries, alternately a tensor of --values float32 and a number, is saved and restored by
`AsyncCheckpointer`, `torch.save` and `torch.load`, and `torch.distributed.checkpoint`, one after another in each round;
a round before the first one is not counted. A stall is the time for which the call that saves blocks training; in the
first save it includes the making of a plan. A total is the time until the checkpoint is on the disk, with the fsyncs
that torch.save leaves out. Processor time is that of all threads; in a total, that of the writer process only. torch's
threads are as many as OMP_NUM_THREADS says, which torchrun sets to 1. --kept: number of checkpoints at the last save.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.machine import commit, describe
from benchmarks.report import table
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.client.checkpoint import AsyncCheckpointer

__all__ = ["FIRST", "LATER", "LOADS", "NEWEST", "RESTORE", "SAVES", "TOTAL", "measure", "writer_s"]

FIRST, LATER, TOTAL = "first stall", "later stall", "later total"
NEWEST, RESTORE = "newest", "restore"
SAVES, LOADS = ("torch.save", "dcp.save"), ("torch.load", "dcp.load")


Times = tuple[float, float]
"""Duration and processor time of an operation, in seconds."""


def measure(entries: int, rounds: int, values: int = 8, kept: int = 2) -> dict[str, list[Times]]:
    """Return the times of each operation in each round, by the operation's name."""
    found: dict[str, list[Times]] = {}
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            times = _round(Path(folder), entries, values, kept, number)
        if number > 0:
            for what, one in times.items():
                found.setdefault(what, []).append(one)
    return found


def _round(folder: Path, entries: int, values: int, kept: int, number: int) -> dict[str, Times]:
    state, into = _state(entries, values, number), _state(entries, values, -1)
    found: dict[str, Times] = {}
    with AsyncCheckpointer(folder / "penstock") as checkpointer:
        for step in range(kept):
            writer, began = writer_s(checkpointer), time.perf_counter()
            found[LATER if step else FIRST] = _timed(lambda step=step: checkpointer.save(step, state))  # type: ignore[misc]
            checkpointer.wait()
            found[TOTAL] = time.perf_counter() - began, writer_s(checkpointer) - writer
        found[NEWEST] = _timed(checkpointer.newest)
        checkpointer.restore(into)  # brings the files into the page cache, where torch leaves what it writes
        found[RESTORE] = _timed(lambda: checkpointer.restore(into))
    if not all(map(_equal, into["entries"].values(), state["entries"].values())):
        raise RuntimeError(
            "the restored values must equal the saved ones, got others: a fault of save or restore, look for it "
            "before measuring"
        )
    path = folder / "torch.pt"
    found["torch.save"] = _timed(lambda: torch.save(state, path))
    found["torch.load"] = _timed(lambda: torch.load(path))
    found["dcp.save"] = _timed(lambda: save(state, checkpoint_id=folder / "dcp"))
    found["dcp.load"] = _timed(lambda: load(into, checkpoint_id=folder / "dcp"))
    return found


def _state(entries: int, values: int, mark: int) -> dict[str, Any]:
    def entry(place: int) -> Any:
        return torch.full((values,), float(mark)) if place % 2 else mark

    return {"entries": {f"entry-{place}": entry(place) for place in range(entries)}}


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _timed(call: Callable[[], Any]) -> Times:
    began, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - processor


def writer_s(checkpointer: AsyncCheckpointer) -> float:
    """Processor time of the writer process so far, by the clock that clock_getcpuclockid(3) returns."""
    pid = checkpointer._writer.pid
    assert pid is not None
    return time.clock_gettime((~pid << 3) | 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure checkpoints of many small entries.")
    parser.add_argument("--entries", type=int, default=3000)
    parser.add_argument("--values", type=int, default=8)
    parser.add_argument("--kept", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.kept < 2:
        parser.error("--kept must be 2 or more, because the first save is measured apart")
    found = measure(options.entries, options.rounds, options.values, options.kept)
    middle = {what: [statistics.median(column) for column in zip(*times, strict=True)] for what, times in found.items()}
    machine = describe()
    print(f"{machine['cores']} cores of {machine['processor']}, torch {torch.__version__}, commit {commit()}")
    print(f"{torch.get_num_threads()} threads of torch; {options.kept} checkpoints kept")
    print(f"medians of {options.rounds} rounds of {options.entries:,} entries, tensors of {options.values:,} values\n")
    rows = []
    for what, times in found.items():
        others = {FIRST: SAVES, LATER: SAVES, TOTAL: SAVES, RESTORE: LOADS}.get(what, ())
        ratios = [f"{middle[what][column] / middle[other][column]:.2f}x" for column in (0, 1) for other in others]
        seconds, processor = middle[what]
        between = f"{min(times)[0] * 1e3:,.0f} - {max(times)[0] * 1e3:,.0f}"
        name = what if what in SAVES + LOADS else f"Penstock, {what}"
        rows.append([name, f"{seconds * 1e3:,.0f}", between, f"{processor * 1e3:,.0f}", *(ratios or ["-"] * 4)])
    to = "to torch's save or load", "to dcp's"
    print(table(("", "ms", "(from - to)", "processor ms", *to, *(f"{one}, processor" for one in to)), rows))


if __name__ == "__main__":
    main()
