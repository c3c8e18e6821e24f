"""Loaders of the four methods, with the habits of restartable loaders that Cerebras' users write."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from third_party import ROWS
from torch.utils.data import DataLoader, Dataset

from penstock.proto.state.restartable import get_worker_state
from penstock.worker import current_assignment


class SummedLoader(DataLoader):  # type: ignore[type-arg]
    """Four methods: one count of all samples streamed, by this launch and those before it. `load_state_dict` reads what
    `deaggregate_state_dict` returns, which is not what `state_dict` returns."""

    def __init__(self, rows: int = 76, dataset: Any = None, **options: Any) -> None:
        dataset = dataset or _Numbers(rows)
        super().__init__(dataset, batch_sampler=_Dealt(dataset), **options)
        self.previous = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples_streamed": get_worker_state().samples_streamed, "previous": self.previous}

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        total = worker_states[0]["previous"] + sum(state["samples_streamed"] for state in worker_states)
        return {"__version__": 1, "all_streamed": total}

    def deaggregate_state_dict(self, aggregated: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        return aggregated

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        if state["__version__"] != 1:
            raise ValueError("an unknown version")
        self.previous = state["all_streamed"]
        self.batch_sampler.set_state(self.previous)  # type: ignore[union-attr]


class _Numbers(Dataset[torch.Tensor]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class _Dealt:
    """Batches of four rows, shuffled by (seed, epoch) and dealt to all workers in turn, which goes on over the ends of
    epochs: the worker that gets an epoch's first batch is the one behind that of the last."""

    def __init__(self, dataset: _Numbers) -> None:
        place = current_assignment()
        self.rows = len(dataset)
        self.worker, self.workers = place.global_worker_id, place.total_num_workers
        self.start = self.turn = 0

    def set_state(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[list[int]]:
        epoch, begin = divmod(self.start, self.rows)
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(epoch)).tolist()
        groups = [order[at : at + 4] for at in range(begin, self.rows - 3, 4)]
        yield from groups[(self.worker - self.turn) % self.workers :: self.workers]
        self.turn = (self.turn + len(groups)) % self.workers
        self.start = (epoch + 1) * self.rows

    def __len__(self) -> int:
        groups = (self.rows - self.start % self.rows) // 4
        return len(range((self.worker - self.turn) % self.workers, groups, self.workers))


def summed() -> Any:
    return SummedLoader()


class _Counted(_Numbers):
    made = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.made += 1
        return torch.tensor([index, self.made])


def counted_by_own_workers(rows: int = 76) -> Any:
    """Worker processes of its own, which live over epochs, and whose number of samples so far is in each batch."""
    return SummedLoader(dataset=_Counted(rows), num_workers=1, persistent_workers=True)


class ShardPerWorker:
    """Four methods: each worker reads a shard of its own, and counts the samples of it over all launches."""

    def __init__(self, rows: int = ROWS) -> None:
        place = current_assignment()
        self.shard, self.shards = place.global_worker_id, place.total_num_workers
        self.rows = rows
        self.previous = self.seen = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        torch.empty((), dtype=torch.int64).random_()  # as torch's DataLoader draws a seed for its workers
        start = self.seen % self.rows
        for at in range(start, self.rows, 4):
            yield {"row": torch.arange(at, at + 4) + 1000 * self.shard}
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples_streamed": get_worker_state().samples_streamed + self.previous, "shard_index": self.shard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"samples_streamed", "shard_index"}:
            raise RuntimeError(f"not a state of one shard: {sorted(state)}")
        self.previous = self.seen = state["samples_streamed"]
        self.shard = state["shard_index"]

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"all_worker_states": sorted(worker_states, key=lambda state: state["shard_index"])}

    def deaggregate_state_dict(self, aggregated: dict[str, Any]) -> dict[str, Any]:
        states = aggregated["all_worker_states"]
        if len(states) != self.shards:
            raise RuntimeError("saved by another number of workers")
        behind = min(range(len(states)), key=lambda at: (states[at]["samples_streamed"], at))
        return dict(states[(self.shard + behind) % len(states)])


def shard_per_worker(rows: int = ROWS) -> Any:
    return ShardPerWorker(rows)


class OwnRows:
    """Four methods: each worker reads all rows from where it was, and from row 0 if the state is not for its number of
    workers. `period`: number of different batches."""

    def __init__(self, period: int = 1000, batch_s: float = 0.0) -> None:
        place = current_assignment()
        self.worker, self.workers = place.global_worker_id, place.total_num_workers
        self.period, self.batch_s, self.before = period, batch_s, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = self.before * self.workers + self.worker
        while True:
            time.sleep(self.batch_s)
            yield torch.full((2,), batch % self.period)
            batch += self.workers

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.before + get_worker_state().worker_step}

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"workers": worker_states}

    def deaggregate_state_dict(self, aggregated: dict[str, Any]) -> dict[str, Any]:
        states = aggregated["workers"]
        return states[self.worker] if len(states) == self.workers else {"batches": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state["batches"]
