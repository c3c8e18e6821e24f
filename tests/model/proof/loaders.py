"""Users' loaders, of every kind that went wrong once. Workers import this module by name.

What each is stands in kinds.py. Batches are small dicts; with `big` they exceed 128 KiB, and only a small leaf tells
two of them apart.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data
from proof.batches import batch_of
from proof.mutations import mutable
from proof.threads import Threaded
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from penstock.worker import current_assignment


class Numbers(Dataset[Any]):
    """Map-style: draws from the generators of the process in each item."""

    def __init__(self, length: int, big: bool = False, pause_s: float = 0.0, draws: bool = True) -> None:
        self.length, self.big, self.pause_s, self.draws = length, big, pause_s, draws

    def __len__(self) -> int:
        return self.length

    def drawn(self) -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()] if self.draws else []

    def __getitem__(self, index: int) -> Any:
        if self.pause_s:
            time.sleep(self.pause_s)
        return batch_of(index, self.drawn(), self.big)


def loader_of(dataset: Any, **given: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, **given)


@mutable
def shuffled(length: int = 12, big: bool = False, pause_s: float = 0.0) -> Any:
    return loader_of(Numbers(length, big, pause_s), shuffle=True)


class Noisy(Numbers):
    """Label noise from generators of its own."""

    def __init__(self, length: int, big: bool, pause_s: float, seed: int | None = 5, marked: bool = False) -> None:
        super().__init__(length, big, pause_s)
        self.rng = np.random.default_rng(seed)
        self.other = random.Random(9)
        self.mark = float(np.random.default_rng().random()) if marked else 0.0

    def drawn(self) -> list[float]:
        drawn = [*super().drawn(), float(self.rng.random()), self.other.random()]
        return [*drawn, self.mark, current_assignment().epoch] if self.mark else drawn


@mutable
def own_generators(length: int = 12, big: bool = False, pause_s: float = 0.0) -> Any:
    generator = torch.Generator()
    generator.manual_seed(3)
    return loader_of(Noisy(length, big, pause_s), shuffle=True, generator=generator)


@mutable
def entropy(length: int = 12, big: bool = False, pause_s: float = 0.0, hidden: bool = False) -> Any:
    """hidden: no generator that the loader holds shows it."""
    return loader_of(Noisy(length, big, pause_s, seed=5 if hidden else None, marked=True), shuffle=True)


@mutable
def with_workers(length: int = 10, big: bool = False, workers: int = 1, persistent: bool = False) -> Any:
    return loader_of(Numbers(length, big), shuffle=True, num_workers=workers, persistent_workers=persistent)


class Text(IterableDataset[Any]):
    """Keeps its place in the dataset, as torchtitan's."""

    def __init__(self, length: int, pause_s: float, big: bool) -> None:
        self.length, self.pause_s, self.big, self.place = length, pause_s, big, 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.length:
            self.place += 1
            if self.pause_s:
                time.sleep(self.pause_s)
            yield batch_of(self.place - 1, [], self.big)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


@mutable
def keeps_place(length: int = 25, pause_s: float = 0.003, big: bool = False) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Text(length, pause_s, big), batch_size=None)


class Counter:
    """Loader of its own kind, with two state methods."""

    def __init__(self, length: int, pause_s: float = 0.0, big: bool = False) -> None:
        self.length, self.pause_s, self.big = length, pause_s, big
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        while self.done < self.length:
            self.done += 1
            if self.pause_s:
                time.sleep(self.pause_s)
            yield self.batch()
        self.done = 0

    def batch(self) -> Any:
        return batch_of(self.done - 1, [float(torch.rand(()))], self.big)

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


@mutable
def counter(length: int = 15, pause_s: float = 0.0, big: bool = False) -> Any:
    return Counter(length, pause_s, big)


class LiesAtOnce(Counter):
    """Its state is of one batch earlier."""

    def state_dict(self) -> dict[str, Any]:
        return {"done": max(0, self.done - 1)}


@mutable
def lies_at_once(length: int = 15, pause_s: float = 0.002, big: bool = False) -> Any:
    return LiesAtOnce(length, pause_s, big)


class LiesLate(Counter):
    """Its state is right for 100 batches."""

    def state_dict(self) -> dict[str, Any]:
        return {"done": min(self.done, 100)}


@mutable
def lies_late(length: int = 140, big: bool = False) -> Any:
    return LiesLate(length, big=big)


