"""torch's DataLoader, torchdata's StatefulDataLoader, and the source (dataset of batches) alone. The module is the
program of a player, the process that measures one of these modes (see benchmarks/serve.py).

    python -m benchmarks.peers.torch_loader DataLoader|StatefulDataLoader WORKERS

Without batching of their own (`batch_size=None`), because the source yields batches; all else is the default: two
batches prefetched by each worker process, and StatefulDataLoader's snapshot at every step. Memory is pinned if there
is a CUDA device. 0 workers: the source is iterated in this process, as a base for comparisons.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.data
from benchmarks.cases import Case
from benchmarks.loaders import make
from benchmarks.processes import Role
from benchmarks.serve import Way, serve


class TorchLoader(Way):
    # A forked worker has the same command line as this process; torch's own helper has a different one.
    roles = (Role("benchmarks.peers.torch_loader", "worker"), Role("resource_tracker", "resource tracker"))

    def __init__(self, name: str, workers: int) -> None:
        self.workers = workers
        stateful = name == "StatefulDataLoader"
        self.packages = ("torch", "numpy", *(["torchdata"] if stateful else []))
        module = "torchdata.stateful_dataloader" if stateful else "torch.utils.data"
        # By name, because some environments of this module lack torchdata.
        self.loader: Any = getattr(importlib.import_module(module), name)
        torch.set_num_threads(1)

    @contextmanager
    def open(self, case: Case) -> Iterator[Iterator[Any]]:
        pin = torch.cuda.is_available()
        yield iter(self.loader(make(case), batch_size=None, num_workers=self.workers, pin_memory=pin))
        # The iterator's end stops its workers.


if __name__ == "__main__":
    serve(lambda: TorchLoader(sys.argv[1], int(sys.argv[2])))
