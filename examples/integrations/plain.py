"""Minimal training that can be killed at any time and started again: one process, without set-up.

    PYTHONPATH=examples python -m integrations.plain --out run1

The same command resumes exactly from the newest checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch
from integrations.command import StepLog, options
from integrations.data import input_fn
from integrations.model import ByteModel

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.checkpoint import AsyncCheckpointer


def train(steps: int, checkpoint_every: int, out: Path) -> None:
    """Train up to step `steps`, from the newest checkpoint in `out` if there is one."""
    torch.manual_seed(0)
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(input_fn, global_batch_size=32)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    with AsyncCheckpointer(out / "checkpoints") as checkpointer, Appliance(), StepLog(out / "rank0.jsonl") as log:
        done = checkpointer.restore(state) or 0
        executor = DataExecutor(loader, num_steps=steps - done, checkpoint_steps=checkpoint_every)
        for batch in executor:
            loss = model(batch["context"], batch["target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.write(executor.step, loss.item(), batch)
            if executor.on_checkpoint_step:
                checkpointer.save(executor.step, state)


def main() -> None:
    chosen = options("Train a small model in one process.").parse_args()
    torch.set_num_threads(1)  # so that sums are equal on all machines of a kind
    train(chosen.steps, chosen.checkpoint_every, chosen.out)


if __name__ == "__main__":
    main()
