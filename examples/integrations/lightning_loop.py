"""PyTorch Lightning, fed by Penstock. If it is killed and started again, it resumes from the newest checkpoint.

    PYTHONPATH=examples python -m integrations.lightning_loop --out /tmp/lightning

With PENSTOCK_COORDINATOR=HOST:PORT and PENSTOCK_TOKEN in the environment the same line takes its batches from the
workers of that coordinator.
"""

from __future__ import annotations

from typing import Any

import torch
from integrations.command import StepLog, options
from integrations.data import input_fn
from integrations.model import ByteModel
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from penstock.client import Appliance, DataLoader, Lookahead
from penstock.client.integrations.lightning import LoaderState


class Module(LightningModule):
    def __init__(self, ahead: Lookahead, log: StepLog) -> None:
        super().__init__()
        self.model = ByteModel()
        self.ahead, self.lines = ahead, log

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch["context"], batch["target"])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.lines.write(self.ahead.step, outputs["loss"].item(), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    arguments = options("Train a small model with PyTorch Lightning.").parse_args()
    torch.set_num_threads(1)  # so that sums are equal on all machines of a kind
    torch.manual_seed(0)
    ahead = Lookahead(DataLoader(input_fn, global_batch_size=32), checkpoint_steps=arguments.checkpoint_every)
    checkpoints = ModelCheckpoint(
        arguments.out / "checkpoints", every_n_train_steps=arguments.checkpoint_every, save_last=True
    )
    with Appliance(), StepLog(arguments.out / "rank0.jsonl") as log:
        trainer = Trainer(
            max_steps=arguments.steps,
            callbacks=[LoaderState(ahead), checkpoints],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(ahead, log), ahead, ckpt_path="last")


if __name__ == "__main__":
    main()
