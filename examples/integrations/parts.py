"""What the examples of Lightning, Accelerate and the Hugging Face Trainer share: input, model, and a log to compare."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.utils.data import Dataset

from penstock.worker.datasets import MapLoader

__all__ = ["FEATURES", "ROWS", "Net", "Noise", "input_fn", "note", "options"]

FEATURES = 16
ROWS = 112


class Noise(Dataset[dict[str, Any]]):
    """Each row is drawn from its number: x: float32, [FEATURES]; y: float32, [1]."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, Any]:
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(number))
        return {"x": x, "y": x.sin().sum(0, keepdim=True)}


def input_fn(batch_size: int) -> MapLoader:
    """What Penstock calls in each worker."""
    return MapLoader(Noise(), batch_size=batch_size, shuffle=True, tail="drop", reseed=False)


class Net(nn.Module):
    """A model as Hugging Face's Trainer takes them: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: float32, [batch, FEATURES]; y: float32, [batch, 1]."""
        return {"loss": nn.functional.mse_loss(self.layers(x), y)}


def note(log: TextIO, step: int, batch: dict[str, torch.Tensor], loss: torch.Tensor) -> None:
    """One line a step: runs are compared by them to the last bit."""
    digest = hashlib.blake2b(batch["x"].cpu().numpy().tobytes(), digest_size=16).hexdigest()
    log.write(json.dumps({"step": step, "loss": float(loss).hex(), "digest": digest}) + "\n")


def options(what: str) -> argparse.Namespace:
    """--steps, --checkpoint-every and --out, which is a folder that is there then."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--steps", type=int, default=40, help="batches of each process")
    parser.add_argument("--checkpoint-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and logs")
    found = parser.parse_args()
    found.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the sums come out the same on every machine of a kind
    torch.manual_seed(0)
    return found
