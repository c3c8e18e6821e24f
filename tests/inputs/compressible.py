"""Batches that are sent with compression."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from penstock.worker import current_assignment


class Various:
    """Batches of many sizes and kinds of content: what compresses well, what hardly does, what does not at all."""

    def __init__(self, batches: int, worker: int) -> None:
        self.batches = batches
        self.worker = worker

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(self.batches):
            rng = np.random.default_rng([self.worker, number])
            yield {
                "tokens": torch.from_numpy(rng.integers(0, 50_000, (8, 1024 + 64 * number))),
                "image": torch.linspace(0, number + 1, 200_000 if number % 4 == 1 else 100).reshape(-1, 10),
                "noise": torch.from_numpy(rng.integers(0, 256, 600_000 if number % 4 == 2 else 7, dtype=np.uint8)),
                "label": torch.tensor(number),
            }


def various(batches: int) -> Various:
    return Various(batches, current_assignment().global_worker_id)
