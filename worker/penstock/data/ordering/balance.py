"""Balance of cost: rows are assigned to steps and boxes so that in each step all boxes have about the same work. A step
is as slow as its slowest box, and rows differ in cost: that of attention is the square of the length.

First the rows of a window (`over_steps` global batches) are assigned to steps, on any number of boxes alike: a step has
the same rows on any topology, and a state the same few integers as without balance. Then a step's rows are assigned to
boxes. Both go from the largest cost to the smallest, each to the bin with free places and the smallest sum. Sums are
integers, so every machine assigns equally. In a window with rows that cost more than a box's share of a step, similar
rows stay together in a step: steps then differ in cost, but hardly the boxes of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heapreplace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from penstock.data.arguments import at_least_one, truth
from penstock.data.ordering.epoch_plan import EpochRemainder, SampleOrder
from penstock.data.ordering.permutation import Ints, gathered
from penstock.data.recent import Recent
from penstock.proto.errors import DatasetError, InvalidArgumentError

WINDOW_LIMIT = 1 << 20
STEPS_LIMIT = 1 << 16
WINDOWS_KEPT = 4
"""Windows whose assigned rows are kept: those of the batches planned now, and of restored samples."""


@dataclass(frozen=True)
class Balance:
    """Setting of a loader: assign rows to boxes and steps so that the boxes of a step have about the same cost.

    Example::

        lengths = np.load("lengths.npy")
        MapLoader(dataset, global_batch_size=512, shuffle=True, balance=Balance(lengths**2.0, over_steps=4))

    Args:
        cost: cost of each sample, in any unit: an array with a number for each (numpy, also a memmap, or a CPU tensor);
            a column's name, for Hugging Face datasets and those with a method `column(name)`; or a function from an
            array of sample numbers to one of costs. Finite, at least 0, and the same on all workers.
        over_steps: steps whose rows are assigned together, such as of a gradient accumulation. With 1, each keeps its
            rows.
        report: True: do not balance. `imbalance()` of the loader then tells what balancing would bring.
    """

    cost: Cost
    over_steps: int = 1
    report: bool = False


@dataclass(frozen=True)
class Imbalance:
    """Cost of a step's most expensive box, which decides its time, divided by the mean of all, averaged over steps; 1
    is best."""

    plain: float
    """Without balancing."""
    balanced: float
    """With the loader's `balance`; with report=True what it would bring."""


