"""FSDP2: parameters sharded over the ranks (`fully_shard`). Each rank is a box and takes batches of its own.

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m integrations.fsdp2 --out run1

Box and number of boxes are torchrun's RANK and WORLD_SIZE. A checkpoint holds the whole model once, whatever the number
of ranks, and can be resumed with another number.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from integrations.command import StepLog, options
from integrations.data import input_fn
from integrations.model import ByteModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from penstock.client import Appliance, DataExecutor, DataLoader, checkpoint_closure
from penstock.client.checkpoint import AsyncCheckpointer


def train(steps: int, checkpoint_every: int, out: Path) -> None:
    """Train up to step `steps`, from the newest checkpoint in `out` if there is one."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = ByteModel()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after sharding: it updates the shards
    loader = DataLoader(input_fn, global_batch_size=32)
    state = {"model": model, "optimizer": optimizer, "loader": loader}

    @checkpoint_closure
    def save() -> None:
        checkpointer.save(executor.step, state)

    log_file = out / f"rank{dist.get_rank()}.jsonl"
    with AsyncCheckpointer(out / "checkpoints") as checkpointer, Appliance(), StepLog(log_file) as log:
        done = checkpointer.restore(state) or 0
        executor = DataExecutor(loader, num_steps=steps - done, checkpoint_steps=checkpoint_every)
        for batch in executor:
            loss = model(batch["context"], batch["target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.write(executor.step, loss.item(), batch)
            save()


def main() -> None:
    chosen = options("Train a small model, sharded over the ranks.").parse_args()
    torch.set_num_threads(1)  # one core a rank; and sums are equal on all machines of a kind
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(chosen.steps, chosen.checkpoint_every, chosen.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
