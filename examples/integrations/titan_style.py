"""Loop in the style of torchtitan: parallel dimensions, gradient accumulation, and torch's own checkpoints.

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m integrations.titan_style --out run1

Each object with a state is a Stateful, and `torch.distributed.checkpoint` saves all of them. The DataLoader is a
Stateful without changes. A step of this loop is one of the optimizer; the loader counts batches, of which each step
takes several.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integrations.command import StepLog, options
from integrations.data import input_fn
from integrations.model import ByteModel
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from penstock.client import Appliance, DataExecutor, DataLoader

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ParallelDims:
    """Arrangement of the ranks: a number of replicas of the model, each divided into shards."""

    dp_replicate: int
    dp_shard: int

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.dp_replicate, self.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard"))

    @property
    def dp(self) -> int:
        """Number of ranks that take different batches, which are the boxes."""
        return self.dp_replicate * self.dp_shard

    def dp_rank(self, mesh: DeviceMesh) -> int:
        return mesh.get_local_rank("dp_replicate") * self.dp_shard + mesh.get_local_rank("dp_shard")


@dataclass(frozen=True)
class Config:
    """Settings of a job."""

    dims: ParallelDims
    steps: int
    checkpoint_interval: int
    """Number of steps between two checkpoints."""
    folder: Path
    local_batch_size: int = 8
    """Number of rows of a microbatch of one rank."""
    global_batch_size: int = 32
    """Number of rows of a step, over all ranks and microbatches."""
    warmup_steps: int = 10


class ModelState(Stateful):
    """State of the model's parameters, under names that do not depend on their sharding."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict)


class OptimizerState(Stateful):
    """State of the optimizer, by the names of the parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict)


class Checkpoints:
    """Checkpoints of the job: folders step-N. A complete one has torch's index, which is written last."""

    def __init__(self, folder: Path, interval: int, states: dict[str, Stateful]) -> None:
        self.folder, self.interval, self.states = folder, interval, states

    def save(self, step: int, *, last: bool) -> None:
        """Save a checkpoint if one is due. All ranks call this after each step."""
        if last or step % self.interval == 0:
            save(self.states, checkpoint_id=self.folder / f"step-{step}")

    def load(self) -> None:
        """Load the newest checkpoint, if there is one."""
        steps = [int(index.parent.name.removeprefix("step-")) for index in self.folder.glob("step-*/.metadata")]
        dist.barrier()  # all ranks have listed the folder, so that none sees another rank's next save
        if steps:
            load(self.states, checkpoint_id=self.folder / f"step-{max(steps)}")


class Trainer(Stateful):
    """Training job. Its own state (it is a Stateful, too) is the number of steps made."""

    def __init__(self, config: Config) -> None:
        self.config, self.step = config, 0
        dims, mesh = config.dims, config.dims.mesh()
        per_microbatch = config.local_batch_size * dims.dp
        if config.global_batch_size % per_microbatch:
            raise ValueError(
                f"global_batch_size must be a multiple of {per_microbatch}, got {config.global_batch_size}. Change "
                "global_batch_size or local_batch_size"
            )
        self.microbatches = config.global_batch_size // per_microbatch

        torch.manual_seed(0)
        self.model = ByteModel()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._warmup)

        self.appliance = Appliance(box=dims.dp_rank(mesh), num_boxes=dims.dp)
        self.loader = DataLoader(input_fn, global_batch_size=per_microbatch)
        states: dict[str, Stateful] = {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.model, self.optimizer),
            "scheduler": self.scheduler,
            "loader": self.loader,
            "trainer": self,
        }
        self.checkpoints = Checkpoints(config.folder / "checkpoints", config.checkpoint_interval, states)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def _warmup(self, step: int) -> float:
        return min(1.0, (step + 1) / self.config.warmup_steps)

    def train(self) -> None:
        """Train up to the last step, from the newest checkpoint if there is one."""
        config, microbatches = self.config, self.microbatches
        self.checkpoints.load()
        with self.appliance, StepLog(config.folder / f"rank{dist.get_rank()}.jsonl") as log:
            batches = iter(
                DataExecutor(
                    self.loader,
                    num_steps=(config.steps - self.step) * microbatches,
                    checkpoint_steps=config.checkpoint_interval * microbatches,
                    appliance=self.appliance,
                )
            )
            while self.step < config.steps:
                taken = [next(batches) for _ in range(microbatches)]
                loss = self.train_step(taken)
                self.step += 1
                log.write(self.step, loss, *taken)
                self.checkpoints.save(self.step, last=self.step == config.steps)

    def train_step(self, batches: list[Batch]) -> float:
        """Make one step of the optimizer. Return the mean loss over this rank's microbatches."""
        assert isinstance(self.model, FSDPModule)
        self.optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            self.model.set_requires_gradient_sync(batch is batches[-1])  # ranks sum gradients once a step
            loss = self.model(batch["context"], batch["target"]) / self.microbatches
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return total


def main() -> None:
    parser = options("Train a small model with gradient accumulation and torch's own checkpoints.")
    parser.add_argument("--dp-replicate", type=int, default=1, help="replicas; ranks are shards of each (1)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # one core a rank; and sums are equal on all machines of a kind
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dims = ParallelDims(chosen.dp_replicate, dist.get_world_size() // chosen.dp_replicate)
    Trainer(Config(dims, chosen.steps, chosen.checkpoint_every, chosen.out)).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
