"""Balance of cost: rows are assigned to steps and boxes so that in each step all boxes (data-parallel ranks) have about
the same work.

A step is as slow as its slowest box, and rows differ in cost: that of attention is the square of the row's length. A
window is the rows of `over_steps` consecutive global batches. Two functions assign rows, by nothing but their costs:

    steps   the rows of a window are assigned to the window's steps
    boxes   the rows of a step's global batch are assigned to the boxes

The first function does not depend on the number of boxes. So a position means the same row on any topology, and a step
has the same set of rows on any number of boxes. A state is the same few integers as without balance. Only the choice of
the box that gets a row depends on the number of boxes.

If a single row costs more than a box's share of its step, no assignment can balance this step. So in a window with such
rows, rows of similar cost are kept together in one step. Then the steps of the window differ in cost, but the boxes of
each step hardly do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.arguments import at_least_one
from penstock.data.ordering.balancing.costs import Cost, Costs
from penstock.data.ordering.balancing.row_assignment import assign_in_turn, assign_to_boxes, assign_to_steps, cost_ratio
from penstock.data.ordering.epoch_plan import EpochRemainder, SampleOrder
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import InvalidArgumentError

__all__ = ["Balance", "Balanced", "BalancedOrder", "Imbalance"]

WINDOW_LIMIT = 1 << 20
"""Largest number of rows in a window (the consecutive steps whose rows are assigned together) of several steps."""
STEPS_LIMIT = 1 << 16
"""Largest number of steps in a window (the consecutive steps whose rows are assigned together)."""
WINDOWS_KEPT = 4
"""Number of windows whose assigned rows are kept in memory: the windows of the batches that are planned now, and of the
samples that a resume restores."""


@dataclass(frozen=True)
class Balance:
    """Setting of a loader: assign rows (samples) to boxes (data-parallel ranks) and steps so that the boxes of a step
    have about the same cost.

    Example::

        lengths = np.load("lengths.npy")
        MapLoader(dataset, global_batch_size=512, shuffle=True, balance=Balance(lengths**2.0, over_steps=4))

    Args:
        cost: cost of each sample, in any unit: an array with one number for each sample of the dataset (numpy, also a
            memmap, or a CPU tensor); the name of a column, for Hugging Face datasets and datasets with a method
            `column(name)`; or a function from an array of sample numbers to an array of costs. Costs must be finite, at
            least 0, and the same on all workers.
        over_steps: number of steps whose rows are assigned together, such as those of a gradient accumulation. With 1,
            each step keeps its own rows.
        report: True: do not balance. The loader's method `imbalance()` then tells what balancing would bring.
    """

    cost: Cost
    over_steps: int = 1
    report: bool = False


@dataclass(frozen=True)
class Imbalance:
    """Cost of the most expensive box of a step divided by the mean over all boxes, averaged over steps; 1 is perfect. A
    step takes as long as its most expensive box."""

    plain: float
    """Cost of the most expensive box divided by the mean over all boxes, without balancing."""
    balanced: float
    """Cost of the most expensive box divided by the mean over all boxes, with the loader's `balance`. With report=True
    it is the value that balancing would bring."""


class BalancedOrder:
    """Order of samples in which the rows of each window (`steps` consecutive global batches) are assigned to the
    window's steps by cost."""

    def __init__(self, own: SampleOrder, costs: Costs, batch: int, steps: int) -> None:
        """
        Args:
            own: order of the samples without balance.
            costs: costs of the dataset's samples.
            batch: number of rows that all boxes together have in a step.
            steps: number of steps in a window.

        Raises InvalidArgumentError if a window is empty or too large.
        """
        steps = at_least_one("over_steps", steps)
        most = max(1, min(STEPS_LIMIT, WINDOW_LIMIT // batch))
        if steps > most:
            raise InvalidArgumentError(
                f"over_steps must be at most {most} with {batch} rows in a global batch, got {steps}. Pass a smaller "
                "number"
            )
        self._own, self._costs, self._batch, self._window = own, costs, batch, steps * batch
        self._assigned: dict[tuple[int, int], Ints] = {}
        """(epoch, number of a window in the epoch) -> numbers of the window's samples, for the windows used last."""

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return len(self._own)

    def ids(self, epoch: int, positions: npt.ArrayLike) -> Ints:
        """Return the numbers of the samples at these positions of an epoch. `positions`: numbers in [0, len(self))."""
        at = np.asarray(positions, np.int64)
        if self._window == self._batch:  # a window of one step has the same rows as without balance
            return self._own.ids(epoch, at)
        windows = at // self._window
        found = np.empty_like(at)
        for number in np.unique(windows).tolist():
            chosen = windows == number
            found[chosen] = self._in_window(epoch, number)[at[chosen] - number * self._window]
        return found

    def _in_window(self, epoch: int, number: int) -> Ints:
        """Return the numbers of the samples in window `number` of an epoch: first those of the window's first step,
        then those of the second, and so on. The rows of an incomplete last batch stay in that batch."""
        assigned = self._assigned.get((epoch, number))
        if assigned is None:
            begin = number * self._window
            ids = self._own.ids(epoch, np.arange(begin, min(begin + self._window, len(self))))
            whole_rows = len(ids) - len(ids) % self._batch
            steps = assign_to_steps(self._costs.of(ids[:whole_rows]), whole_rows // self._batch)
            assigned = np.concatenate([*(ids[rows] for rows in steps), ids[whole_rows:]])
            kept = list(self._assigned.items())[1 - WINDOWS_KEPT :]
            self._assigned = {**dict(kept), (epoch, number): assigned}
        return assigned


class Balanced:
    """Balance of one loader: the order, and the costs by which the rows of a step are assigned to boxes."""

    def __init__(self, balance: Balance, plain: SampleOrder, dataset: Any, length: int, batch: int) -> None:
        """
        Args:
            balance: setting of the loader.
            plain: order without balance.
            dataset: dataset whose column the costs may come from.
            length: number of samples in the dataset.
            batch: number of rows that all boxes together have in a step.

        Raises InvalidArgumentError or DatasetError for invalid costs or steps.
        """
        if not isinstance(balance, Balance):
            raise InvalidArgumentError(
                f"balance must be a penstock.data.Balance or None, got {balance!r}. Pass Balance(cost, over_steps=1)"
            )
        if not isinstance(balance.report, bool):
            raise InvalidArgumentError(f"balance: report must be True or False, got {balance.report!r}. Pass one")
        self._plain, self._costs = plain, Costs(balance.cost, dataset, length)
        self._assigned = BalancedOrder(plain, self._costs, batch, balance.over_steps)
        self.order: SampleOrder = plain if balance.report else self._assigned
        self.assigns = not balance.report
        """True if rows are assigned to boxes by cost; False if the balance only reports what assigning would bring."""
        over_steps = not balance.report and balance.over_steps > 1
        self.described = {"cost": self._costs.digest, "rows": batch, "steps": balance.over_steps} if over_steps else {}
        """Settings of the balance that decide the order, as a part of the loader's state; empty if each step keeps its
        rows."""

    def imbalance(self, epoch: EpochRemainder, steps: int) -> Imbalance:
        """Return how unequal the boxes' costs are in the first `steps` steps of an epoch, with and without balance."""
        boxes, numbers = epoch.boxes, range(min(steps, epoch.batches))
        plain, assigned = [], []
        for number in numbers:
            rows = epoch.all_positions(number)
            costs = self._costs.of(self._plain.ids(epoch.epoch, rows))
            plain.append(cost_ratio(costs, assign_in_turn(len(costs), boxes)))
            costs = self._costs.of(self._assigned.ids(epoch.epoch, rows))
            assigned.append(cost_ratio(costs, assign_to_boxes(costs, boxes, number)))
        return Imbalance(float(np.mean(plain)), float(np.mean(assigned)))

    def assign(self, ids: Ints, boxes: int, turn: int) -> tuple[Sequence[Ints], float]:
        """Return the rows of each box in a step whose samples are `ids`, and the step's imbalance: the cost of the most
        expensive box divided by the mean over all boxes.

        Args:
            ids: numbers of the samples of the step's global batch.
            boxes: number of boxes.
            turn: number of the step; it decides which box gets the row that costs most, so that it is not always the
                same box.
        """
        costs = self._costs.of(ids)
        rows = assign_to_boxes(costs, boxes, turn) if self.assigns else assign_in_turn(len(costs), boxes)
        return rows, cost_ratio(costs, rows)
