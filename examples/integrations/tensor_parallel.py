"""Tensor parallelism: the box is the data-parallel rank, and one rank of each group that splits a model has the loader.

    PYTHONPATH=examples torchrun --nproc-per-node 4 -m integrations.tensor_parallel --tp 2 --out run1

        ranks      tp 0   tp 1
        dp 0 ->      0      1       box 0: rank 0 has the loader, and rank 1 gets its batches from it
        dp 1 ->      2      3       box 1: rank 2 has the loader, and rank 3 gets its batches from it

A checkpoint can be resumed with other numbers of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integrations.command import StepLog, options
from integrations.data import input_fn
from integrations.model import ByteModel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.checkpoint import AsyncCheckpointer

Batch = dict[str, torch.Tensor]

HEADER = 1024
"""Size in bytes of the message with the names, dtypes and shapes of a batch."""


def from_first(batches: Iterable[Batch] | None, group: dist.ProcessGroup) -> Iterator[Batch]:
    """Yield the batches of a group's first rank on all ranks of the group, one at a time. The other ranks pass None."""
    source = None if batches is None else iter(batches)
    while True:
        batch = None if source is None else next(source, None)
        form: dict[str, list[Any]] | None = None
        if batch is not None:
            form = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in batch.items()}
        header = torch.frombuffer(bytearray(json.dumps(form).encode().ljust(HEADER)), dtype=torch.uint8)
        dist.broadcast(header, group_src=0, group=group)
        form = json.loads(header.numpy().tobytes())
        if form is None:
            return  # the end of the data, for all of them
        if batch is None:
            batch = {
                name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                for name, (dtype, *shape) in form.items()
            }
        for tensor in batch.values():
            dist.broadcast(tensor, group_src=0, group=group)
        yield batch


def parallelized(model: ByteModel, mesh: DeviceMesh) -> ByteModel:
    """Return the model with layers split over "tp", and each rank's part of them sharded over "dp"."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def train(steps: int, checkpoint_every: int, out: Path, tp: int) -> None:
    """Train up to step `steps`, from the newest checkpoint in `out` if there is one. `tp`: number of ranks that split
    the model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = parallelized(ByteModel(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}

    with ExitStack() as stack:
        checkpointer = stack.enter_context(AsyncCheckpointer(out / "checkpoints"))
        log = stack.enter_context(StepLog(out / f"rank{dist.get_rank()}.jsonl"))
        loader = None
        if mesh.get_local_rank("tp") == 0:
            stack.enter_context(Appliance(box=mesh.get_local_rank("dp"), num_boxes=mesh["dp"].size()))
            state["loader"] = loader = DataLoader(input_fn, global_batch_size=32)
        done = checkpointer.restore(state) or 0
        executor = None
        if loader is not None:
            executor = DataExecutor(loader, num_steps=steps - done, checkpoint_steps=checkpoint_every)
        for step, batch in enumerate(from_first(executor, mesh.get_group("tp")), start=done + 1):
            loss = model(batch["context"], batch["target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.write(step, loss.item(), batch)
            if step % checkpoint_every == 0 or step == steps:
                checkpointer.save(step, state)


def main() -> None:
    parser = options("Train a small model that is split over groups of ranks.")
    parser.add_argument("--tp", type=int, default=2, metavar="RANKS", help="ranks of a group that splits the model (2)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # one core a rank; and sums are equal on all machines of a kind
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(chosen.steps, chosen.checkpoint_every, chosen.out, chosen.tp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
