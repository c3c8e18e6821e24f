"""Generators that a loader draws from: seeded for an epoch, captured, and restored; and set_epoch()."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from penstock.proto.errors import StateMismatchError
from penstock.worker.loader.loader_generators import LoaderGenerators, process_generators, set_epoch


class Images:
    """Dataset with generators of three kinds: its own, one of its class, and one among its module's globals."""

    shared = np.random.RandomState(3)

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.python = random.Random(seed)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("images_module")
    made.augment = np.random.default_rng(9)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "images_module", made)
    monkeypatch.setattr(Images, "__module__", "images_module")
    monkeypatch.setattr(Images, "shared", np.random.RandomState(3))
    return made


class Held:
    """A loader with its generators, as input_fn has just made them."""

    def __init__(self, module: ModuleType, seed: int = 1) -> None:
        self.dataset = Images(seed)
        self.module = module
        self.own = torch.Generator()
        self.own.manual_seed(seed)
        self.loader: Any = DataLoader(self.dataset, shuffle=True, generator=self.own)  # type: ignore[arg-type]
        self.generators = LoaderGenerators(self.loader, None)

    def draws(self) -> dict[str, Any]:
        return {
            "process": (random.random(), float(np.random.random()), float(torch.rand(()))),
            "own": (self.dataset.rng.random(), self.dataset.python.random(), float(torch.rand((), generator=self.own))),
            "class": Images.shared.random_sample(),
            "module": self.module.augment.random(),
        }


def test_an_epoch_is_seeded_by_its_number_alone(module: ModuleType) -> None:
    def epoch(number: int, before: int, *, box: int = 0, slot: int = 1, loader_seed: int = 1) -> dict[str, Any]:
        Images.shared.seed(3)
        held = Held(module, loader_seed)
        for _ in range(before):
            held.generators.begin(5, box, slot, 3)
            held.draws()
        held.generators.begin(5, box, slot, number)
        return held.draws()

    def differ(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
        return {name for name in one if one[name] != other[name]}

    everything = {"process", "own", "class", "module"}
    assert epoch(2, before=0) == epoch(2, before=3), "what was drawn before does not count"
    assert differ(epoch(2, 0), epoch(4, 0)) == everything
    assert differ(epoch(2, 0), epoch(2, 0, slot=0)) == {"process", "module"}, "its own have input_fn's"
    assert differ(epoch(2, 0), epoch(2, 0, box=1)) == {"process", "module"}
    assert differ(epoch(2, 0), epoch(2, 0, loader_seed=7)) == {"own"}
    fresh = Held(module, 1).dataset
    assert epoch(0, before=0)["own"][:2] == (fresh.rng.random(), fresh.python.random()), "as input_fn left them"


def test_states_are_restored_for_all_generators(module: ModuleType) -> None:
    held = Held(module)
    held.generators.begin(5, 0, 0, 1)
    held.draws()
    random.gauss(0, 1)  # one of two is kept for the next call
    np.random.normal()
    state = held.generators.capture()
    expected = [held.draws() for _ in range(3)], random.gauss(0, 1), np.random.normal()
    other = Held(module, seed=44)
    other.generators.restore(state)
    assert ([other.draws() for _ in range(3)], random.gauss(0, 1), np.random.normal()) == expected


def test_states_of_other_generators_are_refused(module: ModuleType) -> None:
    held = Held(module)
    state = held.generators.capture()
    with_one_less = SimpleNamespace(dataset=Images(1), generator=None)
    with pytest.raises(StateMismatchError, match="Resume with the code that saved the state"):
        LoaderGenerators(with_one_less, None).restore(state)
    plain = LoaderGenerators([1, 2], None)
    plain.restore(process_generators())


# ---- set_epoch


class Counting:
    def __init__(self) -> None:
        self.calls: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.calls.append(epoch)


def test_each_part_is_told_the_epoch_once() -> None:
    loader: Any
    loader, dataset, sampler, batches, own = (Counting() for _ in range(5))
    loader.dataset, loader.sampler, loader.batch_sampler = dataset, dataset, batches
    batches.sampler = sampler  # type: ignore[attr-defined]
    set_epoch(loader, 3)
    assert [part.calls for part in (loader, dataset, sampler, batches)] == [[3]] * 4, "one is in two places"
    own.dataset = own.sampler = own  # type: ignore[attr-defined]
    set_epoch(own, 4)
    assert own.calls == [4], "one object, in three places"
    set_epoch([1, 2], 5)


class Compose:
    """As torchvision's: a list of transforms."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)


def test_generator_of_a_transform_below_a_split_is_found() -> None:
    """It lies seven steps below the dataset, in what one writes with torch and torchvision. A generator that is not
    found draws in each epoch what it drew in the first."""
    images = Images(0)
    images.transform = Compose(str, SimpleNamespace(rng=np.random.default_rng(4)))  # type: ignore[attr-defined]
    both: Any = torch.utils.data.ConcatDataset([images])  # type: ignore[list-item]
    generators = LoaderGenerators(DataLoader(torch.utils.data.random_split(both, [6, 2])[0]), None)
    assert any(name.endswith(".dataset.datasets[0].transform.transforms[1].rng") for name in generators.names)
