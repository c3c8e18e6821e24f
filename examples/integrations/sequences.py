"""Input of the examples for language models: short pieces of Python's own source text, a byte a token.

The module imports no framework, because workers import it.
"""

from __future__ import annotations

import argparse as text
from pathlib import Path
from typing import Any

import torch

from penstock.data import MapLoader

__all__ = ["PIECES", "SEQUENCE", "Sequences", "input_fn", "sft_input_fn"]

SEQUENCE = 16
"""Number of tokens in a sample."""
PIECES = 512
"""Number of samples in an epoch."""


class Sequences(torch.utils.data.Dataset[dict[str, Any]]):
    """Pieces of the first part of a module of the standard library, with what Megatron's GPT takes."""

    def __init__(self) -> None:
        self.bytes = torch.frombuffer(bytearray(Path(text.__file__).read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return PIECES

    def __getitem__(self, number: int) -> dict[str, Any]:
        piece = self.bytes[number * SEQUENCE : (number + 1) * SEQUENCE + 1]
        return {
            "tokens": piece[:-1],
            "labels": piece[1:],
            "loss_mask": torch.ones(SEQUENCE),
            "position_ids": torch.arange(SEQUENCE),
            "piece": number,
        }


def input_fn(global_batch_size: int) -> MapLoader:
    """Return the loader; Penstock calls this in each worker. Boxes share the rows of a global batch. A box's batch is a
    dict of

    tokens, labels, position_ids: int64, [rows, SEQUENCE]; loss_mask: float32, [rows, SEQUENCE]; piece: int64, [rows],
    the pieces' numbers.
    """
    return MapLoader(Sequences(), global_batch_size=global_batch_size, shuffle=True, tail="drop")


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Pieces of text with the inputs of Hugging Face's models, which shift the labels themselves."""

    def __init__(self) -> None:
        self.sequences = Sequences()

    def __len__(self) -> int:
        return PIECES

    def __getitem__(self, number: int) -> dict[str, Any]:
        tokens = self.sequences[number]["tokens"]
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens), "piece": number}


def sft_input_fn(global_batch_size: int) -> MapLoader:
    """Return the loader of batches of input_ids, labels, attention_mask: int64, [rows, SEQUENCE]; piece: int64,
    [rows]."""
    return MapLoader(Texts(), global_batch_size=global_batch_size, shuffle=True, tail="drop")
