"""Trainings by Lightning, which takes seconds to import: tests import this module when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from reading_ahead import PASS, place_of

from penstock.client import Appliance, DataLoader, Lookahead
from penstock.client.integrations.lightning import LoaderState

__all__ = ["Module", "Takes", "fit"]


class Module(LightningModule):
    """Takes note of the batches, and of where the states stand that are had after each."""

    def __init__(self, ahead: Lookahead, loader: DataLoader) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.ahead, self.loader = ahead, loader
        self.numbers: list[int] = []
        self.exact: dict[int, Any] = {}
        self.naive: dict[int, Any] = {}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.numbers.append(int(batch["number"]))
        loss: torch.Tensor = self.weight * batch["x"].float().mean()
        return loss

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.exact[self.ahead.step] = place_of(self.ahead.state_dict())
        self.naive[self.ahead.step] = place_of(self.loader.state_dict())[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Takes(Module):
    """Takes its batches itself, two for each step."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        for _ in range(2):
            batch, number, _ = next(dataloader_iter)
            self.ahead.took()
            loss = super().training_step(batch, number)
        return loss


def fit(
    appliance: Appliance,
    input_fn: Any,
    folder: Path,
    checkpoint: Path | None = None,
    kind: type[Module] = Module,
    **limits: Any,
) -> tuple[Module, Trainer]:
    loader = DataLoader(input_fn, PASS // 2)
    ahead = Lookahead(loader, appliance=appliance)
    module = kind(ahead, loader)
    every = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False)
    ends = ModelCheckpoint(folder, "end-{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = Trainer(
        **limits,
        callbacks=[LoaderState(ahead), *([] if checkpoint else [every, ends])],
        enable_checkpointing=checkpoint is None,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ahead, ckpt_path=checkpoint)
    loader.close()
    return module, trainer
