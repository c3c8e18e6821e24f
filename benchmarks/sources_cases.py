"""Data of benchmarks/sources.py: rows of a map-style dataset, and documents to be packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.data import Chunked, LogicalShards, MapLoader, Packed, Repeated, ShardLoader, WindowShuffled

__all__ = ["BATCH", "LINE", "ByHand", "Make", "Numbers", "Rows", "documents", "packed", "readers"]

BATCH = 64
LINE = 1024
"""Number of tokens of a packed line."""
WINDOW = 256
"""Number of lines that are shuffled with each other."""
BOS, EOS = 1, 2

Make = Callable[[], Iterable[Any]]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Dataset of rows of 32 numbers that are in memory already. Reading them costs nothing, so the loader's own cost is
    measured."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.arange(rows * 32).reshape(rows, 32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Numbers(torch.utils.data.Dataset[int]):
    """Dataset of any number of samples. Each sample is its own number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class InProcesses:
    """MapLoader whose batches the processes of a torch DataLoader make. Its state is that after the batches taken."""

    def __init__(self, loader: MapLoader, processes: int) -> None:
        self.loader, self.processes, self.done = loader, processes, 0

    def __iter__(self) -> Iterator[Any]:
        batches = torch.utils.data.DataLoader(self.loader, batch_size=None, num_workers=self.processes)
        for self.done, batch in enumerate(batches, 1):
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_after(self.done)


def readers(dataset: torch.utils.data.Dataset[Any], processes: int) -> dict[str, Make]:
    """Return the readers to compare, by name: functions that make a loader of one library over a shuffled epoch, in
    batches. `processes`: number of worker processes."""

    def sampled(**settings: Any) -> Make:
        return lambda: torch.utils.data.DataLoader(dataset, BATCH, num_workers=processes, **settings)

    def ours(reseed: bool) -> Make:
        def make() -> Any:
            loader = MapLoader(dataset, batch_size=BATCH, shuffle=True, seed=1, reseed=reseed)
            return InProcesses(loader, processes) if processes else loader

        return make

    one_rank: Any = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0)
    return {
        "Penstock": ours(False),
        "Penstock, reseeded": ours(True),
        "DataLoader": sampled(shuffle=True),
        "DataLoader, DistributedSampler": sampled(sampler=one_rank),
        "StatefulDataLoader": lambda: StatefulDataLoader(dataset, BATCH, shuffle=True, num_workers=processes),
    }


def documents(count: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Return `count` documents of 20 to 2,000 tokens, 1,010 on average."""
    random = np.random.default_rng(1)
    return [random.integers(3, 50_000, int(size)) for size in random.integers(20, 2001, count)]


def packed(texts: list[Any], shards: int) -> ShardLoader:
    """Return Penstock's endless loader that packs the texts into lines of LINE tokens, in batches. `shards`: number of
    logical shards."""
    chunks = Chunked(LogicalShards([texts], shards=shards, shuffle=True), length=LINE, bos=BOS, eos=EOS)
    lines = Packed(Repeated(chunks), length=LINE)
    return ShardLoader(WindowShuffled(lines, WINDOW // shards), batch_size=8, seed=1)


class ByHand(torch.utils.data.IterableDataset[torch.Tensor]):
    """Hand-written dataset that packs texts into lines of LINE tokens: without a state, shards or a shuffle window."""

    def __init__(self, texts: list[Any]) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[torch.Tensor]:
        random, line, filled = np.random.default_rng(1), np.empty(LINE, np.int64), 0
        while True:
            for number in random.permutation(len(self.texts)):
                document = np.concatenate([[BOS], self.texts[number], [EOS]])
                while document.size:
                    part = document[: LINE - filled]
                    line[filled : filled + part.size] = part
                    filled, document = filled + part.size, document[part.size :]
                    if filled == LINE:
                        yield torch.from_numpy(line)
                        line, filled = np.empty(LINE, np.int64), 0
