"""Generators are left alone for datasets that draw nothing, and for no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from penstock.data import LogicalShards, MapLoader, MDSWriter, ShardLoader, StreamingDataset, VideoClip
from penstock.data.formats.media import clips
from penstock.data.loading import map_reading
from penstock.data.loading.keyed_random import draws_nothing


def tensors() -> Any:
    return TensorDataset(torch.arange(12), torch.arange(24).reshape(12, 2))


def numbers() -> Any:
    return list(range(12))


class Noisy(TensorDataset):
    def __getitem__(self, number: int) -> Any:
        return random.random(), *super().__getitem__(number)  # type: ignore[no-untyped-call]


class NoisyIndices(list[int]):
    def __getitem__(self, number: Any) -> Any:
        return random.randrange(12)


def noisy() -> Any:
    return Noisy(torch.arange(12))


QUIET: dict[str, Callable[[], Any]] = {
    "array": lambda: np.arange(24).reshape(12, 2),
    "tensors": tensors,
    "subset": lambda: Subset(tensors(), [3, 1, 4, 5, 9, 2, 6, 8]),
    "concatenated": lambda: ConcatDataset([tensors(), Subset(tensors(), range(4))]),
    "stacked": lambda: StackDataset(tensors(), numbers()),
    "stacked by name": lambda: StackDataset(a=tensors(), b=numbers()),
}
NOISY: dict[str, Callable[[], Any]] = {
    "subclass": noisy,
    "indices": lambda: Subset(tensors(), NoisyIndices(range(8))),
    "concatenated": lambda: ConcatDataset([noisy(), noisy()]),
    "stacked": lambda: StackDataset(a=tensors(), b=noisy()),
    "function": lambda: type("Own", (), {"__len__": lambda self: 8, "__getitem__": lambda self, n: random.random()})(),
}


def batches(dataset: Any, **options: Any) -> list[Any]:
    return [str(batch) for batch in MapLoader(dataset, batch_size=3, shuffle=True, seed=4, **options)]


@pytest.mark.parametrize("name", QUIET)
def test_nothing_is_set_where_nothing_draws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = batches(QUIET[name](), reseed=True)
    monkeypatch.setattr(map_reading, "Generators", None)
    assert batches(QUIET[name]()) == expected


@pytest.mark.parametrize("name", NOISY)
def test_own_code_gets_its_generators(name: str) -> None:
    assert not draws_nothing(NOISY[name]())
    random.seed(1)
    first = batches(NOISY[name]())
    assert batches(NOISY[name]()) == first == batches(NOISY[name](), reseed=True)


class _File:
    """Stand-in for a video that was opened, whose frames are the numbers of the frames."""

    def __len__(self) -> int:
        return 1 << 20

    def read(self, positions: list[int]) -> torch.Tensor:
        return torch.tensor(positions)


@pytest.mark.parametrize(
    "made",
    [MapLoader, lambda data, **settings: ShardLoader(LogicalShards([data], shards=2), **settings)],
    ids=["MapLoader", "ShardLoader"],
)
def test_random_clips_are_seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[..., Any]) -> None:
    monkeypatch.setattr(clips, "_decoders", lambda: None)
    monkeypatch.setattr(VideoClip, "open", lambda clip, data: _File())
    with MDSWriter(tmp_path, {"video": "bytes"}) as shards:
        for _ in range(8):
            shards.write({"video": b""})
    drawn = VideoClip(lambda sample, count: torch.randint(0, count, (2,)).tolist())
    data = StreamingDataset(local=tmp_path, clips={"video": drawn})

    def frames(seed: int, **settings: Any) -> list[list[int]]:
        torch.manual_seed(seed)
        found = [batch["video"] for batch in made(data, seed=5, global_batch_size=2, **settings)]
        return sorted(torch.cat(found).tolist())

    assert sorted(frames(2, rank=(0, 2)) + frames(3, rank=(1, 2))) == frames(1)
