"""mosaicml-streaming as a reader of streaming datasets.

    python -m benchmarks.peers.mosaic_streaming

As its documentation advises: `batch_size` given to the dataset too, num_canonical_nodes left to it when it shuffles
(one per node) and 1 for sequential reading, shuffle algorithm and block size its defaults. `predownload` is the whole
epoch: with the default of 8 batches its two threads wait and wake all the time and share the interpreter with the
reader (1 KiB, shuffled, three trials in turn on a busy machine: 4,137 to 9,515/s by default, 6,942 to 21,066/s so).
Its S3 client downloads shards from a server that takes the same requests as any HTTP server, because it has no client
for plain HTTP.
"""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from benchmarks.peers.importing import import_streaming
from benchmarks.streaming_data import BATCH, KINDS, collate
from benchmarks.streaming_player import Reader, memory_mib, play

SEED = 9176

streaming = import_streaming()


class Mosaic(Reader):
    packages = ("mosaicml-streaming", "torch", "numpy", "pillow")

    def samples(self, kind: str, folder: str, *, shuffle: bool) -> Iterator[dict[str, Any]]:
        return iter(_dataset(local=folder, shuffle=shuffle, predownload=KINDS[kind].samples))

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        more: dict[str, Any] = {"predownload": KINDS[kind].samples}
        if remote:
            url = urlsplit(remote)
            if url.scheme == "http":
                os.environ["S3_ENDPOINT_URL"] = f"http://{url.netloc}"
                remote = f"s3:/{url.path}"
            more["remote"] = remote
        loader: Iterable[Any] = _loader(_dataset(local=folder, shuffle=shuffle, **more), kind, workers)
        return loader

    def first_batch(self, folder: str, position: int) -> Any:
        dataset = _dataset(local=folder, shuffle=True)
        loader = _loader(dataset, "", 0)
        if position:
            state = {"epoch": 0, "sample_in_epoch": position, "num_canonical_nodes": 1, "shuffle_seed": SEED}
            loader.load_state_dict({**state, "initial_physical_nodes": 1})
        return next(iter(loader))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "shuffle":
            order = _order(request["shards"], request["per_shard"], request["algorithm"], request["block"])
            np.save(request["out"], order)
            return {}
        if request["do"] == "order":
            before, started = memory_mib("VmRSS"), time.perf_counter()
            order = _order(request["shards"], request["per_shard"], "py1e", 1 << 18)
            return {"seconds": time.perf_counter() - started, "mib": memory_mib("VmHWM") - before}
        return super().answer(request)


def _order(shards: int, per_shard: int, algorithm: str, block: int) -> Any:
    """Return the order of the samples of an epoch in one process, computed as the library's dataset does. `algorithm`,
    `block`: its shuffle algorithm and block size."""
    partition = importlib.import_module("streaming.base.partition").get_partitions
    shuffle = importlib.import_module("streaming.base.shuffle").get_shuffle
    canonical = 64 if algorithm == "py1s" else 1  # its defaults
    ids = partition("relaxed", shards * per_shard, canonical, 1, 1, 1, BATCH)
    shuffled = shuffle(algorithm, np.full(shards, per_shard, np.int64), canonical, SEED, 0, block)
    order = np.where(ids != -1, shuffled[ids], -1).flatten()
    return order[order != -1][: shards * per_shard]


def _dataset(*, shuffle: bool, **settings: Any) -> Any:
    if not shuffle:
        settings["num_canonical_nodes"] = 1
    return streaming.StreamingDataset(batch_size=BATCH, shuffle=shuffle, shuffle_seed=SEED, **settings)


def _loader(dataset: Any, kind: str, workers: int) -> Any:
    images = kind in KINDS and KINDS[kind].column == "image"
    return streaming.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, **({"collate_fn": collate} if images else {})
    )


if __name__ == "__main__":
    # Its arrays are over read-only memory, of which torch warns; no code here writes to them.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none", AWS_DEFAULT_REGION="us-east-1")
    play(Mosaic())
