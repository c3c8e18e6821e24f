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


def made() -> Any:
    return TorchLoader(StreamingDataset(), batch_size=2)


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its class is found, to be copied."""
    library: Any = ModuleType("streaming")
    library.StreamingDataset = StreamingDataset
    monkeypatch.setitem(sys.modules, "streaming", library)


def test_one_made_in_each_slot_is_refused() -> None:
    what = "mosaicml-streaming .* for ever.* penstock.data.StreamingDataset.* num_workers_per_box=1"
    with FakeAppliance(num_boxes=2, seed=7), pytest.raises(InputFnError, match=what):
        next(iter(DataLoader(made)))


@pytest.mark.filterwarnings("ignore:.*no worker read its assignment")
def test_one_made_in_the_training_process_works() -> None:
    """The workers get copies, which share the barrier."""
    with FakeAppliance(num_workers_per_box=2):
        assert len(list(DataLoader(StreamingDataset(), batch_size=2))) == 4
