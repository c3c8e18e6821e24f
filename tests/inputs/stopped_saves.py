"""Saves of several ranks of which one's writer is killed, for tests: run by tests/support/ranked.py, each with its
rank."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import traced_writer
from saved_states import mark_of, state_of
from traced_writer import forget, operations, points, stop_at

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.saving import writer_process
from penstock.proto.errors import CheckpointError

__all__ = ["killed"]


def killed(folder: str, room: str, victim: int, every: int) -> list[dict[str, Any]]:
    """Save step 1, and then step 2 again and again, with the victim's writer killed at one operation after the other:
    each `every`th. What this rank saw each time."""
    rank, where, records = dist.get_rank(), Path(folder), Path(room)
    writer_process.WRITER = traced_writer.THIS
    os.environ[traced_writer.ROOM] = room
    good = where.with_name("good")
    found = []
    with AsyncCheckpointer(where, timeout_s=30) as checkpointer:

        def named(state: dict[str, Any]) -> dict[str, Any]:
            """Each rank has one of its own."""
            return {f"{name} of {rank}": value for name, value in state.items()}

        def save(step: int) -> str:
            """Save a step, and return the error message of `wait`."""
            checkpointer.save(step, named(state_of(10 * step + rank)))
            try:
                checkpointer.wait()
            except CheckpointError as error:
                return error.message
            return ""

        def start_over() -> None:
            dist.barrier()  # the others have looked
            if not rank:
                shutil.rmtree(where)
                shutil.copytree(good, where)
                forget(records)
            dist.barrier()

        assert not save(1)
        dist.barrier()
        if not rank:
            where.rename(good)
            where.mkdir()
        start_over()
        assert not save(2)
        dist.barrier()
        for place in list(points(operations(records, victim)))[::every]:
            start_over()
            if rank == victim:
                stop_at(records, *place, rank)
            dist.barrier()
            said = save(2)
            dist.barrier()  # nobody's writer is at it any more
            latest = checkpointer.latest()
            state = named(state_of(0))
            restored = checkpointer.restore(state, verify=True)
            mark = mark_of({name: state[f"{name} of {rank}"] for name in state_of(0)})
            done = operations(records, victim)
            after = save(3)
            dist.barrier()
            found.append(
                {
                    "place": place,
                    "renamed": [Path(one.to).name for one in done if one.kind == "rename"],
                    "said": said,
                    "latest": latest,
                    "restored": [restored, mark],
                    "after": [after, checkpointer.latest()],
                    "names": sorted(path.name for path in where.iterdir()),
                    "files": sorted(path.name for path in (where / "step-2").glob("*")),
                }
            )
    return found
