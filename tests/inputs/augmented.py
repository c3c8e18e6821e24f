"""Datasets and collators with random generators of their own, as libraries of transforms have them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from penstock.data import MapLoader


class Compose:
    """As Albumentations': two generators of the same seed, made at once, and shared with its transforms."""

    def __init__(self, seed: int) -> None:
        self.random_generator, self.py_random = np.random.default_rng(seed), random.Random(seed)
        self.transforms = [random.Random(seed)]

    def __call__(self) -> float:
        return float(self.random_generator.random()) + self.py_random.random()


class Randomizable:
    """As MONAI's."""

    def __init__(self, seed: int) -> None:
        self.R = np.random.RandomState(seed)

    def __call__(self) -> float:
        return float(self.R.random_sample())


def albumentations(seed: int) -> Any:
    import albumentations

    image, transform = np.full((4, 4, 3), 100, np.uint8), albumentations.RandomBrightnessContrast(p=1)
    composed = albumentations.Compose([transform], seed=seed)
    return lambda: float(composed(image=image)["image"].mean())


def monai(seed: int) -> Any:
    from monai.transforms import RandGaussianNoise

    noise = RandGaussianNoise(prob=1).set_random_state(seed)
    return lambda: float(noise(np.zeros((1, 2, 2), np.float32)).mean())


class Images(Dataset[torch.Tensor]):
    def __init__(self, count: int, transform: Any) -> None:
        self.count, self.transform = count, transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.transform()])


TRANSFORMS = {"compose": Compose, "randomizable": Randomizable, "albumentations": albumentations, "monai": monai}


def images(transform: str, seeded_by: str, per_worker: int) -> DataLoader[torch.Tensor]:
    """Each worker's images have numbers of its own."""
    seed = 137 if seeded_by == "constant" else torch.initial_seed() % 2**32
    worker = get_worker_info()
    assert worker is not None
    dataset = Images(per_worker, TRANSFORMS[transform](seed))
    return DataLoader(dataset, batch_size=1, collate_fn=lambda rows: torch.stack(rows) + torch.tensor([worker.id, 0.0]))


class Texts(Dataset[dict[str, list[int]]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [2, *range(10, 40), 3]}


def masking(vocabulary: str) -> Any:
    from transformers import BertTokenizerFast
    from transformers.data.data_collator import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(BertTokenizerFast(vocabulary), seed=7)


def masked(vocabulary: str) -> DataLoader[Any]:
    assert get_worker_info() is not None
    return DataLoader(Texts(), batch_size=4, collate_fn=masking(vocabulary))


def masked_as_worker(vocabulary: str) -> DataLoader[Any]:
    """Reads its number, so that get_worker_info() is None to datasets; collators must still be told."""
    from penstock.worker import current_assignment

    assert current_assignment().slot < 2
    assert get_worker_info() is None
    return DataLoader(Texts(), batch_size=4, collate_fn=masking(vocabulary))


class Lazy:
    """A collator that makes its generator at its first call, as transformers' do."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(7)
        return torch.stack(rows) + torch.rand((), generator=self.generator)


def lazy(count: int = 16) -> MapLoader:
    return MapLoader(torch.arange(count), batch_size=2, shuffle=True, collate_fn=Lazy(), seed=3)
