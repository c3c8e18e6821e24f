"""Pipeline parallelism: the ranks of a pipeline are one box. The first stage has the loader, the last needs targets.

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m integrations.pipeline_parallel --out run1

With a multiple of that number of ranks there are several pipelines, each a box with batches of its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integrations.command import StepLog, options
from integrations.data import input_fn
from integrations.model import ByteModel
from integrations.tensor_parallel import from_first
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.checkpoint import AsyncCheckpointer

STAGES = 2
MICROBATCHES = 4


class Stage(nn.Module):
    """Half of the model, as one stage of a pipeline."""

    def __init__(self, model: ByteModel, number: int) -> None:
        super().__init__()
        self.embedding = model.embedding if number == 0 else None
        self.block = model.blocks[number]
        self.head = model.head if number == STAGES - 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the stage. The first stage takes bytes, the last returns logits; between them are float32 values, [rows,
        width]."""
        if self.embedding is not None:
            hidden = self.embedding(hidden).flatten(1)
        hidden = self.block(hidden)
        return hidden if self.head is None else self.head(hidden)


def train(steps: int, checkpoint_every: int, out: Path) -> None:
    """Train up to step `steps`, from the newest checkpoint in `out` if there is one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // STAGES, STAGES), mesh_dim_names=("dp", "pp"))
    number, pipeline = mesh.get_local_rank("pp"), mesh.get_group("pp")
    torch.manual_seed(0)
    model = Stage(ByteModel(), number)
    stage = PipelineStage(model, number, STAGES, torch.device("cpu"), group=pipeline)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {f"model {number}": model, f"optimizer {number}": optimizer}  # each stage has its own

    with ExitStack() as stack:
        checkpointer = stack.enter_context(AsyncCheckpointer(out / "checkpoints"))
        log = stack.enter_context(StepLog(out / f"rank{dist.get_rank()}.jsonl"))
        loader = None
        if number == 0:
            stack.enter_context(Appliance(box=mesh.get_local_rank("dp"), num_boxes=mesh["dp"].size()))
            state["loader"] = loader = DataLoader(input_fn, global_batch_size=32)
        done = checkpointer.restore(state) or 0
        executor = None
        if loader is not None:
            executor = DataExecutor(loader, num_steps=steps - done, checkpoint_steps=checkpoint_every)
        for step, batch in enumerate(from_first(executor, pipeline), start=done + 1):
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            if number == 0:
                schedule.step(batch["context"])
            else:
                schedule.step(target=batch["target"], losses=losses)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=mesh.get_group("dp"))
            optimizer.step()
            log.write(step, torch.stack(losses).mean().item() if losses else 0.0, batch)
            if step % checkpoint_every == 0 or step == steps:
                checkpointer.save(step, state)


def main() -> None:
    chosen = options("Train a small model in a pipeline of two stages.").parse_args()
    torch.set_num_threads(1)  # one core a rank; and sums are equal on all machines of a kind
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(chosen.steps, chosen.checkpoint_every, chosen.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
