"""Surroundings of the training in these examples: the command line, and a log by which two runs can be compared."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

__all__ = ["StepLog", "options"]


def options(description: str) -> argparse.ArgumentParser:
    """--steps, --checkpoint-every and --out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=200, help="to train up to, from the newest checkpoint (200)")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and logs")
    return parser


class StepLog:
    """Log of one line of JSON a step: what came, and what it led to. Equal lines are equal to the last bit."""

    def __init__(self, path: Path) -> None:
        """Goes on at the end of the file, if there is one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)

    def write(self, step: int, loss: float, *batches: Mapping[str, torch.Tensor]) -> None:
        """batches: those of this step, on this rank."""
        content = hashlib.blake2b(digest_size=16)
        for batch in batches:
            for name, tensor in sorted(batch.items()):
                content.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                content.update(tensor.numpy().tobytes())
        pieces = [number for batch in batches for number in batch["piece"].tolist()]
        line = {"step": step, "loss": loss.hex(), "digest": content.hexdigest(), "pieces": pieces}
        self._file.write(json.dumps(line) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
