"""Balance of boxes (data-parallel ranks): the cost of a step's most expensive box, divided by the mean cost of all
boxes, without Balance and with it; and the time that the assignment of rows to boxes takes.

    python -m benchmarks.box_balance [--boxes 8] [--rows 64] [--json]

The cost of a row is its length squared. Three distributions of lengths are used: lognormal (sigma 1); the same, cut off
at 8 times the median, as a model's context length cuts off texts; and the words in each file of Python's standard
library, up to 8,192. A window is the rows of several steps, which are assigned together. "sorted microbatches" sorts
the batches of a window by cost and assigns them whole, as torchtitan describes its LoadBalancingDataLoader (torchtitan
0.3.0 on PyPI does not contain it, so the benchmark has a few lines of its own for this). The time of a window is the
cost of the most expensive box, summed over its steps, divided by the time if all boxes were equal. Other times are
processor time.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from benchmarks import machine

from penstock.data import Balance, MapLoader
from penstock.data.ordering.balance import assign_to_boxes, assign_to_steps

__all__ = ["main"]

Costs = npt.NDArray[np.float64]
Assign = Callable[[Costs, int, int], list[list[Costs]]]
"""Way to assign rows: function of the costs of a window's rows, the number of steps and the number of boxes. It returns
for each step the costs of each box's rows."""
WINDOWS = 40
LONGEST = 8192


def corpora(rows: int) -> dict[str, Costs]:
    """Return the costs of `rows` rows, by the name of the distribution of their lengths."""
    lengths = np.random.default_rng(0).lognormal(0, 1, rows)
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))[:6000]
    words = [min(LONGEST, 1 + len(file.read_bytes().split())) for file in files]
    python = np.random.default_rng(0).permutation(np.resize(np.array(words, np.float64), rows))
    return {"lognormal": lengths**2, "lognormal, cut off": np.minimum(lengths, 8) ** 2, "Python's sources": python**2}


def plain(costs: Costs, steps: int, boxes: int) -> list[list[Costs]]:
    return [[step[box::boxes] for box in range(boxes)] for step in np.split(costs, steps)]


def sorted_microbatches(costs: Costs, steps: int, boxes: int) -> list[list[Costs]]:
    batches = np.concatenate([np.stack(step) for step in plain(costs, steps, boxes)])
    batches = batches[np.argsort(-batches.sum(axis=1), kind="stable")]
    return [list(batches[begin : begin + boxes]) for begin in range(0, len(batches), boxes)]


def balanced(costs: Costs, steps: int, boxes: int) -> list[list[Costs]]:
    assigned = [costs[rows] for rows in assign_to_steps(costs, steps)]
    return [[step[rows] for rows in assign_to_boxes(step, boxes, number)] for number, step in enumerate(assigned)]


def judged(costs: Costs, steps: int, boxes: int, rows: int, assign: Assign) -> dict[str, float]:
    """Measure one way to assign rows. Return "max/mean", the cost of a step's most expensive box divided by the mean of
    all boxes, as the mean over steps; "time", that of a window, as the mean over windows; and "ms per 1024 rows", the
    processor time of the assignment. `rows`: number of rows of a box in a step."""
    ratios, times, began = [], [], time.process_time()
    window = steps * boxes * rows
    assigned = [assign(costs[begin : begin + window], steps, boxes) for begin in range(0, len(costs), window)]
    took_ms = (time.process_time() - began) / len(costs) * 1024 * 1e3
    for found in assigned:
        sums = np.array([[box.sum() for box in step] for step in found])
        ratios += (sums.max(axis=1) / sums.mean(axis=1)).tolist()
        times.append(sums.max(axis=1).sum() / sums.mean(axis=1).sum())
    return {"max/mean": float(np.mean(ratios)), "time": float(np.mean(times)), "ms per 1024 rows": took_ms}


def loop_rows_s(costs: Costs, batch: int, balance: Balance | None) -> float:
    """Return the speed of a loader of one of 8 boxes that assigns the rows of all boxes and reads its own: rows of all
    boxes for each second of processor time."""
    loader = MapLoader(
        range(len(costs)), global_batch_size=batch, shuffle=True, rank=(0, 8), reseed=False, balance=balance
    )
    began = time.process_time()
    batches = sum(1 for _ in loader)
    return batches * batch / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64, help="rows of a box's batch")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    assigns: dict[str, Assign] = {"plain": plain, "sorted microbatches": sorted_microbatches, "balance": balanced}
    found: dict[str, dict[str, float]] = {}
    for steps in (1, 4, 8):
        for name, costs in corpora(WINDOWS * steps * given.boxes * given.rows).items():
            for how, assign in assigns.items():
                found[f"{name}, {steps} steps: {how}"] = judged(costs, steps, given.boxes, given.rows, assign)
    costs = corpora(1 << 17)["lognormal"]
    loops = {
        "plain": loop_rows_s(costs, 512, None),
        "balance": loop_rows_s(costs, 512, Balance(costs)),
        "balance over 4 steps": loop_rows_s(costs, 512, Balance(costs, 4)),
    }
    if given.json:
        print(json.dumps({"machine": machine.describe(), "cases": found, "rows_s": loops}, indent=2))
        return
    for case, figures in found.items():
        print(f"{case:45s} " + "  ".join(f"{what} {figure:.3f}" for what, figure in figures.items()))
    for how, rate in loops.items():
        print(
            f"MapLoader, {how}: {rate:,.0f} rows/s of all boxes, {loops['plain'] / rate * 100:.0f}% of the plain time"
        )


if __name__ == "__main__":
    main()
