"""Loaders that build their batches in the ring, each way with the same batches built in ordinary memory beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from penstock.proto.batch import flatten
from penstock.worker import collate, current_assignment, empty
from penstock.worker.batch import entry_lease

entry_lease.WORTH_FROM = 0  # in the runner that imports this

ROWS = 8
WIDTH = 512


class Pair(NamedTuple):
    left: Any
    right: Any


class Items(Dataset[Any]):
    """Dataset whose samples have each kind of leaf, and some noise."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Any:
        return {
            "image": torch.arange(WIDTH) * index + torch.randint(0, 1000, ()),
            "label": index,
            "pair": Pair(np.full((3, 5), index, np.int16), index / 7),
            "name": f"item {index}" * (index % 9),
            "many": [torch.full((17,), float(index), dtype=torch.bfloat16), torch.tensor(index % 2 == 0)],
            "flag": index % 3 == 0,
        }


def in_ring(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's memory belongs to a ring."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "penstock-ring" in line:
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                if low <= tensor.data_ptr() < high:
                    return True
    return False


moved = 0


def count_moved() -> None:
    """Count the bytes of tensors that are copied into the ring."""

    def counted(move: Callable[[int, Any, int], Any]) -> Callable[[int, Any, int], Any]:
        def moving(target: int, source: Any, size: int) -> None:
            global moved
            moved += size
            move(target, source, size)

        return moving

    flatten._move = counted(flatten._move)  # type: ignore[assignment]
    flatten._move_holding = counted(flatten._move_holding)


def watched(samples: list[Any]) -> Any:
    """Says of each batch whether it lies in the ring, and how much of the one before was moved."""
    global moved
    batch = collate(samples)
    batch["in_ring"] = in_ring(batch["image"])
    batch["moved"], moved = moved, 0
    return batch


class DiesOnce:
    """A collate function that kills its process at one batch, once."""

    def __init__(self, plain: Any, batch: int, marker: str) -> None:
        self.plain = plain
        self.left = batch
        self.marker = Path(marker)

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.plain(samples)
        self.left -= 1
        if not self.left and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def collated(how: str, items: int = 400, workers: int = 0, stateful: bool = False, dies: Any = None) -> Any:
    """how: "default", "ours" or "watched". dies: (batch, marker)."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    current_assignment()
    function: Any = {"default": default_collate, "ours": collate, "watched": watched}[how]
    if how == "watched":
        count_moved()
    if dies is not None:
        function = DiesOnce(function, *dies)
    kind: Any = StatefulDataLoader if stateful else DataLoader
    return kind(Items(items), batch_size=ROWS, shuffle=True, num_workers=workers, collate_fn=function)


# ---- by hand


def numbers(first: int) -> list[torch.Tensor]:
    return [torch.full((WIDTH,), 1000 * first + row) for row in range(ROWS)]


def made(number: int, ours: bool) -> dict[str, Any]:
    """A batch of two tensors and a number."""
    xs, ys = numbers(number), numbers(-number)
    if not ours:
        return {"x": torch.stack(xs), "y": torch.stack(ys), "number": number}
    return {
        "x": torch.stack(xs, out=empty((len(xs), WIDTH), torch.int64)),
        "y": torch.stack(ys, out=empty((len(ys), WIDTH), torch.int64)),
        "number": number,
    }


def held(count: int, ours: bool) -> Iterator[Any]:
    """Keeps all of its batches, and finds them unchanged."""
    kept = []
    for number in range(count):
        kept.append(made(number, ours))
        yield kept[-1]
        for old, batch in enumerate(kept):
            assert int(batch["x"][0, 0]) == 1000 * old, f"batch {old} changed"
            assert int(batch["y"][-1, -1]) == -1000 * old + ROWS - 1, f"batch {old} changed"


def prefetched(count: int, ours: bool) -> Iterator[Any]:
    ahead: deque[Any] = deque()
    for number in range(count):
        ahead.append(made(number, ours))
        if len(ahead) > 3:
            yield ahead.popleft()
    while ahead:
        yield ahead.popleft()


def fetched_by_a_thread(count: int, ours: bool) -> Iterator[Any]:
    """The next batch is made while this one is away."""
    for number in range(count):
        ready: list[Any] = []
        thread = threading.Thread(target=lambda ready=ready, number=number: ready.append(made(number, ours)))
        thread.start()
        mine = made(-number, ours)
        thread.join()
        yield {"mine": mine, "its": ready.pop()}


def stumbling(count: int, ours: bool) -> Iterator[Any]:
    """Drops every third batch when it is ready, by an exception of its own."""
    for number in range(count):
        with contextlib.suppress(ValueError):
            batch = made(number, ours)
            if number % 3 == 1:
                raise ValueError(batch)
            yield batch


def forking(count: int, ours: bool) -> Iterator[Any]:
    """A child gets each batch before it is yielded, and scribbles over it before and after."""
    for number in range(count):
        batch = made(number, ours)
        reader, writer = os.pipe()
        child = 0
        if number % 10 == 4:
            child = os.fork()
            if not child:
                empty(10)
                os.read(reader, 1)
                batch["x"].fill_(-7)
                os._exit(0)
        yield batch
        if child:
            os.write(writer, b"x")
            os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


BY_HAND: dict[str, Callable[[int, bool], Iterator[Any]]] = {
    function.__name__: function
    for function in (
        held,
        prefetched,
        fetched_by_a_thread,
        stumbling,
        forking,
    )
}


def by_hand(how: str, count: int, ours: bool) -> Iterator[Any]:
    current_assignment()
    return BY_HAND[how](count, ours)


class Stateful:
    """Its state_dict and its iter make batches of their own."""

    def __init__(self, count: int, ours: bool) -> None:
        self.count = count
        self.ours = ours
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        made(1, self.ours)
        while self.done < self.count:
            self.done += 1
            yield collate(numbers(self.done)) if self.ours else torch.stack(numbers(self.done))
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        batch = made(self.done, self.ours)
        assert not in_ring(batch["x"])
        return {"done": batch["number"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def stateful(count: int, ours: bool) -> Stateful:
    current_assignment()
    return Stateful(count, ours)


def swallows(marker: str) -> Iterator[Any]:
    """Goes on whatever happens, without end."""
    current_assignment()
    number = 0
    while True:
        number += 1
        try:
            batch = [collate(numbers(number))]
        except BaseException as error:
            Path(marker).write_text(repr(error))
            continue
        # Lets go of it, too, so that the next one is built in the ring.
        yield {"rows": batch.pop(), "pid": os.getpid()}


def one_more(count: int, ours: bool) -> Iterator[Any]:
    """Makes a batch in vain at the end of each epoch."""
    current_assignment()
    for number in range(count):
        yield made(number, ours)
    made(count, ours)
