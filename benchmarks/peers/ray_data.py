"""Ray Data: a local cluster, one read task that yields ready blocks, `iter_batches` in the driver. A player.

    python -m benchmarks.peers.ray_data

Ray moves blocks, through its object store, and the reader cuts batches from them. A row has the size of one batch of
the case, and a block has 128 MiB, Ray's own target. With blocks of 8 and 32 MiB batches of 8 MiB came at a quarter of
the rate, smaller ones at about the same; with one batch a block, batches of 1 MiB came at less than 200 a second.
Batches are NumPy views of the object store, without a copy. Each block is copied into the store when the task yields
it, as new data would be.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from benchmarks.cases import LEAF_SHAPE, Case
from benchmarks.processes import Role
from benchmarks.serve import Way, serve

os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
# By name, because the type checker's environment lacks Ray.
ray: Any = importlib.import_module("ray")
data: Any = importlib.import_module("ray.data")
datasource: Any = importlib.import_module("ray.data.datasource")
block: Any = importlib.import_module("ray.data.block")

BLOCK_BYTES = 128 << 20
STORE_BYTES = 2 << 30
"""Size of Ray's object store in bytes: 16 blocks. With a larger store, the blocks that were read ahead would last for
the whole measurement."""
PREFETCH = 4
"""Number of batches that Ray fetches ahead. Neither its default of 1 nor 16 was faster."""


def _ready_block(case: Case) -> Any:
    rows = BLOCK_BYTES // case.nbytes
    random = np.random.default_rng(0)
    if case.leaves == 1:
        columns: dict[str, Any] = {"data": random.integers(0, 255, (rows, case.nbytes), dtype=np.uint8)}
    else:
        columns = {f"leaf{n}": random.integers(0, 1 << 40, (rows, *LEAF_SHAPE)) for n in range(case.leaves)}
    return block.BlockAccessor.batch_to_block(columns)


class Ready(datasource.Datasource):  # type: ignore[misc]  # its base is untyped here
    """Ray data source with one read task, which yields ready blocks and never ends."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[Any]:
        case = self.case

        def read() -> Iterator[Any]:
            return itertools.repeat(_ready_block(case))

        metadata = block.BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [datasource.ReadTask(read, metadata)]


class RayData(Way):
    roles = (
        Role("gcs_server", "gcs"),
        Role("ray/raylet/raylet", "raylet"),
        Role("ray::", "worker"),
        Role("default_worker.py", "worker"),
        Role("/ray/", "agents"),
    )
    packages = ("ray", "pyarrow", "numpy")
    settle_s = 1.5
    """Seconds for which batches are taken before the measurement's own warm-up. The first blocks are slower, because
    the pages of the object store are used for the first time."""

    def __init__(self) -> None:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
        )
        data.DataContext.get_current().enable_progress_bars = False

    @contextmanager
    def open(self, case: Case) -> Iterator[Iterator[Any]]:
        served = data.read_datasource(Ready(case), override_num_blocks=1)
        batches = iter(served.iter_batches(batch_size=1, batch_format="numpy", prefetch_batches=PREFETCH))
        try:
            yield batches
        finally:
            batches.close()  # otherwise the read task would keep running


if __name__ == "__main__":
    serve(RayData)
