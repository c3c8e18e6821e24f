"""A dataset of mosaicml-streaming in several slots, by a class of its names: the library is not installed here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from penstock.client import DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto.errors import InputFnError


class StreamingDataset(IterableDataset[int]):
    """Notes at its making how many workers it has, as the real one does."""

    def __init__(self) -> None:
        info = torch.utils.data.get_worker_info()
        self._unique_rank_world = SimpleNamespace(workers_per_rank=1 if info is None else info.num_workers)

    def __iter__(self) -> Iterator[int]:
        yield from range(4)


StreamingDataset.__module__ = "streaming"  # the real one is in streaming.base.dataset


class Text(StreamingDataset):
    """A user's subclass."""


class Wrapped(IterableDataset[int]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


def loader_of(kind: str, made: Any = None) -> Any:
    dataset = made or (Text if kind == "subclass" else StreamingDataset)()
    if kind == "itself":
        return dataset
    return TorchLoader(Wrapped(dataset) if kind == "wrapped" else dataset, batch_size=2)


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its class is found, to be copied."""
    library: Any = ModuleType("streaming")
    library.StreamingDataset = StreamingDataset
    monkeypatch.setitem(sys.modules, "streaming", library)


@pytest.mark.parametrize(
    ("kind", "topology"),
    [("subclass", {"num_workers_per_box": 2}), ("wrapped", {"num_boxes": 2}), ("itself", {"num_workers_per_box": 2})],
)
def test_one_made_in_each_slot_is_refused(kind: str, topology: dict[str, Any]) -> None:
    what = "mosaicml-streaming .* for ever.* penstock.data.StreamingDataset.* num_workers_per_box=1"
    with FakeAppliance(**topology, seed=7), pytest.raises(InputFnError, match=what):
        next(iter(DataLoader(loader_of, kind)))


def test_one_slot_works() -> None:
    with FakeAppliance():
        assert len(list(DataLoader(loader_of, "loader"))) == 2


@pytest.mark.filterwarnings("ignore:.*no worker read its assignment")
def test_one_made_in_the_training_process_works() -> None:
    """The workers get copies, which share the barrier."""
    with FakeAppliance(num_workers_per_box=2):
        assert len(list(DataLoader(StreamingDataset(), batch_size=2))) == 4
