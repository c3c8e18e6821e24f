"""Distribution of rows to bins by cost (longest processing time first). Each bin gets the same number of rows as
without balance.

Rows are taken from the largest cost to the smallest, and each goes to the bin with the smallest sum that is not full.
All functions are pure, and sum in integers, so every machine gets the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heapreplace

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.permutation import Ints

__all__ = ["assign_in_turn", "assign_to_boxes", "assign_to_steps", "cost_ratio"]

SMALLEST_RUN = 16
"""Smallest number of rows, consecutive in the order of cost, that go to the same step."""
SHARES = 16
"""Number of boxes among which the rows of a step can be balanced, because its largest row costs at most 1/SHARES of the
step."""
_SCALE, _BITS = 1 << 44, 17
"""Sum of all costs as integers, and number of low bits for a bin's number: both together fit into a machine word."""


def assign_to_steps(costs: npt.NDArray[np.float64], steps: int) -> list[Ints]:
    """Return the rows of each step, in ascending order: equal numbers of rows, and about equal sums of cost.

    Rows that are consecutive in the order of cost stay together in runs of at least SMALLEST_RUN, or longer if a row
    would be too large a part of its step's cost.

    Args:
        costs: costs of the window's rows; `steps` divides their number.
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
    # otherwise the first step would always get the largest row
    best.sort(key=lambda step: int(step[np.argmax(units[step])]))
    return [np.sort(step) for step in best]


def assign_to_boxes(costs: npt.NDArray[np.float64], boxes: int, turn: int) -> list[Ints]:
    """Return the rows of each box, in ascending order: the same numbers of rows as without balance, and about equal
    sums of cost.

    Args:
        costs: costs of the step's rows.
        turn: number of the step; it decides which box gets the row that costs most.
    """
    room = [len(range(box, len(costs), boxes)) for box in range(boxes)]
    shift = turn % boxes
    assigned = _assigned(_units(costs), room[shift:] + room[:shift])
    return [np.sort(rows) for rows in assigned[boxes - shift :] + assigned[: boxes - shift]]


def assign_in_turn(rows: int, boxes: int) -> list[Ints]:
    """Return the rows of each box without balance: every `boxes`-th row, from the box's number on."""
    return [np.arange(box, rows, boxes) for box in range(boxes)]


def cost_ratio(costs: npt.NDArray[np.float64], assigned: Sequence[Ints]) -> float:
    """Return the cost of the most expensive box of a step, divided by the mean of all boxes; 1 for a step that costs
    nothing.

    Args:
        costs: costs of the step's rows.
        assigned: rows of each box.
    """
    relative = costs / max(float(costs.max(initial=0)), np.finfo(float).tiny)  # sums of any costs are finite
    sums = np.array([relative[rows].sum() for rows in assigned])
    return float(sums.max() / sums.mean()) if sums.any() else 1.0


def _runs(rows: int) -> list[int]:
    """Return lengths of runs that divide `rows`, each at least twice as long as the one before; the last is `rows`."""
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
    """Return the indexes of the costs that each bin gets: longest processing time first, `room[bin]` of them."""
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
