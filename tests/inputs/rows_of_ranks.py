"""A module of Lightning that says which rows its rank got. In a file of its own, because spawned ranks import it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from spawned_ranks import say


class RowsOfRank(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.rows: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.rows.append(int(batch["number"]))
        loss: torch.Tensor = self.weight * batch["x"].float().mean()
        return loss

    def on_train_end(self) -> None:
        say(self.global_rank, self.rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)
