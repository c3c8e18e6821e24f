"""Penstock's streaming datasets as one of the compared readers; and floors, simple programs that no reader in Python
can outperform.

    python -m benchmarks.streaming_ours ours|pread|memcpy

`pread` reads the bytes of each sample from the page cache in Penstock's order, and decodes only images, with
Pillow; `memcpy` copies as many bytes from memory to memory.
"""

from __future__ import annotations

import http.client
import json
import os
import struct
import sys
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch.utils.data
from benchmarks.streaming_data import BATCH, KINDS, TINY, collate
from benchmarks.streaming_player import Reader, memory_mib, play
from PIL import Image

from penstock.data import MDSWriter, StreamingDataset, StreamingLoader
from penstock.data.ordering.sharded_order import ShardedOrder
from penstock.worker.batch.building import collate as stack

SEED = 1


class Ours(Reader):
    packages = ("torch", "numpy", "pillow")

    def write(self, kind: str, folder: str, samples: int) -> None:
        what = TINY if kind == TINY.name else KINDS[kind]
        with MDSWriter(folder, what.columns, size_limit=what.shard_bytes) as shards:
            for number in range(samples):
                shards.write(what.sample(number))

    def samples(self, kind: str, folder: str, *, shuffle: bool) -> Iterator[dict[str, Any]]:
        dataset = StreamingDataset(local=folder)
        for batch in StreamingLoader(dataset, batch_size=BATCH, shuffle=shuffle, seed=SEED, collate_fn=_as_they_are):
            yield from batch

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        dataset = StreamingDataset(remote or None, folder)
        chosen = collate if kind in KINDS and KINDS[kind].column == "image" else stack
        loader = StreamingLoader(dataset, batch_size=BATCH, shuffle=shuffle, seed=SEED, collate_fn=chosen)
        if workers:
            return torch.utils.data.DataLoader(loader, batch_size=None, num_workers=workers)
        return loader

    def first_batch(self, folder: str, position: int) -> Any:
        loader = StreamingLoader(StreamingDataset(local=folder), batch_size=BATCH, shuffle=True, seed=SEED)
        if position:
            state = loader.state_after(position // BATCH)
            loader.load_state_dict(state)
        return next(iter(loader))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "shuffle":
            order = _order(request["shards"], request["per_shard"], request["block"])
            np.save(request["out"], order.ids(0, np.arange(len(order))))
            return {}
        if request["do"] == "order":
            return _order_cost(request["shards"], request["per_shard"], request["position"])
        if request["do"] == "synthetic":
            _write_synthetic(Path(request["folder"]), request["shards"], request["per_shard"])
            return {}
        if request["do"] == "download":
            return _download(request["remote"])
        return super().answer(request)


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def _order(shards: int, per_shard: int, block: int | None) -> ShardedOrder:
    return ShardedOrder([np.full(shards, per_shard)], [shards * per_shard], seed=SEED, shuffle=True, block=block)


def _order_cost(shards: int, per_shard: int, position: int) -> dict[str, Any]:
    """Measure how an epoch's order is created and a batch is found in it. Return the seconds, and the growth of
    Python's and numpy's memory, by name. `position`: number of the sample at which the batch begins."""
    before, started = memory_mib("VmRSS"), time.perf_counter()
    order = _order(shards, per_shard, 1 << 18)
    order.ids(0, np.arange(position, position + BATCH))
    answer = {"seconds": time.perf_counter() - started, "mib": memory_mib("VmHWM") - before}
    sizes = np.full(shards, per_shard)
    tracemalloc.start()
    kept = ShardedOrder([sizes], [shards * per_shard], seed=SEED, shuffle=True, block=1 << 18)
    kept.ids(0, np.arange(position, position + BATCH))
    answer["kept_mib"], answer["peak_mib"] = (number / (1 << 20) for number in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    return answer


def _write_synthetic(folder: Path, shards: int, per_shard: int) -> None:
    """Write a dataset of `shards` equal shards with `per_shard` samples each. All shards are hard links to one file."""
    one = folder / "one"
    with MDSWriter(one, TINY.columns, size_limit=None) as writer:
        for number in range(per_shard):
            writer.write(TINY.sample(number))
    index = json.loads((one / "index.json").read_bytes())
    entry, whole = index["shards"][0], folder / "whole"
    whole.mkdir()
    entries = []
    for number in range(shards):
        name = f"shard.{number:06}.mds"
        os.link(one / entry["raw_data"]["basename"], whole / name)
        entries.append({**entry, "raw_data": {**entry["raw_data"], "basename": name}})
    (whole / "index.json").write_text(json.dumps({**index, "shards": entries}))


def _download(remote: str) -> dict[str, Any]:
    """Download all shards of a dataset over one connection, one after the other, to measure the server's bandwidth.
    Return the figures by name."""
    url = urlsplit(remote)
    started, size, samples = time.perf_counter(), 0, 0
    connection = http.client.HTTPConnection(url.netloc)
    connection.request("GET", f"{url.path}/index.json")
    for shard in json.loads(connection.getresponse().read())["shards"]:
        connection.request("GET", f"{url.path}/{shard['raw_data']['basename']}")
        size += len(connection.getresponse().read())
        samples += shard["samples"]
    connection.close()
    return {"samples": samples, "seconds": time.perf_counter() - started, "first_s": 0.0, "nbytes": size}


class Floor(Reader):
    def __init__(self, name: str) -> None:
        self._name, self.decodes = name, name == "pread"

    def samples(self, kind: str, folder: str, *, shuffle: bool) -> Iterator[Any]:
        places = _places(Path(folder), shuffle=shuffle)
        if self._name == "memcpy":
            return _copies([size for _, size, _ in places])
        read = _preads(places)
        return map(_image, read) if KINDS[kind].column == "image" else read

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        raise NotImplementedError


def _places(folder: Path, *, shuffle: bool) -> list[tuple[Path, int, int]]:
    """Return the file, the number of bytes and the offset of each sample, in the order of a Penstock epoch."""
    places, counts = [], []
    for shard in json.loads((folder / "index.json").read_bytes())["shards"]:
        path, count = folder / shard["raw_data"]["basename"], shard["samples"]
        with path.open("rb") as file:
            offsets = struct.unpack(f"<{count + 1}I", file.read(4 + 4 * (count + 1))[4:])
        places += [(path, offsets[n + 1] - offsets[n], offsets[n]) for n in range(count)]
        counts.append(count)
    order = ShardedOrder([np.array(counts)], [sum(counts)], seed=SEED, shuffle=shuffle, block=1 << 18)
    return [places[number] for number in order.ids(0, np.arange(len(places))).tolist()]


def _preads(places: list[tuple[Path, int, int]]) -> Iterator[bytes]:
    handles = {path: os.open(path, os.O_RDONLY) for path in {path for path, _, _ in places}}
    try:
        ready = [(handles[path], size, begin) for path, size, begin in places]
        for handle, size, begin in ready:
            yield os.pread(handle, size, begin)
    finally:
        for handle in handles.values():
            os.close(handle)


def _image(sample: bytes) -> dict[str, Any]:
    return {"image": Image.open(BytesIO(sample[sample.index(b"\xff\xd8") :]))}


def _copies(sizes: list[int]) -> Iterator[int]:
    """Copy as many bytes as each of `sizes` says, from places that are far apart in memory, and yield the size after
    each copy. So the bytes are read from memory and not from a processor cache, as the pages of a file are."""
    source, target = memoryview(bytes(256 << 20)), memoryview(bytearray(1 << 20))
    begin = 0
    for size in sizes:
        target[:size] = source[begin : begin + size]
        begin += size
        if begin + (1 << 20) > len(source):
            begin = 0
        yield size


if __name__ == "__main__":
    play(Ours() if sys.argv[1] == "ours" else Floor(sys.argv[1]))
