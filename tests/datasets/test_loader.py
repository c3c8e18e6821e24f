"""The loader's order and states, on any number of boxes and workers, and in torch's own loaders."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import pytest
import torch
import torch.utils.data
from all_workers import AllWorkers

from penstock.data.loading.streaming_loader import StreamingLoader
from penstock.data.streaming_dataset import StreamingDataset
from penstock.proto.errors import InvalidArgumentError, StateMismatchError
from penstock.proto.state.generators import capture_rng


def collated(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["number"] for sample in samples]


def loader_of(dataset: StreamingDataset, **changed: Any) -> StreamingLoader:
    options: dict[str, Any] = {"shuffle": True, "seed": 9, "shuffle_block": 30, "collate_fn": collated, **changed}
    return StreamingLoader(dataset, **options)


class Augmented(StreamingDataset):
    """Each sample with what it draws."""

    def __getitem__(self, index: SupportsIndex) -> Any:
        number = super().__getitem__(index)["number"]
        return number, random.random(), np.random.random(), torch.rand(()).item()


def drawn(samples: list[Any]) -> list[Any]:
    return [random.random(), *samples]


def test_augmentation_depends_on_the_sample_alone(hundred: Path) -> None:
    """Make augmentation independent of the process's generators, of workers, boxes and restarts. A restore key gives
    the same sample."""

    def loader(**changed: Any) -> StreamingLoader:
        return loader_of(dataset, global_batch_size=12, collate_fn=list, **changed)

    dataset = Augmented(local=hundred)
    first, again = loader(), loader()
    whole = [list(first) for _ in range(2)]
    before = capture_rng()
    assert [list(again) for _ in range(2)] == whole
    assert capture_rng() == before
    assert len({draw for epoch in whole for batch in epoch for row in batch for draw in row[1:]}) == 600
    workers = AllWorkers(loader, (2, 2))
    got = workers.take(5)
    rest = AllWorkers(loader, (1, 3), workers).take(len(whole[0]) - 5)
    assert sorted(row for batch in [*got, *rest] for row in batch) == sorted(row for batch in whole[0] for row in batch)
    keyed = loader(keys="key")
    assert [[keyed.restore_sample(key) for key in batch["key"]] for batch in keyed] == whole[0]
    assert list(loader(reseed=False)) != whole[0]
    dataset.close()


def test_state_of_other_augmentation_is_refused(dataset: StreamingDataset) -> None:
    """Without a shuffle the seed decides nothing else; and what does not draw may have any."""
    options: dict[str, Any] = {"batch_size": 9, "shuffle": False}
    state = loader_of(dataset, collate_fn=drawn, seed=1, **options).state_dict()
    with pytest.raises(StateMismatchError, match="seed was 1 and is 2"):
        loader_of(dataset, collate_fn=drawn, seed=2, **options).load_state_dict(state)
    plain = StreamingLoader(dataset, batch_size=9, seed=1)
    StreamingLoader(dataset, batch_size=9, seed=2).load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"shuffle": False}, "shuffle_block was 30 and is None"),
        ({"shuffle_block": None}, "shuffle_block was 30 and is 'all'"),
        ({"partitions": 2}, "partitions was 1 and is 2"),
        ({"epoch_size": 60}, r"samples\[0\] was 100 and is 60"),
    ],
)
def test_state_of_other_order_is_refused_by_name(dataset: StreamingDataset, changed: dict[str, Any], says: str) -> None:
    state = loader_of(dataset, batch_size=4).state_dict()
    other = loader_of(dataset, batch_size=4, **changed)
    with pytest.raises(StateMismatchError, match=says):
        other.load_state_dict(state)
    with pytest.warns(UserWarning, match=says):
        other.load_state_dict(state, strict=False)


def test_a_resume_is_a_look_up(dataset: StreamingDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loader_of(dataset, batch_size=10)
    batches = list(first)
    first.set_epoch(0)
    next(iter(first))
    state, read = first.state_after(8), list[int]()
    plain = StreamingDataset.get_many

    def counted(self: StreamingDataset, samples: Any) -> Any:
        read.extend(samples.tolist())
        return plain(self, samples)

    monkeypatch.setattr(StreamingDataset, "get_many", counted)
    other = loader_of(dataset, batch_size=10)
    other.load_state_dict(state)
    assert list(other) == batches[8:]
    assert len(read) == 20, "more was read than what is left"


def test_rank_of_a_distributed_job_gets_its_rows(dataset: StreamingDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(loader_of(dataset, batch_size=10))
    monkeypatch.setenv("WORLD_SIZE", "2")
    rows = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        rows.append(list(loader_of(dataset, batch_size=5)))
    assert [[row for pair in zip(*pieces, strict=True) for row in pair] for pieces in zip(*rows, strict=True)] == whole
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(InvalidArgumentError, match="rank must be at least 0 and below the 2 ranks, got 2"):
        loader_of(dataset, batch_size=5)
    assert list(loader_of(dataset, batch_size=5, rank=(0, 2))) == rows[0]
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(InvalidArgumentError, match="got first and 2"):
        loader_of(dataset, batch_size=5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partitions": 0}, "partitions must be at least 1, got 0"),
        ({"shuffle_block": -1}, "shuffle_block must be at least 1, got -1"),
        ({"interleave": "batches", "partitions": 2}, "a multiple of partitions"),
        ({"interleave": "batches", "tail": "carry"}, "would shift all batches"),
        ({"interleave": "batches", "skip": [range(3, 7)]}, "got 7"),
        ({"interleave": "mixed"}, "interleave must be one of .* got 'mixed'"),
    ],
)
def test_settings_that_cannot_be_meant(dataset: StreamingDataset, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        StreamingLoader(dataset, batch_size=3, **options)
