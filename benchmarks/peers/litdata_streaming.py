"""litdata as a reader of streaming datasets in its own format.

    python -m benchmarks.peers.litdata_streaming

As its documentation advises, data are written by `optimize` in chunks of 64 MB and read by StreamingDataset and
StreamingDataLoader with their defaults. Three cases are left out: images, because litdata decodes them with torchvision
and not with Pillow, so the comparison would be of those two; reads from a server, because it has no plain HTTP; and a
start in 10^6 tiny samples, because writing them takes minutes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.streaming_data import BATCH, KINDS
from benchmarks.streaming_player import Reader, play

# By name, because the type checker's environment lacks it.
litdata: Any = importlib.import_module("litdata")


def _sample(kind: str, number: int) -> dict[str, Any]:
    return KINDS[kind].sample(number)


def _collate(samples: list[dict[str, Any]]) -> Any:
    """Collate samples with values of bytes to a batch. The library's own function would make a tensor of each byte,
    because it gets memoryviews and not bytes."""
    numbers = torch.tensor([sample["number"] for sample in samples])
    return {"number": numbers, "data": [bytes(sample["data"]) for sample in samples]}


class LitData(Reader):
    packages = ("litdata", "torch", "numpy")

    def write(self, kind: str, folder: str, samples: int) -> None:
        litdata.optimize(
            partial(_sample, kind),
            list(range(samples)),
            folder,
            chunk_bytes="64MB",
            num_workers=1,
            keep_data_ordered=True,
            verbose=False,
        )

    def samples(self, kind: str, folder: str, *, shuffle: bool) -> Iterator[dict[str, Any]]:
        # Each iter() of the library's loader starts it again, so only this loop may call it.
        for sample in litdata.StreamingDataset(folder, shuffle=shuffle):  # noqa: UP028
            yield sample

    def batches(self, kind: str, folder: str, *, shuffle: bool, workers: int, remote: str = "") -> Iterable[Any]:
        if remote:
            raise NotImplementedError("litdata cannot read from a plain HTTP server: leave this case out")
        dataset = litdata.StreamingDataset(folder, shuffle=shuffle)
        more: dict[str, Any] = {"collate_fn": _collate} if KINDS[kind].encoding == "bytes" else {}
        if workers:
            # As its documentation says for Linux: a forked worker of a process that has read data may wait forever.
            more["multiprocessing_context"] = "spawn"
        loader: Iterable[Any] = litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, **more)
        return loader


if __name__ == "__main__":
    play(LitData())
