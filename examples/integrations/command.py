"""Common parts of these examples: the command line, and a log with which two runs can be compared."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

__all__ = ["StepLog", "options"]


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options --steps, --checkpoint-every and --out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=200, help="last step of the training (200)")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and logs")
    return parser


class StepLog:
    """Log with one line of JSON for each step: its batches and its loss. Equal lines mean bitwise equal values."""

    def __init__(self, path: Path) -> None:
        """Open the log file at `path` for appending."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)

    def write(self, step: int, loss: float, *batches: Mapping[str, torch.Tensor | np.ndarray[Any, Any]]) -> None:
        """Write the line of a step. `batches`: the batches of this step on this rank."""
        content = hashlib.blake2b(digest_size=16)
        for batch in batches:
            for name, tensor in sorted(batch.items()):
                content.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                content.update(np.asarray(tensor).tobytes())
        pieces = [number for batch in batches for number in batch["piece"].tolist()]
        line = {"step": step, "loss": loss.hex(), "digest": content.hexdigest(), "pieces": pieces}
        self._file.write(json.dumps(line) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
