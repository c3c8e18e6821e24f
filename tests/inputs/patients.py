"""Loaders for `penstock doctor` that streams.py has no need of: each is ill in its own way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import streams
import torch

from penstock.worker import current_assignment


def unrepeatable(batches: int = 40) -> Iterator[torch.Tensor]:
    """Other batches each time, whatever the seed."""
    current_assignment()
    for _ in range(batches):
        yield torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)


def unsharded(batches: int = 40) -> streams.Counter:
    """Asks who it is, and streams the same on all workers."""
    current_assignment()
    return streams.Counter(batches)


class ForgetsItsEnd(streams.Counter):
    """Exact within an epoch; its state does not say where the epoch ends."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.batches += 1


def forgets_its_end(batches: int = 6) -> ForgetsItsEnd:
    current_assignment()
    return ForgetsItsEnd(batches)


class AggregatesBadly(streams.Shared):
    """Each worker's own state is right; put together, one is lost."""

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        return super().aggregate_state_dict([worker_states[0], *worker_states[:-1]])

    def deaggregate_state_dict(self, aggregated: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        return super().deaggregate_state_dict(aggregated) | {"done": 0}


def aggregates_badly(batches: int = 100) -> AggregatesBadly:
    return AggregatesBadly(batches)


def talks(batches: int = 100) -> streams.Shared:
    print("hello from the input")
    return streams.shared(batches)


def crashes() -> Iterator[torch.Tensor]:
    yield torch.zeros(1)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(marker: str) -> Iterator[torch.Tensor]:
    """Never yields a second batch; the marker holds its process id once it hangs."""
    yield torch.zeros(1)
    with open(marker + ".part", "w") as out:
        out.write(str(os.getpid()))
    os.rename(marker + ".part", marker)
    waits_for_ever()


def waits_for_ever() -> None:
    threading.Event().wait()


def leaves_behind(marker: str) -> Iterator[torch.Tensor]:
    """Starts a process and forgets it; the marker lists their ids."""
    current_assignment()
    forgotten = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with open(marker, "a") as out:
        out.write(f"{forgotten.pid}\n")
    for number in range(100):
        yield torch.tensor(number)


class HeldFile(torch.utils.data.Dataset[int]):
    """Its file is open from the beginning, and the processes of torch's loader share the offset."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115
        self.file.seek(8)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> int:
        self.file.seek(8 * row)
        return int(self.file.read(8))


def held_file(path: str, workers: int = 2) -> torch.utils.data.DataLoader[int]:
    current_assignment()
    return torch.utils.data.DataLoader(
        HeldFile(path), batch_size=4, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
