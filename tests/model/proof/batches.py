"""Batches of the proof's loaders."""

from __future__ import annotations

from typing import Any

import torch

from penstock.worker import current_assignment

BIG = torch.arange(40_960, dtype=torch.float32)
"""160 KiB, the same in each batch."""


def batch_of(number: int, draws: list[float], big: bool) -> dict[str, Any]:
    """Make one sample, or one batch: where it was made, its number, and what was drawn for it."""
    label = torch.tensor([current_assignment().global_worker_id, number, *draws], dtype=torch.float64)
    return {"image": BIG, "label": label, "mask": BIG} if big else {"label": label, "number": number}
