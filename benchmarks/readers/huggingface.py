"""Arrow files that `save_to_disk` wrote and Parquet, by Hugging Face datasets, and Penstock over the same files.

As its page on PyTorch says, tokens come `with_format("torch")`. Batches come from `iter(batch_size)`, which was up to
20 times as fast as a DataLoader over the same rows. Bytes have no format: the one of torch drops zeros at their end.
Its page on map-style and iterable datasets says that random access is slow, and advises
`to_iterable_dataset(num_shards).shuffle()`, with its buffer of 1,000 samples: so is "buffer". "exact" is `shuffle()` of
the rows, which mixes all with all. Parquet is streamed, and shuffled in the buffer.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.readers import batch_reader
from benchmarks.readers.batch_reader import SEED, BatchReader, all_samples, value_column
from benchmarks.streaming_data import BATCH

from penstock.data import index_folder, index_parquet

__all__ = ["OursParquet", "OursSaved", "TheirsParquet", "TheirsSaved", "TheirsSavedExact"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# By name, because the type checker's environment lacks it.
datasets: Any = importlib.import_module("datasets")
datasets.disable_progress_bars()
# It sleeps for 5 s at the end of each shuffled epoch of Parquet, which would be most of epochs as short as these.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0

SHARDS = 8
"""Number of shards of an iterable dataset of Hugging Face datasets, whose order is shuffled in addition to the
buffer."""
TOKENS = 2049


class TheirsSaved(BatchReader):
    packages = ("datasets", "pyarrow", "torch", "numpy")

    def write(self, kind: str, folder: str, samples: int) -> None:
        _made(kind, folder, samples).save_to_disk(folder)

    def samples(self, kind: str, folder: str, *, shuffle: bool) -> Iterator[dict[str, Any]]:
        for sample in super().samples(kind, folder, shuffle=shuffle):
            # an iterable dataset makes int64 of all integers, and takes no dtype
            narrow = {"tokens": sample["tokens"].to(torch.int32)} if "tokens" in sample else {}
            yield {**sample, **narrow}

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        rows = datasets.load_from_disk(folder)
        return _batches(rows.to_iterable_dataset(num_shards=SHARDS).shuffle(seed=SEED) if shuffle else rows, kind)


class TheirsSavedExact(TheirsSaved):
    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        rows = datasets.load_from_disk(folder)
        return _batches(rows.shuffle(seed=SEED) if shuffle else rows, kind)


class TheirsParquet(TheirsSaved):
    def write(self, kind: str, folder: str, samples: int) -> None:
        Path(folder).mkdir()
        _made(kind, folder, samples).to_parquet(Path(folder) / "rows.parquet")

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        file = str(Path(folder) / "rows.parquet")
        rows = datasets.load_dataset("parquet", data_files=file, split="train", streaming=True)
        return _batches(rows.shuffle(seed=SEED) if shuffle else rows, kind)


def _batches(rows: Any, kind: str) -> Iterable[Any]:
    if value_column(kind) == "tokens":
        rows = rows.with_format("torch", **({"dtype": torch.int32} if hasattr(rows, "set_format") else {}))
    batches: Iterable[Any] = rows.iter(BATCH)
    return batches


def _made(kind: str, folder: str, samples: int) -> Any:
    tokens = datasets.List(datasets.Value("int32"), length=TOKENS)
    values = tokens if value_column(kind) == "tokens" else datasets.Value("binary")
    features = datasets.Features({"number": datasets.Value("int64"), value_column(kind): values})
    given = {"kind": kind, "count": samples}
    return datasets.Dataset.from_generator(all_samples, features, f"{folder}-cache", gen_kwargs=given)


class OursSaved(batch_reader.Ours):
    def write(self, kind: str, folder: str, samples: int) -> None:
        index_folder(folder)


class OursParquet(batch_reader.Ours):
    def write(self, kind: str, folder: str, samples: int) -> None:
        index_parquet(folder)
