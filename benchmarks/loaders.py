"""The loaders of the cases for everything that runs torch: Penstock's workers, DataLoader, StatefulDataLoader.

Memory is ready and the tensor object is new for each batch. The same object each time would flatter torch's DataLoader,
which moves a tensor's memory to shared memory when it first sends it and then never copies again: no loader of real
data has that luck.
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
"""Seconds that each source of the suite of many slots sleeps for a batch."""


class Ready(torch.utils.data.IterableDataset[Any]):
    """A case's batches, for ever."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.at = 0
        """Batches begun."""

    def __iter__(self) -> Iterator[Any]:
        case = self.case
        work = self._work if case.busy_s or case.work else None
        random = np.random.default_rng(0)  # a restored source must yield the same, so no generator of the process's
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
    """The same with a state: where it is, and tensors of 1 KiB.

    The tensors of each state are new ones, as those of a generator's or a shuffle buffer's state are.
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
    """An input_fn: Penstock passes plain values to workers."""
    return make(Case(**case))


class Asleep(torch.utils.data.IterableDataset[torch.Tensor]):
    """Batches of 4 KiB that say which slot they are from and how many there were before; each takes 20 ms of sleep."""

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
    """An input_fn."""
    from penstock.worker import current_assignment  # not to be had in the peers' environments

    return Asleep(current_assignment().slot)
