"""A scheduler of asynchronous saves in phases, as Megatron-core and NVRx have them: plan, stage, write, finalize."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from penstock.client.integrations.megatron import FileSystemWriterAsync


def gathered(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def plan(state: dict[str, Any], writer: FileSystemWriterAsync, *, decentralized: bool = False) -> Metadata:
    """All of a save that comes before it is written."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=rank == 0)
    writer.set_up_storage_writer(rank == 0)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan(gathered(local))
    if decentralized:
        assert writer.can_run_decentralized_global_plan
        mine = writer.prepare_decentralized_global_plan(plans[rank])
    else:
        mine = writer.prepare_global_plan(plans)[rank]
    writer.prepare_write_data(planner.finish_plan(mine), planner)
    return metadata


class Request:
    def __init__(self, writer: FileSystemWriterAsync, metadata: Metadata) -> None:
        self._writer, self._metadata = writer, metadata
        self.function: Callable[..., None] | None
        self.function, preload, self.arguments = writer.get_save_function_and_args()
        assert preload is None

    def write(self) -> None:
        if self.function is not None:
            self.function(*self.arguments)

    def write_elsewhere(self, *, sent: bool, kill: bool) -> None:
        """Write in another process. sent: everything that it needs is pickled and sent to it, as to a spawned
        process."""
        context = multiprocessing.get_context("fork")
        queue: Any = context.SimpleQueue()
        process = context.Process(target=_stop if kill else _receive if sent else self.write, args=(queue,) * sent)
        process.start()
        if sent:
            queue.put((self.function, self.arguments))
        process.join()

    def finalize(self) -> None:
        """Raises, on all ranks, what one of them raised in its process."""
        results = gathered(self._writer.retrieve_write_results())
        for result in results:
            if isinstance(result, tuple):
                raise result[0]
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._writer.finish(self._metadata, results)
        if dist.is_initialized():
            dist.barrier()


def _receive(queue: Any) -> None:
    function, arguments = queue.get()
    function(*arguments)


def _stop(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def values(rank: int, mark: float) -> dict[str, Any]:
    return {f"rank-{rank}": torch.full((1000,), mark + rank), "shared": torch.full((5,), mark), f"step-{rank}": mark}


def check(folder: Path, mark: float) -> None:
    for rank in range(2):
        found = values(rank, 0.0)
        load(found, storage_reader=FileSystemReader(folder), no_dist=True)
        expected = values(rank, mark)
        assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name])) for name in expected)


def ranks_save(folder: str) -> list[str]:
    rank, said = dist.get_rank(), []
    for step, kill in ((1, False), (2, True), (3, False)):
        writer = FileSystemWriterAsync(Path(folder) / str(step), thread_count=2)
        state = values(rank, step)
        request = Request(writer, plan(state, writer, decentralized=bool(step % 2)))
        for name in state:
            state[name] = None
        request.write_elsewhere(sent=step == 1, kill=kill and rank == 1)
        try:
            request.finalize()
            check(Path(folder) / str(step), step)
            said.append("saved")
        except Exception as error:
            said.append(str(error)[: len("rank 1: the process that writes")])
        dist.barrier()
    return said
