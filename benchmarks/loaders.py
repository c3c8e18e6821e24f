"""Datasets that yield the batches of a case (cases.py), for all players that use torch: those of Penstock, DataLoader
and StatefulDataLoader.

The memory of a batch exists already, but its tensor objects are new each time. If one object were repeated, torch's
DataLoader would look faster than with real data: it moves a tensor to shared memory when it first sends the tensor, and
does not copy the same object again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data
from benchmarks.cases import LEAF_SHAPE, Case, spin

__all__ = ["Asleep", "Ready", "Stateful", "asleep", "make", "source"]

STATE_TENSOR_BYTES = 1 << 10
SLEEP_S = 0.02
"""Seconds for which each source sleeps before each batch, in the benchmark of many slots (slots.py)."""


class Ready(torch.utils.data.IterableDataset[Any]):
    """Endless dataset of a case's batches."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.at = 0
        """Number of batches that were begun."""

    def __iter__(self) -> Iterator[Any]:
        case = self.case
        work = self._work if case.busy_s or case.work else None
        # A restored source must yield the same batches, so it uses none of the process's generators.
        random = np.random.default_rng(0)
        if case.leaves == 1:
            ready = random.integers(0, 255, case.nbytes, dtype=np.uint8)
            while True:
                self.at += 1
                if work is not None:
                    work()
                yield torch.from_numpy(ready)
        leaves = {f"leaf{n}": random.integers(0, 1 << 40, LEAF_SHAPE) for n in range(case.leaves)}
        while True:
            self.at += 1
            yield {name: torch.from_numpy(leaf) for name, leaf in leaves.items()}

    def _work(self) -> None:
        if self.case.busy_s:
            until = time.perf_counter() + self.case.busy_s
            while time.perf_counter() < until:
                pass
        else:
            spin(self.case.work)


class Stateful(Ready):
    """Endless dataset of a case's batches that has a state: its position, and tensors of 1 KiB.

    The tensors of each state are new, as in the state of a generator or a shuffle buffer.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.tensors = [torch.zeros(STATE_TENSOR_BYTES, dtype=torch.uint8) for _ in range(case.state_tensors or 0)]
        self._counter = np.memmap(case.counter, np.int64, "r+") if case.counter else None

    def state_dict(self) -> dict[str, Any]:
        if self._counter is not None:
            self._counter[0] += 1
        return {"at": self.at, "tensors": [tensor.clone() for tensor in self.tensors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.tensors = state["at"], state["tensors"]


def make(case: Case) -> Ready:
    return Ready(case) if case.state_tensors is None else Stateful(case)


def source(**case: Any) -> Ready:
    """Return the dataset of a case, with a state if the case says so: the input_fn. `case`: attributes of a Case, as
    plain values."""
    return make(Case(**case))


class Asleep(torch.utils.data.IterableDataset[torch.Tensor]):
    """Endless dataset of batches of 4 KiB, which contain the number of their slot and their own number in it. It sleeps
    SLEEP_S before each."""

    def __init__(self, slot: int) -> None:
        self.slot = slot

    def __iter__(self) -> Iterator[torch.Tensor]:
        index = 0
        while True:
            time.sleep(SLEEP_S)
            batch = np.zeros(512, np.int64)
            batch[:2] = self.slot, index
            index += 1
            yield torch.from_numpy(batch)


def asleep() -> Asleep:
    """Return the sleeping dataset of this worker: the input_fn of slots.py."""
    from penstock.worker import current_assignment  # not available in the peers' environments

    return Asleep(current_assignment().slot)
