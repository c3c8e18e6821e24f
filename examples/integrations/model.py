"""Model of these examples: small, and made of parts that can be sharded and split."""

from __future__ import annotations

import torch
from integrations.data import CONTEXT
from torch import nn

__all__ = ["Block", "ByteModel", "WithLoss"]

WIDTH = 16
"""Size of the embedding of each byte of the context."""


class ByteModel(nn.Module):
    """Model that predicts the next byte from those before it. 103,168 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(CONTEXT * WIDTH) for _ in range(2))
        self.head = nn.Linear(CONTEXT * WIDTH, 256)

    def forward(self, context: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss: nats per byte, mean over the rows. context: int64, [rows, CONTEXT]; target: int64,
        [rows]."""
        hidden = self.embedding(context).flatten(1)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), target)


class Block(nn.Module):
    """Residual block, whose output is added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the block's output, float32, [rows, width]. hidden: its input, of the same shape."""
        added: torch.Tensor = self.down(nn.functional.gelu(self.up(hidden)))
        return hidden + added


class WithLoss(nn.Module):
    """Model for Hugging Face's Trainer: it is called with all values of a batch as keyword arguments, and returns its
    loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ByteModel()

    def forward(self, context: torch.Tensor, target: torch.Tensor, piece: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(context, target)}
