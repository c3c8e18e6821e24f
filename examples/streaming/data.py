"""Data: pictures of ten kinds with much noise, in compressed shards; and the input that streams them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.data import MDSWriter, StreamingDataset, StreamingLoader

__all__ = ["SIDE", "input_fn", "write"]

SIDE = 12
"""Height and width of a picture, in pixels."""


def input_fn(url: str, cache: str, global_batch_size: int) -> StreamingLoader:
    """Return the loader; Penstock calls this in each worker. All processes of a host share the cache folder `cache`."""
    dataset = StreamingDataset(url, cache, validate_hash="sha1", cache_limit=1 << 30)
    return StreamingLoader(dataset, global_batch_size=global_batch_size, shuffle=True, shuffle_block=1000)


def write(folder: Path, samples: int) -> None:
    """Write a dataset of `samples` pictures to a folder, in a format that mosaicml-streaming can read as well."""
    random = np.random.default_rng(0)
    kinds = random.random((10, SIDE, SIDE), np.float32)
    columns = {"number": "int", "kind": "int", "picture": f"ndarray:float32:{SIDE},{SIDE}"}
    with MDSWriter(folder, columns, compression="zstd", hashes=["sha1"], size_limit=64 << 10) as shards:
        for number in range(samples):
            kind = int(random.integers(10))
            noise = random.normal(scale=0.7, size=(SIDE, SIDE)).astype(np.float32)
            shards.write({"number": number, "kind": kind, "picture": kinds[kind] + noise})
