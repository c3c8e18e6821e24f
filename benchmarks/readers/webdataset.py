"""WebDataset's tar files, by webdataset, and Penstock over the same files.

As its README says: `WebDataset(shardshuffle=100).shuffle(1000).decode().to_tuple().batched()`, and a WebLoader that
makes no batches of its own; without shuffling `shardshuffle=False`. Tars are written by its ShardWriter, in 64 MiB.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.readers import batch_reader
from benchmarks.readers.batch_reader import SEED, BatchReader, all_samples, value_column
from benchmarks.streaming_data import BATCH

from penstock.data import StreamingDataset, StreamingLoader, index_folder

__all__ = ["Ours", "Theirs"]

# By name, because the type checker's environment lacks it.
webdataset: Any = importlib.import_module("webdataset")

SHARD_BYTES = 64 << 20
SHARDS_SHUFFLED, BUFFER = 100, 1000


def _extension(kind: str) -> str:
    return "npy" if value_column(kind) == "tokens" else "bin"


class Theirs(BatchReader):
    packages = ("webdataset", "torch", "numpy")

    def write(self, kind: str, folder: str, samples: int) -> None:
        Path(folder).mkdir()
        with webdataset.ShardWriter(f"{folder}/%06d.tar", maxsize=SHARD_BYTES, verbose=0) as shards:
            for sample in all_samples(kind, samples):
                number, value = sample["number"], sample[value_column(kind)]
                shards.write({"__key__": f"{number:08}", "cls": number, _extension(kind): value})

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterator[Any]:
        shards = sorted(map(str, Path(folder).glob("*.tar")))
        rows = webdataset.WebDataset(shards, shardshuffle=SHARDS_SHUFFLED if shuffle else False)
        rows = rows.shuffle(BUFFER) if shuffle else rows
        rows = rows.decode().to_tuple("cls", _extension(kind)).batched(BATCH)
        for numbers, values in webdataset.WebLoader(rows, batch_size=None):
            yield {"number": numbers, value_column(kind): values}


class Ours(batch_reader.Ours):
    def write(self, kind: str, folder: str, samples: int) -> None:
        index_folder(folder)

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        dataset = StreamingDataset(local=folder, columns=["cls", _extension(kind)])
        for batch in StreamingLoader(dataset, batch_size=BATCH, shuffle=shuffle, seed=SEED):
            yield {"number": batch["cls"], value_column(kind): batch[_extension(kind)]}
