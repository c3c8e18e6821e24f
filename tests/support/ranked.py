"""Ranks of a training job: processes of one gloo group that run a function of tests/inputs, each with its rank."""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from warm import Outcome, fork

__all__ = ["Outcome", "run"]


def run(size: int, function: str, *arguments: Any, timeout_s: float = 90) -> list[Outcome]:
    """Run a function on so many ranks.

    function: "module:name", called with `arguments`, which are JSON, when torch.distributed is initialised.
    """
    with tempfile.TemporaryDirectory() as folder:
        # torch._dynamo: the first optimizer of a process imports it, which takes a second.
        imports = ["torch.distributed", "torch._dynamo", "penstock.client.checkpoint", function.partition(":")[0]]
        forked = [
            fork("ranked:work", function, arguments, rank, size, f"{folder}/store", imports=imports)
            for rank in range(size)
        ]
        return [one.outcome(time.monotonic() + timeout_s) for one in forked]


def work(function: str, arguments: Sequence[Any], rank: int, size: int, path: str) -> Any:
    """Run a function as one rank. path: path of a file through which the ranks find each other."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    store = FileStore(path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)
