"""Ranks that train from a loader, save with it and go on, for tests: run by tests/support/ranked.py."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from appliances import made
from mapped import mapped
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.checkpoint import AsyncCheckpointer

__all__ = ["first", "rest"]

OPTIONS: dict[str, Any] = {"global_batch_size": 12, "tail": "carry"}


def appliance(address: str, token: str, job: str) -> Appliance:
    joined = made(address, num_workers_per_box=2, job=job, token=token, seed=7, timeout_s=60)
    joined.embedded = True  # so runners are told where our modules are
    return joined


def rows(batch: Any) -> list[list[Any]]:
    return [list(row) for row in zip(batch["number"].tolist(), batch["key"], strict=True)]


def first(address: str, token: str, job: str, how: str, folder: str, steps: int) -> list[Any]:
    """Train so many steps, save, and go on for three more, which a later life is to repeat."""
    loader = DataLoader(mapped, **OPTIONS)
    state = {"weights": torch.full((5,), 2.0), "loader": loader}
    with appliance(address, token, job) as box:
        seen = [rows(batch) for batch in DataExecutor(loader, num_steps=steps, appliance=box)]
        if how == "dcp":
            async_save(state, checkpoint_id=folder).result()  # type: ignore[union-attr]
        else:
            with AsyncCheckpointer(folder) as checkpointer:
                checkpointer.save(steps, state)
        seen += [rows(batch) for batch in DataExecutor(loader, num_steps=3, appliance=box)]
    return seen


def rest(address: str, token: str, job: str, how: str, folder: str, steps: int) -> list[Any]:
    """Restore on as many ranks as there are now, and train so many steps."""
    loader = DataLoader(mapped, **OPTIONS)
    state: dict[str, Any] = {"weights": torch.zeros(5), "loader": loader}
    with appliance(address, token, job) as box:
        if how == "dcp":
            load(state, checkpoint_id=folder)
        else:
            with AsyncCheckpointer(folder) as checkpointer:
                assert checkpointer.restore(state) is not None
        assert state["weights"].tolist() == [2.0] * 5
        executor = DataExecutor(loader, num_steps=steps, appliance=box)
        found = [rows(batch) for batch in islice(executor, steps)]
        dist.barrier()
    return found