class CountsEpochs(Sampler[int]):
    """Shuffles by a count of its own."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


@mutable
def counts_epochs(length: int = 12, big: bool = False) -> Any:
    return loader_of(Numbers(length, big), sampler=CountsEpochs(length))


class DetShuffle(IterableDataset[Any]):
    """As WebDataset's detshuffle: its generator is seeded by a count of epochs of its own."""

    def __init__(self, length: int, pause_s: float, big: bool) -> None:
        self.length, self.pause_s, self.big, self.epoch = length, pause_s, big, -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        rng = random.Random()
        rng.seed(self.epoch + 1000)
        ahead: list[int] = []
        for number in range(self.length):
            ahead.append(number)
            if len(ahead) > 4:
                yield self._one(ahead.pop(rng.randrange(len(ahead))))
        while ahead:
            yield self._one(ahead.pop(rng.randrange(len(ahead))))

    def _one(self, number: int) -> Any:
        if self.pause_s:
            time.sleep(self.pause_s)
        return batch_of(number, [float(torch.rand(()))], self.big)


@mutable
def detshuffle(length: int = 12, pause_s: float = 0.0, big: bool = False) -> Any:
    return loader_of(DetShuffle(length, pause_s, big))


class SetsEpoch(CountsEpochs):
    """As torch's DistributedSampler: shuffles by the epoch that it is told."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.Random(100 + self.epoch).shuffle(order)
        return iter(order)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@mutable
def sets_epoch(length: int = 12, big: bool = False) -> Any:
    return loader_of(Numbers(length, big), sampler=SetsEpoch(length))


class ReadsEpoch(Numbers):
    """Asks for the number of the epoch."""

    def drawn(self) -> list[float]:
        return [float(current_assignment().epoch)]


@mutable
def reads_epoch(length: int = 12, big: bool = False) -> Any:
    return loader_of(ReadsEpoch(length, big), shuffle=True)


@mutable
def threads(length: int = 20) -> Any:
    return Threaded(length)


class Uneven(IterableDataset[Any]):
    """Lengths that differ from slot to slot and from epoch to epoch; slot 0 has a batch in each."""

    def __init__(self, longest: int, big: bool) -> None:
        self.longest, self.big = longest, big

    def __iter__(self) -> Iterator[Any]:
        least = 0 if current_assignment().slot else 1
        for number in range(max(least, random.randrange(-2, self.longest))):
            yield batch_of(number, [float(torch.rand(()))], self.big)


@mutable
def uneven(longest: int = 10, big: bool = False) -> Any:
    return loader_of(Uneven(longest, big))


class SometimesEmpty(Uneven):
    """Each third epoch has no batch on some slots, or, with `everywhere`, on none."""

    def __init__(self, longest: int, big: bool, everywhere: bool) -> None:
        super().__init__(longest, big)
        self.epoch, self.everywhere = 0, everywhere

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        is_empty = self.epoch % 3 == 1 and (self.everywhere or current_assignment().slot > 0)
        return iter(()) if is_empty else super().__iter__()


@mutable
def empty_epochs(longest: int = 10, big: bool = False, everywhere: bool = False) -> Any:
    return loader_of(SometimesEmpty(longest, big, everywhere))


@mutable
def stateful(length: int = 12, big: bool = False, workers: int = 0, pause_s: float = 0.0) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(length, big, pause_s), batch_size=None, shuffle=True, num_workers=workers)


@mutable
def infinite(pause_s: float = 0.001, big: bool = False) -> Iterator[Any]:
    return _numbers(pause_s, big)


def _numbers(pause_s: float, big: bool) -> Iterator[Any]:
    number = 0
    while True:
        time.sleep(pause_s)
        number += 1
        yield batch_of(number, [float(torch.rand(()))], big)


@mutable
def vouched(length: int = 160, shuffle: bool = True, big: bool = False, draws: bool = False) -> Any:
    from torch.utils.data import TensorDataset

    from penstock.data import MapLoader

    if draws:  # MapLoader seeds the generators for each sample
        return MapLoader(Numbers(length, big), batch_size=2, shuffle=shuffle)
    columns = [torch.arange(length), *([torch.zeros(length, 10_000)] if big else [])]
    return MapLoader(TensorDataset(*columns), batch_size=4, shuffle=shuffle)


class Sharded(IterableDataset[Any]):
    """Divides its samples by torch's get_worker_info(), or by what it has read before."""

    def __init__(self, length: int, reads: str) -> None:
        self.length, self.box, self.boxes = length, 0, 1
        place = current_assignment() if reads != "nothing" else None
        if place is not None:
            self.box, self.boxes = place.box, place.num_boxes
            if reads == "slot":
                self.box, self.boxes = place.global_worker_id, place.total_num_workers

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for number in range(self.box * workers + worker, self.length, self.boxes * workers):
            yield torch.tensor([number, float(torch.rand(()))])


@mutable
def shards(length: int = 40, reads: str = "nothing", workers: int = 0) -> Any:
    return loader_of(Sharded(length, reads), num_workers=workers)
