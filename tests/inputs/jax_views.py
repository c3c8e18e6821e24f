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
    import jax.numpy as jnp
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
            array = jax.device_put(batch["x"])
            shared += array.unsafe_buffer_pointer() == batch["x"].ctypes.data
            kept.append((array, jax.device_put(batch["half"])))
        del batch
        said["shared"] = shared
        said["copies"] = executor.stats.copies
        said["kept"] = [[float(x.min()), float(x.max()), float(half.max())] for x, half in kept]
        said["half"] = str(kept[0][1].dtype)
        kept.clear()
        del array
        gc.collect()

        # Computations that run on after the loop has dropped their batch.
        copies = executor.stats.copies
        executor = DataExecutor(loader, num_steps=BATCHES)
        sums = [square(batch["x"]) for batch in numpy_batches(executor)]
        said["sums"] = [float(total) for total in sums]
        said["copies_after"] = executor.stats.copies - copies

        executor = DataExecutor(loader, num_steps=2)
        for batch in numpy_batches(executor):
            given = jax.device_put(batch["x"])
            jax.block_until_ready(give_away(given))
            said.setdefault("donated", []).append(float(jnp.max(batch["x"])))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
