"""Checkpoints of many small entries: the cost of one entry, compared with torch's own functions.

    python -m benchmarks.checkpoint_small [--entries 3000] [--rounds 5]

A dict of that many values, alternately a tensor of 8 float32 and a number, is saved and restored by
`AsyncCheckpointer`, `torch.save` and `torch.load`, and `torch.distributed.checkpoint`, one after another in each round;
a round before the first one is not counted. A stall is the time for which the call that saves blocks training; in the
first save it includes the making of a plan.
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

__all__ = ["FIRST", "LATER", "LOADS", "RESTORE", "SAVES", "measure"]

FIRST, LATER, RESTORE = "first stall", "later stall", "restore"
SAVES, LOADS = ("torch.save", "dcp.save"), ("torch.load", "dcp.load")


def measure(entries: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each operation took in each round, by the operation's name."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            times = _round(Path(folder), entries, number)
        if number > 0:
            for what, seconds in times.items():
                found.setdefault(what, []).append(seconds)
    return found


def _round(folder: Path, entries: int, number: int) -> dict[str, float]:
    state, into = _state(entries, number), _state(entries, -1)
    found: dict[str, float] = {}
    with AsyncCheckpointer(folder / "penstock") as checkpointer:
        for step, what in ((1, FIRST), (2, LATER)):
            found[what] = _timed(lambda step=step: checkpointer.save(step, state))  # type: ignore[misc]
            checkpointer.wait()
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


def _state(entries: int, mark: int) -> dict[str, Any]:
    return {
        "entries": {f"entry-{place}": torch.full((8,), float(mark)) if place % 2 else mark for place in range(entries)}
    }


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure checkpoints of many small entries.")
    parser.add_argument("--entries", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    found = measure(options.entries, options.rounds)
    middle = {what: statistics.median(values) for what, values in found.items()}
    machine = describe()
    print(f"{machine['cores']} cores of {machine['processor']}, torch {torch.__version__}, commit {commit()}")
    print(f"medians of {options.rounds} rounds of {options.entries:,} entries\n")
    rows = []
    for what, values in found.items():
        others = {FIRST: SAVES, LATER: SAVES, RESTORE: LOADS}.get(what, ())
        ratios = [f"{middle[what] / middle[other]:.2f}x" for other in others] or ["-", "-"]
        name = f"Penstock, {what}" if others else what
        rows.append(
            [name, f"{middle[what] * 1e3:,.0f}", f"{min(values) * 1e3:,.0f} - {max(values) * 1e3:,.0f}", *ratios]
        )
    print(table(("", "ms", "(from - to)", "to torch's save or load", "to dcp's"), rows))


if __name__ == "__main__":
    main()