class BalancedOrder:
    """Order in which the rows of each window of `steps` global batches are assigned to its steps by cost."""

    def __init__(self, own: SampleOrder, costs: Costs, batch: int, steps: int) -> None:
        steps = at_least_one("over_steps", steps)
        most = max(1, min(STEPS_LIMIT, WINDOW_LIMIT // batch))
        if steps > most:
            raise InvalidArgumentError(f"over_steps must be at most {most} with global batches of {batch}, got {steps}")
        self._own, self._costs, self._batch, self._window = own, costs, batch, steps * batch
        self._assigned = Recent[tuple[int, int], Ints](WINDOWS_KEPT)
        """Samples by (epoch, number of a window in it)."""

    def __len__(self) -> int:
        return len(self._own)

    def ids(self, epoch: int, positions: npt.ArrayLike) -> Ints:
        at = np.asarray(positions, np.int64)
        if self._window == self._batch:  # a window of one step has the same rows as without balance
            return self._own.ids(epoch, at)
        windows, inside = np.divmod(at, self._window)
        return gathered(windows, inside, lambda number, rows: self._window_of(epoch, number)[rows])

    def _window_of(self, epoch: int, number: int) -> Ints:
        return self._assigned.get((epoch, number), partial(self._in_window, epoch, number))

    def _in_window(self, epoch: int, number: int) -> Ints:
        """Return the window's samples, step by step. An incomplete last batch keeps its rows."""
        begin = number * self._window
        ids = self._own.ids(epoch, np.arange(begin, min(begin + self._window, len(self))))
        whole_rows = len(ids) - len(ids) % self._batch
        steps = assign_to_steps(self._costs.of(ids[:whole_rows]), whole_rows // self._batch)
        return np.concatenate([*(ids[rows] for rows in steps), ids[whole_rows:]])


class StepBalance:
    """Costs that assign a step's rows to boxes."""

    def __init__(self, balance: Balance, dataset: Any, length: int) -> None:
        self._costs = Costs(checked_balance(balance).cost, dataset, length)
        self.assigns = not balance.report
        """False if the balance only reports what it would bring."""

    def assign(self, ids: Ints, boxes: int, turn: int) -> tuple[Sequence[Ints], float]:
        """Return each box's rows of a step, and its imbalance. `turn`: of the step; decides which box gets the
        costliest row."""
        costs = self._costs.of(ids)
        rows = assign_to_boxes(costs, boxes, turn) if self.assigns else assign_in_turn(len(costs), boxes)
        return rows, cost_ratio(costs, rows)

    def plain_ratio(self, ids: Ints, boxes: int) -> float:
        return cost_ratio(self._costs.of(ids), assign_in_turn(len(ids), boxes))

    def balanced_ratio(self, ids: Ints, boxes: int, turn: int) -> float:
        costs = self._costs.of(ids)
        return cost_ratio(costs, assign_to_boxes(costs, boxes, turn))


def checked_balance(balance: Balance) -> Balance:
    if not isinstance(balance, Balance):
        raise InvalidArgumentError(f"balance must be a penstock.data.Balance or None, got {balance!r}")
    truth("balance: report", balance.report)
    return balance


class Balanced(StepBalance):
    """Balance of a loader whose order maps positions to samples."""

    def __init__(self, balance: Balance, plain: SampleOrder, dataset: Any, length: int, batch: int) -> None:
        super().__init__(balance, dataset, length)
        self._plain = plain
        self._assigned = BalancedOrder(plain, self._costs, batch, balance.over_steps)
        self.order: SampleOrder = plain if balance.report else self._assigned
        over_steps = not balance.report and balance.over_steps > 1
        self.described = {"cost": self._costs.digest, "rows": batch, "steps": balance.over_steps} if over_steps else {}
        """Settings that decide the order, for the state; empty if each step keeps its rows."""

    def imbalance(self, epoch: EpochRemainder, steps: int) -> Imbalance:
        plain, assigned = [], []
        for number in range(min(steps, epoch.batches)):
            rows = epoch.all_positions(number)
            plain.append(self.plain_ratio(self._plain.ids(epoch.epoch, rows), epoch.boxes))
            assigned.append(self.balanced_ratio(self._assigned.ids(epoch.epoch, rows), epoch.boxes, number))
        return Imbalance(float(np.mean(plain)), float(np.mean(assigned)))


Cost = Any | str | Callable[[Ints], npt.ArrayLike]
CHUNK = 1 << 20
"""Costs checked at once, which limits the memory needed."""
PROBES = 1024
"""Samples whose costs identify a cost function in a state, as it has no digest."""


class Costs:
    def __init__(self, cost: Cost, dataset: Any, length: int) -> None:
        self._function = cost if callable(cost) else None
        self._array = None if self._function else _array(_column(cost, dataset) if isinstance(cost, str) else cost)
        digest = xxhash.xxh3_64()
        if self._array is None:
            probes = np.unique(np.linspace(0, length - 1, min(length, PROBES)).astype(np.int64))
            digest.update(self.of(probes).tobytes())
        else:
            if len(self._array) != length:
                raise InvalidArgumentError(
                    f"balance: cost must have one number for each of {length} samples, got {len(self._array)}"
                )
            for begin in range(0, length, CHUNK):
                digest.update(self.of(np.arange(begin, min(begin + CHUNK, length))).tobytes())
        self.digest = digest.hexdigest()
        """Of all costs, of a function of up to PROBES samples; with `over_steps` in the state, so that other costs are
        refused."""

    def of(self, ids: Ints) -> npt.NDArray[np.float64]:
        if self._array is not None:
            costs = self._array[ids]
        else:
            assert self._function is not None
            costs = _array(self._function(ids), "the cost function must return")
            if len(costs) != len(ids):
                raise InvalidArgumentError(
                    f"balance: the cost function must return {len(ids)} numbers, one for each sample, got {len(costs)}"
                )
        found: npt.NDArray[np.float64] = np.asarray(costs, np.float64)
        wrong = np.flatnonzero(~((found >= 0) & (found < np.inf)))
        if len(wrong):
            raise DatasetError(
                f"balance: costs must be finite and at least 0, got {found[wrong[0]]} for sample {int(ids[wrong[0]])}"
            )
        return found


def _array(given: Any, must: str = "cost must be a column's name, a function, or") -> npt.NDArray[Any]:
    """Return costs as numbers in one dimension. `must`: beginning of the error's text."""
    if isinstance(given, torch.Tensor):
        given = given.detach().to("cpu", torch.float64).numpy()
    array = np.asarray(given)
    if array.ndim != 1 or array.dtype.kind not in "iufb":
        raise InvalidArgumentError(
            f"balance: {must} a one-dimensional array of numbers, got {array.ndim} dimensions of {array.dtype}"
        )
    return array


def _column(name: str, dataset: Any) -> Any:
    kind = type(dataset).__qualname__
    if callable(column := getattr(dataset, "column", None)):
        return column(name)
    known = getattr(dataset, "column_names", None)
    if isinstance(known, list) and hasattr(dataset, "with_format"):
        if name not in known:
            raise InvalidArgumentError(f"balance: cost must be one of the columns {', '.join(known)}, got {name!r}")
        return dataset.select_columns([name]).with_format("numpy")[:][name]
    raise InvalidArgumentError(f"balance: cost={name!r} needs a dataset with columns, got {kind}. Pass an array")


SMALLEST_RUN = 16
"""Smallest number of rows of a run: of similar cost, all for one step."""
SHARES = 16
"""Boxes for which steps are made balanceable: if possible, no row costs more than 1/SHARES of its step."""
_SCALE, _BITS = 1 << 44, 17
"""Largest sum of costs as integers, and low bits for a bin's number (a step or box): together 64 bits."""


def assign_to_steps(costs: npt.NDArray[np.float64], steps: int) -> list[Ints]:
    """Return the rows of each step of a window, ascending indexes of `costs`, equally many. Rows sorted by cost are cut
    into runs, each for one step: SMALLEST_RUN rows, or more if a row would cost too large a part of its step."""
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
    """Return each box's rows, ascending indexes of `costs`: as many as without balance, of about equal cost. `turn`:
    see `assign`."""
    room = [len(range(box, len(costs), boxes)) for box in range(boxes)]
    shift = turn % boxes
    assigned = _assigned(_units(costs), room[shift:] + room[:shift])
    return [np.sort(rows) for rows in assigned[boxes - shift :] + assigned[: boxes - shift]]


def assign_in_turn(rows: int, boxes: int) -> list[Ints]:
    """Return each box's rows without balance: b, b + `boxes`, b + 2 `boxes`, ..."""
    return [np.arange(box, rows, boxes) for box in range(boxes)]


def cost_ratio(costs: npt.NDArray[np.float64], assigned: Sequence[Ints]) -> float:
    """Return the most expensive box's cost divided by the mean; 1 if nothing costs."""
    relative = costs / max(float(costs.max(initial=0)), np.finfo(float).tiny)  # at most 1, so that sums are finite
    sums = np.array([relative[rows].sum() for rows in assigned])
    return float(sums.max() / sums.mean()) if sums.any() else 1.0


def _runs(rows: int) -> list[int]:
    """Return lengths of runs, ascending: divisors of `rows`, each at least twice the one before, up to `rows`."""
    found: list[int] = []
    for run in range(min(SMALLEST_RUN, rows), rows):
        if rows % run == 0 and (not found or run >= 2 * found[-1]):
            found.append(run)
    return [*found, rows]


def _units(costs: npt.NDArray[np.float64]) -> Ints:
    """Return costs as integers of a sum up to _SCALE, each rounded by itself: sums of floats depend on their order."""
    largest = max(float(costs.max(initial=0)), np.finfo(float).tiny)
    return (costs / largest * (_SCALE // max(1, len(costs)))).astype(np.int64)


def _assigned(units: Ints, room: Sequence[int]) -> list[Ints]:
    """Return the indexes of each bin's costs. Bin b gets `room[b]` of them."""
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
