"""Training job: one process of this for each box. It is an ordinary PyTorch loop: read `train`.

On one machine, with all daemons started and stopped here:

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m train_lm.train --steps 100 --checkpoint-every 25

With PENSTOCK_COORDINATOR=HOST:PORT and PENSTOCK_TOKEN in the environment the same line takes its batches from the
workers of that coordinator.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_lm.data import input_fn

from penstock.client import Appliance, DataExecutor, DataLoader, checkpoint_closure
from penstock.client.checkpoint import AsyncCheckpointer

BATCH_SIZE = 16  # of each box
NUM_WINDOWS = 2560  # 320 KiB of text; an epoch is 80 steps of 2 boxes


class ByteModel(nn.Module):
    """Model that predicts the next byte from those before it. 123,904 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.gru = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte at each position: float32, [batch, time, 256]. tokens: int64, [batch,
        time]."""
        hidden, _ = self.gru(self.embedding(tokens))
        logits: torch.Tensor = self.head(hidden)
        return logits


def train(steps: int, checkpoint_every: int, out: Path) -> None:
    """Train up to step `steps`, from the newest checkpoint in `out` if there is one."""
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(input_fn, batch_size=BATCH_SIZE, num_windows=NUM_WINDOWS)
    state = {"model": model, "optimizer": optimizer, "loader": loader}

    @checkpoint_closure
    def save() -> None:
        checkpointer.save(executor.step, state)

    log_file = out / f"box{dist.get_rank()}.jsonl"
    with AsyncCheckpointer(out / "checkpoints") as checkpointer, Appliance(), log_file.open("w", buffering=1) as log:
        done = checkpointer.restore(state) or 0
        executor = DataExecutor(loader, num_steps=steps - done, checkpoint_steps=checkpoint_every)
        for batch in executor:
            tokens = batch["tokens"].long()
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            note(log, executor, batch, loss.item())
            save()


def note(log: TextIO, executor: DataExecutor, batch: dict[str, Any], loss: float) -> None:
    """Write one line for a step to the log, for demo.py, which compares runs: the batch, the loss, and the time that
    the loop waited for the batch."""
    digest = hashlib.blake2b(batch["tokens"].numpy().tobytes(), digest_size=16).hexdigest()
    epoch = (executor.step - 1) // (NUM_WINDOWS // (BATCH_SIZE * dist.get_world_size()))
    line = {"step": executor.step, "epoch": epoch, "windows": batch["window"].tolist(), "digest": digest}
    log.write(
        json.dumps({**line, "loss": loss.hex(), "waited_s": executor.last_wait_seconds, "time": time.time()}) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model of Python source text.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint-every", type=int, default=25, metavar="STEPS")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "out", help="folder for checkpoints and logs"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # one core a box; and sums are equal on all machines of a kind
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(options.steps, options.checkpoint_every, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
