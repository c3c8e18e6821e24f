"""Loaders as users write them, good and bad. Workers of the system tests import this module by name."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from penstock.proto.state.restartable import get_worker_state
from penstock.worker import current_assignment


class Counter:
    """Two methods: batch i is full of i. Counts before it yields."""

    def __init__(self, batches: int, first: int = 0) -> None:
        self.batches = batches
        self.first = first
        self.done = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.done < self.batches:
            self.done += 1
            number = self.first + self.done
            yield {"x": torch.full((4,), number), "number": number}
        self.done = 0

    def __len__(self) -> int:
        return self.batches

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def counter(batches: int = 10) -> Counter:
    """Each worker counts in a range of its own."""
    return Counter(batches, first=1000 * current_assignment().global_worker_id)


class Gaps(Counter):
    """Every second batch is None."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch if batch["number"] % 2 else None


def gaps(batches: int) -> Gaps:
    return Gaps(batches, first=1000 * current_assignment().global_worker_id)


class Paced(Counter):
    """Takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1 << 40, first=1000 * current_assignment().global_worker_id)
        self.seconds = seconds

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            time.sleep(self.seconds)
            yield batch


def paced(seconds: float) -> Paced:
    """Each worker counts in a range of its own, without an end."""
    return Paced(seconds)


def lagging(seconds: float, slot: int) -> Counter:
    """Slot `slot` of box 0 takes its time, the others take none."""
    place = current_assignment()
    return Paced(seconds if (place.box, place.slot) == (0, slot) else 0.0)


class Unsized(Counter):
    __len__ = None  # type: ignore[assignment]  # so that len() is a TypeError


def unsized(batches: int) -> Unsized:
    return Unsized(batches, first=1000 * current_assignment().global_worker_id)


def uneven(lengths: list[int]) -> Counter:
    """Worker k yields lengths[k] batches an epoch."""
    place = current_assignment()
    return Counter(lengths[place.global_worker_id], first=1000 * place.global_worker_id)


def same_on_all_boxes(batches: int) -> Counter:
    return Counter(batches, first=1000 * current_assignment().slot)


class Shared(Counter):
    """Four methods: all workers deal out one range, and any number of them go on where others stopped."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.start = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        place = current_assignment()
        while True:
            number = self.start + self.done * place.total_num_workers + place.global_worker_id
            if number >= self.batches:
                break
            self.done += 1
            yield {"x": torch.full((4,), number), "number": number}
        self.start = self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "done": self.done}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        self.start, self.done = state["start"], state["done"]

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"start": worker_states[0]["start"], "done": [state["done"] for state in worker_states]}

    def deaggregate_state_dict(self, aggregated: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        place = current_assignment()
        done = aggregated["done"]
        if len(done) == place.total_num_workers:
            return {"start": aggregated["start"], "done": done[place.global_worker_id]}
        return {"start": aggregated["start"] + sum(done), "done": 0}


def shared(batches: int = 30) -> Shared:
    return Shared(batches)


class SharedNoisy(Shared):
    """Loader with randomness that its state does not contain."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            keys = [f"{batch['number']}-{row}" for row in range(4)]
            yield {**batch, "noise": torch.rand(4, 2), "keys": keys}


def shared_noisy(batches: int = 30) -> SharedNoisy:
    return SharedNoisy(batches)


class Mixed(Counter):
    """A bit of everything that a batch may hold."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            number = batch["number"]
            yield {
                "matrix": torch.arange(number, number + 12.0).view(3, 4).t(),
                "flags": torch.tensor([True, False, bool(number % 2)]),
                "half": torch.full((2, number % 3), number, dtype=torch.bfloat16),
                "complex": torch.tensor([complex(number, 1)]),
                "scalar": torch.tensor(number),
                "array": np.arange(number % 5, dtype=">i2"),
                "rest": (f"sample {number}", bytes([number % 7]), number, number / 3, None),
            }


def mixed(batches: int = 10) -> Mixed:
    """Each worker counts in a range of its own."""
    return Mixed(batches, first=1000 * current_assignment().global_worker_id)


class OnlyOnWorkers(Shared):
    """Its data are where the workers are, and nowhere else."""

    def __init__(self, batches: int) -> None:
        if "PENSTOCK_RUNNER" not in os.environ:
            raise FileNotFoundError("/data/only-on-workers")
        super().__init__(batches)


def only_on_workers(batches: int = 30) -> OnlyOnWorkers:
    return OnlyOnWorkers(batches)


class AsksWhere(Shared):
    """Its state depends on the step that it is saved at."""

    def state_dict(self) -> dict[str, Any]:
        state = get_worker_state()
        return super().state_dict() | {"step": state.appliance_step, "worker_step": state.worker_step}


def asks_where(batches: int = 30) -> AsksWhere:
    return AsksWhere(batches)


class Noisy(Dataset[Any]):
    """Map style, with randomness of all three generators in each item."""

    def __init__(self, items: int, noise: bool) -> None:
        self.items = items
        self.noise = noise

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Any:
        if not self.noise:
            return torch.tensor([index, 0.0, 0.0])
        return torch.tensor([index, float(torch.rand(())), float(np.random.rand())])


def shuffled(items: int = 24, workers: int = 0, noise: bool = True) -> DataLoader[Any]:
    """A plain torch DataLoader: no state methods."""
    current_assignment()
    return DataLoader(Noisy(items, noise), batch_size=4, shuffle=True, num_workers=workers)


def stateful(items: int = 24, workers: int = 0, noise: bool = True) -> Any:
    """torchdata's StatefulDataLoader: two methods."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    current_assignment()
    return StatefulDataLoader(Noisy(items, noise), batch_size=4, shuffle=True, num_workers=workers)


def generator(batches: int = 6) -> Iterator[torch.Tensor]:
    """Its own iterator, with randomness."""
    place = current_assignment()
    for number in range(batches):
        yield torch.tensor([place.global_worker_id, number, int(torch.randint(0, 1 << 30, ()))])


class Sharded(IterableDataset[Any]):
    """Shards by torch's get_worker_info, as iterable datasets do."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        start, stride = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(start, 24, stride)


def unsharded(batches: int = 6) -> list[torch.Tensor]:
    """Never asks who it is."""
    return [torch.tensor(number) for number in range(batches)]


# ---- inputs that are wrong


class CountsLate(Counter):
    """Counts after its yield: restored, it repeats a batch."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        current_assignment()
        while self.done < self.batches:
            yield {"x": torch.full((4,), self.done)}
            self.done += 1
        self.done = 0


def counts_late(batches: int = 50) -> CountsLate:
    return CountsLate(batches)


def returns_number() -> int:
    return 3


def empty() -> list[torch.Tensor]:
    return []


def raises() -> None:
    raise ValueError("no such dataset")


def raises_at(batch: int) -> Iterator[torch.Tensor]:
    current_assignment()
    for number in range(batch - 1):
        yield torch.tensor(number)
    raise KeyError("broken sample")


class BadState(Counter):
    """Fails to save itself."""

    def state_dict(self) -> dict[str, Any]:
        raise OSError("state_dict cannot reach its server")


def bad_state(batches: int = 20) -> BadState:
    current_assignment()
    return BadState(batches)


class OddState(Counter):
    """Its state holds an object without a safe encoding."""

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "lock": threading.Lock()}


def odd_state(batches: int = 20) -> OddState:
    current_assignment()
    return OddState(batches)


class BadDeaggregate(Shared):
    def deaggregate_state_dict(self, aggregated: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        raise LookupError("no such worker in the state")


def bad_deaggregate(batches: int = 30) -> BadDeaggregate:
    return BadDeaggregate(batches)


class HalfStrict(Shared):
    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(state)


def half_strict(batches: int = 30) -> Any:
    return HalfStrict(batches)


def growing(sizes: list[int]) -> Iterator[torch.Tensor]:
    current_assignment()
    for size in sizes:
        yield torch.full((size,), size % 251, dtype=torch.uint8)


def talks() -> Iterator[torch.Tensor]:
    current_assignment()
    print("hello from the input")
    for number in range(4):
        yield torch.tensor(number)


def dies_at(batch: int, marker: str) -> Iterator[torch.Tensor]:
    """Kills itself once, before this batch; the marker file remembers."""
    place = current_assignment()
    for number in range(40):
        if number + 1 == batch and place.global_worker_id == 0 and not os.path.exists(marker):
            with contextlib.suppress(OSError), open(marker, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        yield torch.tensor([place.global_worker_id, number, int(torch.randint(0, 1 << 30, ()))])


def slow(seconds: float, batches: int = 20) -> Iterator[torch.Tensor]:
    """Costs time, on worker 0 only."""
    place = current_assignment()
    for number in range(batches):
        if place.global_worker_id == 0:
            time.sleep(seconds)
        yield torch.tensor(number)


def surroundings() -> Iterator[dict[str, Any]]:
    """Yield what user code finds in a runner's process."""
    import sys

    place = current_assignment()
    yield {
        "numbers": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        "hash": hash("penstock"),
        "torch_threads": torch.get_num_threads(),
        "threads": len(os.listdir("/proc/self/task")),
        "cuda": os.environ["CUDA_VISIBLE_DEVICES"],
        "grpc": "grpc" in sys.modules,
        "environment": sorted(os.environ),
        "place": [place.box, place.num_boxes, place.slot, place.num_workers_per_box, place.seed, place.first_step],
        "leads_group": os.getpgrp() == os.getpid(),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "fork_server": int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]),
    }


