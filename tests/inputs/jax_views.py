"""A loop over batches in JAX. It prints as JSON what became of the arrays that it kept.

It is a script, run in a process of its own: JAX starts threads, and a process of pytest forks.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import torch

BATCHES, ROWS = 40, 4096


def input_fn() -> Iterator[dict[str, Any]]:
    """Batch i is full of i."""
    for number in range(BATCHES):
        yield {
            "x": torch.full((ROWS,), float(number)),
            "half": torch.full((ROWS,), float(number), dtype=torch.bfloat16),
            "number": number,
        }


def main() -> None:
    import jax
    from jax_views import input_fn as imported  # by its name in workers, not as a part of the main script

    from penstock.client import Appliance, DataExecutor, DataLoader
    from penstock.client.integrations.jax import numpy_batches

    said: dict[str, Any] = {}
    square = jax.jit(lambda x: (x * x).sum())
    give_away = jax.jit(lambda x: x + 1, donate_argnums=0)
    with Appliance(num_workers_per_box=1):
        loader = DataLoader(imported)
        executor = DataExecutor(loader, num_steps=BATCHES)
        kept, shared = [], 0
        for batch in numpy_batches(executor):
            rows = batch["half" if batch["number"] % 2 else "x"]  # one of them alone holds the entry
            kept.append(jax.device_put(rows))
            shared += kept[-1].unsafe_buffer_pointer() == rows.ctypes.data
        del batch, rows
        said["shared"] = shared
        said["copies"] = executor.stats.copies
        said["kept"] = [[float(array.min()), float(array.max())] for array in kept]
        said["dtypes"] = sorted({str(array.dtype) for array in kept})
        kept.clear()
        gc.collect()

        # Computations that may run on after the loop has dropped their batch.
        executor = DataExecutor(loader, num_steps=BATCHES)
        sums = [square(batch["x"]) for batch in numpy_batches(executor)]
        said["sums"] = [float(total) for total in sums]

        # JAX drops its references to what it got within a later call.
        copies = executor.stats.copies
        executor = DataExecutor(loader, num_steps=BATCHES)
        said["donated"] = []
        for batch in numpy_batches(executor):
            jax.block_until_ready(give_away(jax.device_put(batch["x"])))
            said["donated"].append(float(batch["x"].max()))
        said["copies_after"] = executor.stats.copies - copies
    print(json.dumps(said))


if __name__ == "__main__":
    main()
