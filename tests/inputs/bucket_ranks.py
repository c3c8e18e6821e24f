"""A rank of a training job whose checkpoints lie in a bucket, for tests: tests/support/bucket_jobs.py tells it over a
socket what to do."""

from __future__ import annotations

import json
import os
import socket
import traceback
from datetime import timedelta
from typing import Any

import small_parts_writer
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.saving import writer_process
from penstock.proto.errors import PenstockError

__all__ = ["serve", "state_of"]

VALUES = 11_000
"""Values of a large tensor, which is uploaded in several parts."""


class Position:
    """Position of a loader."""

    def __init__(self, mark: int) -> None:
        self.mark = mark

    def state_dict(self) -> dict[str, Any]:
        return {"mark": self.mark}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mark = state["mark"]


def state_of(mark: int, rank: int) -> dict[str, Any]:
    """A state of which every bit tells the save. mark: the save's number."""
    draw = torch.Generator().manual_seed(1000 * mark + rank)
    same = torch.Generator().manual_seed(1000 * mark + 999)
    return {
        "same": {"on all ranks": torch.randn(VALUES, generator=same), "mark": mark},
        f"rank {rank}": {
            "large": torch.randn(VALUES, generator=draw),
            "wide": torch.randint(-(1 << 60), 1 << 60, (VALUES // 3,), generator=draw),
            "small": torch.full((3,), mark, dtype=torch.int32),
        },
        f"position {rank}": Position(mark),
    }


def _differences(state: dict[str, Any], rank: int) -> list[str]:
    """Names of what is not of the save that the state says."""
    found = []
    for group, values in state_of(state["same"]["mark"], rank).items():
        if isinstance(values, Position):
            found += [group] * (values.mark != state[group].mark)
            continue
        for name, value in values.items():
            other = state[group][name]
            if isinstance(value, torch.Tensor):
                alike = value.dtype == other.dtype and torch.equal(value, other)
            else:
                alike = bool(value == other)
            found += [f"{group}/{name}"] * (not alike)
    return found


class _Rank:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._checkpointer: AsyncCheckpointer | None = None

    def open(self, folder: str, local: str | None = None, **options: Any) -> None:
        """local: folder with a disk for each rank."""
        if local is not None:
            options["local"] = f"{local}/{self._rank}"
        self._checkpointer = AsyncCheckpointer(folder, **options)

    def save(self, step: int, mark: int, wait: bool = True) -> None:
        assert self._checkpointer is not None
        self._checkpointer.save(step, state_of(mark, self._rank))
        if wait:
            self._checkpointer.wait()

    def wait(self) -> None:
        assert self._checkpointer is not None
        self._checkpointer.wait()

    def restore(self, step: int | None = None, verify: bool = False) -> dict[str, Any]:
        """Restore, and compare what came with what was saved."""
        assert self._checkpointer is not None
        state = state_of(0, self._rank)
        found = self._checkpointer.restore(state, step, verify=verify)
        if found is None:
            return {"step": None, "mark": None, "differ": []}
        return {"step": found, "mark": state["same"]["mark"], "differ": _differences(state, self._rank)}

    def latest(self) -> int | None:
        assert self._checkpointer is not None
        return self._checkpointer.latest()

    def close(self) -> None:
        assert self._checkpointer is not None
        self._checkpointer.close()


def serve(path: str, rank: int, size: int, store: str) -> None:
    """Do what is asked for until the other end closes. path: of the socket. store: of the file through which the ranks
    find each other."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    writer_process.WRITER = small_parts_writer.THIS
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=FileStore(store, size), rank=rank, world_size=size, timeout=timeout)
    one = _Rank(rank)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(f"{rank}\n".encode())
        for line in connection.makefile():
            call, arguments = json.loads(line)
            answer: dict[str, Any] = {"value": None, "raised": "", "said": ""}
            try:
                answer["value"] = getattr(one, call)(**arguments)
            except Exception as error:
                answer.update(raised=type(error).__name__, said=str(error))
                if not isinstance(error, PenstockError):
                    traceback.print_exc()
            connection.sendall(json.dumps(answer).encode() + b"\n")