def forks_and_dies(marker: str) -> Iterator[torch.Tensor]:
    """Leaves a child that holds all its descriptors, and is killed."""
    current_assignment()
    for number in range(10):
        if number == 4 and not os.path.exists(marker):
            child = os.fork()
            if child == 0:
                time.sleep(600)
            with open(marker, "w") as file:
                file.write(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        yield torch.tensor(number)


def leaves(how: str) -> Iterator[torch.Tensor]:
    """User code that ends in odd ways at its third batch."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    current_assignment()
    yield torch.tensor(0)
    yield torch.tensor(1)
    if how == "exit":
        raise SystemExit(3)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "surrogate":
        raise ValueError("bad \udcff name")
    if how == "long":
        raise ValueError("y" * 10_000_000)
    raise Mute


class Fresh:
    """A new pass on each iter(), unless a state was loaded just before; learns of it lazily, in the first next()."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.epoch, self.done, self.loaded = -1, 0, False
        self.first = 1000 * current_assignment().global_worker_id

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.loaded:
            self.loaded = False
        else:
            self.epoch, self.done = current_assignment().epoch, 0
        while self.done < self.batches:
            self.done += 1
            yield torch.tensor([self.first + self.done, self.epoch, int(torch.randint(0, 1 << 30, ()))])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done, self.loaded = state["epoch"], state["done"], True


def fresh(batches: int = 8) -> Fresh:
    return Fresh(batches)


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([float(index)]), "number": index}


def epochs(batches: int = 6) -> Any:
    """Shuffled anew in each epoch, also in one that is begun after one that was left."""
    from penstock.data import MapLoader

    return MapLoader(Numbered(), batch_size=1, shuffle=True)


class Queue:
    """No state methods, and what was read is gone."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(100):
            self.read += 1
            yield torch.tensor(self.read)


def queue() -> Queue:
    current_assignment()
    return Queue()


def large(batches: int = 6, flip: int = -1) -> Iterator[torch.Tensor]:
    """1 MiB each; the second batch of worker 0 has another byte at `flip`."""
    place = current_assignment()
    for number in range(batches):
        batch = torch.full((1 << 20,), number + place.slot, dtype=torch.uint8)
        if flip >= 0 and number == 1 and place.slot == 0:
            batch[flip] += 1
        yield batch


def unrepeatable(batches: int = 1000) -> Iterator[torch.Tensor]:
    """Other data whenever it is asked."""
    current_assignment()
    for _ in range(batches):
        yield torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)
