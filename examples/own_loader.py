"""Loader with the four methods, which can be saved at any step and resumed on any topology.

penstock.data has such loaders; this one shows their parts, with the windows of train_lm:

    PYTHONPATH=examples penstock doctor own_loader:input_fn --kwargs '{"batch_size": 16, "num_windows": 640}'

An epoch is one list of batches, shuffled by (seed, epoch). It is divided among the workers in turn, box by box, and
each box's workers in turn. With 2 boxes of 2 workers:

    batch    0  1  2  3  4  5  6  7
    box      0  1  0  1  0  1  0  1
    slot     0  0  1  1  0  0  1  1
    step     1  1  2  2  3  3  4  4

Penstock takes from a box's slots in turn too, so at every step the boxes together have taken the first batches of the
list, in its order: step s of box b is always batch (s - 1) * num_boxes + b. On another number of workers the rest
of the list is divided again. So no window is repeated or missed, and the order stays the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from train_lm.data import Windows

from penstock.worker import current_assignment

__all__ = ["WindowLoader", "input_fn"]


def input_fn(batch_size: int, num_windows: int) -> WindowLoader:
    """Return the loader; Penstock calls this in each worker. The arguments are those of the DataLoader."""
    return WindowLoader(Windows(num_windows).windows, batch_size)


class WindowLoader:
    """Share of one worker of the epochs' batches, each a dict of

    tokens: uint8, [batch_size, WINDOW + 1]; window: int64, [batch_size], the windows' numbers; epoch: int, from 0.
    """

    # load_state_dict also accepts a result of state_dict, so that a lost worker need not start over
    loads_own_state = True

    def __init__(self, windows: torch.Tensor, batch_size: int) -> None:
        self.windows = windows
        self.batch_size = batch_size
        self.me = current_assignment()
        self.epoch = 0
        self.start = 0  # batches of the epoch's list that were taken before this division
        self.taken = 0  # batches of its share that this worker has yielded

    def share(self) -> range:
        """Return the range of this worker's batches: their numbers in the epoch's list."""
        end = len(self.windows) // self.batch_size
        end -= (
            end - self.start
        ) % self.me.num_boxes  # all boxes take the same number of steps, otherwise collectives would hang
        first = self.start + self.me.slot * self.me.num_boxes + self.me.box
        return range(first, end, self.me.total_num_workers)

    def __len__(self) -> int:
        return len(self.share())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rest of this epoch; the next call continues with the next epoch."""
        order = list(range(len(self.windows)))
        random.Random(f"{self.me.seed} {self.epoch}").shuffle(order)
        for number in self.share()[self.taken :]:
            self.taken += 1  # before the yield: a state counts the batch that was just yielded
            window = torch.tensor(order[number * self.batch_size : (number + 1) * self.batch_size])
            yield {"tokens": self.windows[window], "window": window, "epoch": self.epoch}
        self.epoch, self.start, self.taken = self.epoch + 1, 0, 0

    # The four methods make the loader restartable on any number of workers and boxes.

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's position. Penstock calls this on each worker."""
        shape = {"num_boxes": self.me.num_boxes, "num_workers": self.me.total_num_workers}
        return {**shape, "epoch": self.epoch, "start": self.start, "taken": self.taken}

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one state made from those of all workers, which are in order of global_worker_id. Called in the
        training job."""
        first, *others = [{**state, "taken": 0} for state in worker_states]
        if any(other != first for other in others):
            raise ValueError(
                f"all worker states must be of the same epoch and batches, got {worker_states}. Pass states that were "
                "saved at one step"
            )
        return {**first, "taken": [state["taken"] for state in worker_states]}

    def deaggregate_state_dict(self, aggregated: dict[str, Any]) -> dict[str, Any]:
        """Return this worker's own state from an aggregated one, when a run is resumed. Called on each worker; there
        may be more or fewer workers than before."""
        taken = aggregated["taken"]
        if (aggregated["num_boxes"], aggregated["num_workers"]) == (self.me.num_boxes, self.me.total_num_workers):
            return {**aggregated, "taken": taken[self.me.global_worker_id]}  # the same division continues
        return {**aggregated, "start": aggregated["start"] + sum(taken), "taken": 0}  # the rest is divided again

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to this worker's position in `state`. Called on each worker."""
        self.epoch, self.start, self.taken = state["epoch"], state["start"], state["taken"]
