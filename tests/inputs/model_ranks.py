"""Ranks that share a model, which take the batches of one reader: tests/integrations/test_megatron_data.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from penstock.client import DataLoader
from penstock.client.integrations.megatron_data import DataIterator, RankGroups
from penstock.client.integrations.rank_groups import Stages
from penstock.client.testing import FakeAppliance, Fault, InputError
from penstock.data import MapLoader
from penstock.proto.errors import PenstockError

ROWS = 48


def rows(global_batch_size: int) -> MapLoader:
    return MapLoader(Rows(), global_batch_size=global_batch_size, tail="emit")


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"row": number, "name": f"row {number}"}


def groups(tp: int, pp: int) -> RankGroups:
    """Ranks in Megatron's order: tensor, data, pipeline."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dp = size // (tp * pp)
    stage, box = rank // (tp * dp), rank // tp % dp
    first = stage * tp * dp + box * tp
    return RankGroups(
        rank=rank,
        box=box,
        stage=stage,
        num_stages=pp,
        peers=tuple(range(first, first + tp)),
        leaders=tuple(range(box * tp, size, tp * dp)) if rank == first else (),
        readers=tuple(range(0, tp * dp, tp)),
        num_boxes=dp,
    )


def appliance(ranks: RankGroups, faults: Sequence[Fault] = ()) -> Any:
    if not ranks.reads:
        return nullcontext()
    return FakeAppliance(num_workers_per_box=2, seed=7, box=ranks.box, num_boxes=ranks.num_boxes, faults=faults)


def taken(batches: Any, count: int | None = None) -> list[list[int]]:
    found: list[list[int]] = []
    while count is None or len(found) < count:
        try:
            batch = next(batches)
        except StopIteration:
            break
        assert batch["name"] == [f"row {number}" for number in batch["row"].tolist()]
        found.append(batch["row"].tolist())
    return found


def one_box(tp: int, pp: int, steps: int) -> list[list[int]]:
    """The first stage takes all before another one takes any, as far as a pipeline lets it."""
    ranks = groups(tp, pp)
    with appliance(ranks), DataIterator(DataLoader(rows, 4), num_steps=steps, ranks=ranks, timeout_s=30) as data:
        found = taken(data) if ranks.stage == 0 else []
        dist.barrier()
        return taken(data) if ranks.stage == ranks.num_stages - 1 > 0 else found


def resumed(before: tuple[int, int], after: tuple[int, int], steps: int) -> list[Any]:
    """Rows that a rank took before a save and after it, with the consumed samples, on other ranks."""
    found: list[Any] = []
    state: dict[str, Any] | None = None
    for tp, pp in (before, after):
        ranks = groups(tp, pp)
        with appliance(ranks), DataIterator(DataLoader(rows, 8), ranks=ranks, timeout_s=30) as data:
            if state is not None:
                data.load_state_dict(state)
            found.append(taken(data, steps))
            state = data.state_dict()
            found.append(data.consumed_samples)
    return found


def chunks(stages: Stages) -> list[Any]:
    """What the model chunks of a virtual pipeline take: the rows, or an error."""
    ranks = groups(1, dist.get_world_size())
    loader = DataLoader(rows, 4)
    with appliance(ranks), DataIterator(loader, num_steps=3, stages=stages, ranks=ranks, timeout_s=30) as data:
        found: list[Any] = []
        for one in data.chunks(2):
            try:
                batches = [next(one) for _ in range(3)]
            except PenstockError as error:
                found.append(str(error))
            else:
                found.append([batch["row"].tolist() for batch in batches])
                for batch in batches:
                    batch.clear()  # as get_batch_on_this_cp_rank changes it
        dist.barrier()
        return found


def failing(tp: int, pp: int) -> list[str]:
    """Errors of each rank, at the same step, and again."""
    ranks = groups(tp, pp)
    faults = [InputError(step=3)]
    loader = DataLoader(rows, 4)
    with appliance(ranks, faults), DataIterator(loader, num_steps=6, ranks=ranks, timeout_s=30) as data:
        found = [str(len(taken(data, 2)))]
        for _ in range(2):
            try:
                next(data)
            except PenstockError as error:
                found.append(f"{type(error).__name__}: {error}")
        return found


def reader_dies() -> str:
    ranks = groups(2, 1)
    with appliance(ranks), DataIterator(DataLoader(rows, 4), ranks=ranks, timeout_s=30) as data:
        next(data)
        if ranks.reads:
            os._exit(0)
        next(data)
    return "not noticed"


def checkpointed(folder: str) -> list[Any]:
    """Rows after a checkpoint of AsyncCheckpointer, in which the state is one value."""
    from penstock.client.checkpoint import AsyncCheckpointer
    from penstock.client.integrations.jax import state_from_json, state_to_json

    found: list[Any] = []
    for tp, steps in ((1, 3), (2, 2)):
        ranks = groups(tp, 1)
        loader = DataLoader(rows, 8)
        with (
            AsyncCheckpointer(folder) as checkpointer,
            appliance(ranks),
            DataIterator(loader, ranks=ranks, timeout_s=30) as data,
        ):
            state: dict[str, Any] = {"data": {"penstock_state": ""}}
            step = checkpointer.restore(state)
            if step is not None:
                data.load_state_dict(state_from_json(state["data"]))
            found += [step, taken(data, steps), data.consumed_samples]
            checkpointer.save(len(found), {"data": state_to_json(data.state_dict())})
    return found
