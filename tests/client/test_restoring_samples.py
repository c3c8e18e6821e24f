"""Samples by their keys, and what a loader says of itself, on the loader that the user holds."""

from __future__ import annotations

import random
from typing import Any

import dealt
import pytest
import streams
import torch

from penstock.client import Appliance, DataLoader
from penstock.data import MapLoader
from penstock.proto.errors import NotRestartableError, StateMismatchError


def numbers(**options: Any) -> MapLoader:
    return MapLoader(torch.arange(20), batch_size=4, shuffle=True, keys="key", **options)


class Refusing:
    def __iter__(self) -> Any:
        return iter(())

    def restore_sample(self, key: str) -> Any:
        raise AssertionError(key)

    def can_restore_sample(self) -> bool:
        return False


def test_sample_is_reread_with_the_runs_seed() -> None:
    whole = dealt.listed([4, 5], batch_size=3, seed=11)
    batch = next(iter(whole))
    loader = DataLoader(dealt.listed, [4, 5], batch_size=3)
    assert loader.can_restore_sample()
    random.seed(5)
    before = random.getstate()
    with Appliance(seed=11, num_workers_per_box=0):
        assert [loader.restore_sample(key) for key in batch["keys"]] == batch["batch"].tolist()
        assert loader.config() == {"input_fn": loader.name, "loader": whole.config()}
    assert random.getstate() == before
    error = pytest.raises(StateMismatchError, match="the restore key must have the digest")
    with Appliance(seed=12, num_workers_per_box=0), error:
        loader.restore_sample(batch["keys"][0])


def test_of_a_loaded_state_it_is_the_state_s_seed() -> None:
    loader = DataLoader(numbers)
    with Appliance(seed=11, num_workers_per_box=0):
        state = loader.state_dict()
    batch = next(iter(numbers(seed=11)))
    resumed = DataLoader(numbers)
    resumed.load_state_dict(state)
    assert [resumed.restore_sample(key) for key in batch["key"]] == batch["batch"].tolist()


def test_a_loader_that_cannot_says_so() -> None:
    for loader in (DataLoader(streams.Counter, 3), DataLoader(Refusing)):
        assert not loader.can_restore_sample()
        with pytest.raises(NotRestartableError, match=r"has no restore_sample\(key\)"):
            loader.restore_sample("0.0")
        assert loader.config() == {"input_fn": loader.name, "loader": None}
