"""Distribution of rows to bins by cost (longest processing time first). A bin is a step or a box, and gets the same
number of rows as without balance.

Rows are taken from the largest cost to the smallest, and each goes to that bin with free places whose sum of costs is
smallest. All functions are pure, and rows are assigned by sums in integers, so every machine assigns them equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heapreplace

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.permutation import Ints

__all__ = ["assign_in_turn", "assign_to_boxes", "assign_to_steps", "cost_ratio"]

SMALLEST_RUN = 16
"""Smallest number of rows in a run. A run is a group of rows of similar cost, which all go to the same step."""
SHARES = 16
"""Number of boxes for which steps are made balanceable: if possible, no row costs more than 1/SHARES of its step."""
_SCALE, _BITS = 1 << 44, 17
"""_SCALE: largest sum of all costs when they are expressed as integers. _BITS: number of low bits that hold the number
of a bin (a step or a box). A sum and a bin's number together fit into 64 bits."""


def assign_to_steps(costs: npt.NDArray[np.float64], steps: int) -> list[Ints]:
    """Return, for each step of a window, the indexes of its rows in `costs`, ascending. All steps get equally many
    rows, and sums of cost that are as equal as runs of rows allow.

    The rows are sorted by cost and cut into runs of equal length, and a run goes to one step as a whole. A run has
    about SMALLEST_RUN rows, or more if a single row would otherwise cost too large a part of its step.

    Args:
        costs: costs of the window's rows, any unit; `steps` divides their number.
        steps: number of steps in the window.
    """
    if steps < 2:
        return [np.arange(len(costs))] * steps
    units, rows = _units(costs), len(costs) // steps
    by_cost = np.argsort(-units, kind="stable")
    best, least = None, 2.0
    for run in _runs(rows):
        runs = by_cost.reshape(-1, run)
        assigned = [runs[chosen].ravel() for chosen in _assigned(units[runs].sum(axis=1), [rows // run] * steps)]
        worst = max(int(units[step].max()) / max(1, int(units[step].sum())) for step in assigned)
        if worst < least:
            best, least = assigned, worst
        if worst <= 1 / SHARES:
            break
    assert best is not None
    # otherwise the first step would always get the most expensive row
    best.sort(key=lambda step: int(step[np.argmax(units[step])]))
    return [np.sort(step) for step in best]


def assign_to_boxes(costs: npt.NDArray[np.float64], boxes: int, turn: int) -> list[Ints]:
    """Return, for each box, the indexes of its rows in `costs`, ascending. Each box gets as many rows as without
    balance, and all boxes get about equal sums of cost.

    Args:
        costs: costs of the step's rows, any unit.
        boxes: number of boxes.
        turn: number of the step; it decides which box gets the row that costs most, so that it is not always the same
            box.
    """
    room = [len(range(box, len(costs), boxes)) for box in range(boxes)]
    shift = turn % boxes
    assigned = _assigned(_units(costs), room[shift:] + room[:shift])
    return [np.sort(rows) for rows in assigned[boxes - shift :] + assigned[: boxes - shift]]


def assign_in_turn(rows: int, boxes: int) -> list[Ints]:
    """Return the indexes of each box's rows without balance: box b gets the rows b, b + `boxes`, b + 2 `boxes`, and so
    on."""
    return [np.arange(box, rows, boxes) for box in range(boxes)]


def cost_ratio(costs: npt.NDArray[np.float64], assigned: Sequence[Ints]) -> float:
    """Return the cost of the most expensive box of a step, divided by the mean of all boxes; 1 for a step that costs
    nothing.

    Args:
        costs: costs of the step's rows.
        assigned: for each box, the indexes of its rows in `costs`.
    """
    relative = costs / max(float(costs.max(initial=0)), np.finfo(float).tiny)  # at most 1, so that sums are finite
    sums = np.array([relative[rows].sum() for rows in assigned])
    return float(sums.max() / sums.mean()) if sums.any() else 1.0


def _runs(rows: int) -> list[int]:
    """Return possible lengths of runs (rows of similar cost that stay together), ascending. Each length divides `rows`,
    the number of rows in a step, and is at least twice the length before it; the last one is `rows`."""
    found: list[int] = []
    for run in range(min(SMALLEST_RUN, rows), rows):
        if rows % run == 0 and (not found or run >= 2 * found[-1]):
            found.append(run)
    return [*found, rows]


def _units(costs: npt.NDArray[np.float64]) -> Ints:
    """Return the costs as integers whose sum is at most _SCALE. Each cost is rounded by itself, so every machine gets
    the same integers; sums of floats depend on the order of summation."""
    largest = max(float(costs.max(initial=0)), np.finfo(float).tiny)
    units: Ints = (costs / largest * (_SCALE // max(1, len(costs)))).astype(np.int64)
    return units


def _assigned(units: Ints, room: Sequence[int]) -> list[Ints]:
    """Return, for each bin, the indexes of the costs that it gets by "longest processing time first". Bin b gets
    `room[b]` costs."""
    by_cost = np.argsort(-units, kind="stable")
    # heap of sum << _BITS | bin: the smallest sum comes first
    heap = [number for number, places in enumerate(room) if places]
    left, mask, assigned = list(room), (1 << _BITS) - 1, []
    for cost in (units[by_cost] << _BITS).tolist():
        top = heap[0]
        number = top & mask
        assigned.append(number)
        left[number] -= 1
        if left[number]:
            heapreplace(heap, top + cost)
        else:
            heappop(heap)
    by_bin = by_cost[np.argsort(assigned, kind="stable")]
    return np.split(by_bin, np.cumsum(room)[:-1])
