"""Passing over a batch without making it."""

from __future__ import annotations

from typing import Any

import pytest
import streams
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.worker.loader.user_loaders import CannotSkipError, skip_batch


class Counted(Dataset[Any]):
    """Notes what was fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_torch_loader_moves_and_fetches_nothing(kind: Any) -> None:
    at = 3
    torch.manual_seed(5)
    whole = [batch.tolist() for batch in kind(Counted(), batch_size=3, shuffle=True)]
    torch.manual_seed(5)
    dataset = Counted()
    loader = kind(dataset, batch_size=3, shuffle=True)
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(at)]
    skip_batch(loader, iterator)
    state = loader.state_dict() if hasattr(loader, "state_dict") else None
    got += [batch.tolist() for batch in iterator]
    assert got == whole[:at] + whole[at + 1 :]
    assert dataset.fetched == [index for batch in got for index in batch]
    if state is not None:
        again = kind(Counted(), batch_size=3, shuffle=True)
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again] == got[at:]


def test_own_skip_method_is_used_first() -> None:
    class Skips(streams.Counter):
        def skip_batch(self) -> None:
            self.done += 1

    loader = Skips(3)
    iterator = iter(loader)
    assert next(iterator)["number"] == 1
    skip_batch(loader, iterator)
    assert [batch["number"] for batch in iterator] == [3]


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (DataLoader(streams.Sharded(), batch_size=2), "IterableDataset"),
        (DataLoader(Counted(), num_workers=1), "makes its batches in worker processes .num_workers=1"),
        ([torch.zeros(1)], "a list, nor"),
    ],
)
def test_where_it_cannot_be_the_reason_is_told(loader: Any, says: str) -> None:
    iterator = iter(loader)
    with pytest.raises(CannotSkipError, match=says):
        skip_batch(loader, iterator)
