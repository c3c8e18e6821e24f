"""NeMo Automodel, fed by Penstock: a recipe with its StepScheduler and its checkpoints.

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m integrations.automodel_recipe --out /tmp/automodel

If it is killed and started again, on any number of ranks, it resumes from the newest checkpoint.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integrations.command import StepLog, options
from integrations.sequences import SEQUENCE, sft_input_fn
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.training.step_scheduler import StepScheduler
from nemo_automodel.recipes.base_recipe import BaseRecipe
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.client import Appliance, DataLoader

LOCAL_BATCH = 2
GLOBAL_BATCH = 8


class Recipe(BaseRecipe):  # type: ignore[misc]
    """Recipe that trains a small model on the CPU."""

    def __init__(self, steps: int, checkpoint_every: int, out: Path) -> None:
        ranks = dist.get_world_size()
        torch.manual_seed(0)
        small = LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=SEQUENCE,
        )
        self.cfg = ConfigNode({"local_batch_size": LOCAL_BATCH, "global_batch_size": GLOBAL_BATCH})
        self.peft_config = None
        self.model = DistributedDataParallel(LlamaForCausalLM(small))
        self.optimizer = [torch.optim.AdamW(self.model.parameters(), lr=1e-2)]
        # The recipe saves every attribute that has a state, and so the loader: once, because it is no
        # StatefulDataLoader, whose states are kept by data-parallel rank.
        self.dataloader = DataLoader(sft_input_fn, global_batch_size=LOCAL_BATCH * ranks)
        self.step_scheduler = StepScheduler(
            GLOBAL_BATCH,
            LOCAL_BATCH,
            ranks,
            self.dataloader,
            ckpt_every_steps=checkpoint_every,
            max_steps=steps,
            num_epochs=1000,
        )
        self.checkpointer = CheckpointingConfig(
            checkpoint_dir=str(out / "checkpoints"), model_save_format="torch_save", save_consolidated=False
        ).build(dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0)

    def run(self, log: StepLog) -> None:
        self.load_checkpoint()
        for epoch in self.step_scheduler.epochs:
            self.step_scheduler.set_epoch(epoch)
            for batches in self.step_scheduler:
                loss = self.train_step(batches)
                log.write(self.step_scheduler.step + 1, loss, *batches)
                if self.step_scheduler.is_ckpt_step:
                    self.save_checkpoint(epoch, self.step_scheduler.step, loss)
        self.checkpointer.close()

    def train_step(self, batches: list[dict[str, Any]]) -> float:
        """Make one step of the optimizer. Return the mean loss over this rank's microbatches."""
        self.optimizer[0].zero_grad()
        total = 0.0
        for batch in batches:
            inputs = {name: batch[name] for name in ("input_ids", "labels", "attention_mask")}
            loss = self.model(**inputs).loss / len(batches)
            loss.backward()
            total += loss.item()
        self.optimizer[0].step()
        return total


def main() -> None:
    chosen = options("Train a small model with a recipe of NeMo Automodel.").parse_args()
    torch.set_num_threads(1)  # so that sums are equal on all machines of a kind
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with Appliance(), StepLog(chosen.out / f"rank{dist.get_rank()}.jsonl") as log:
        Recipe(chosen.steps, chosen.checkpoint_every, chosen.out).run(log)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
