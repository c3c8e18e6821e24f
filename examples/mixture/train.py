"""Training job: one process of this for each box. It is an ordinary PyTorch loop: read `train`.

The loss of a step is that of the global batch, whatever the number of boxes: the mean over all tokens of all boxes.
"""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from mixture.data import LENGTH, VOCABULARY, WEIGHTS, Weights, digests, input_fn
from torch import nn

from penstock.client import Appliance, DataExecutor, DataLoader, checkpoint_closure
from penstock.client.checkpoint import AsyncCheckpointer

GLOBAL_BATCH = 20
WIDTH, HEADS, LAYERS = 64, 4, 2


class Block(nn.Module):
    """Transformer block whose attention stays within a segment (a document or part of one in a packed line)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the block's output, float32, [rows, LENGTH, WIDTH]. hidden: its input, of the same shape. mask: bool,
        [rows, 1, LENGTH, LENGTH]."""
        parts = self.heads(self.norms[0](hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        updated: torch.Tensor = hidden + self.mlp(self.norms[1](hidden))
        return updated


class ByteModel(nn.Module):
    """Transformer that predicts the next byte of each packed document from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of the next byte at each position: float32, [rows, LENGTH, VOCABULARY]."""
        segments = batch["segments"]
        same = (segments[:, :, None] == segments[:, None, :]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        hidden = self.bytes(batch["tokens"]) + self.places(batch["positions"])
        for block in self.blocks:
            hidden = block(hidden, same[:, None])
        logits: torch.Tensor = self.head(hidden)
        return logits


def train(steps: int, checkpoint_every: int, out: Path, weights: Weights) -> None:
    """Train up to step `steps`, from the newest checkpoint if there is one.

    weights: weights of the sources by step. A resumed run may have other weights from a later step on.
    """
    torch.manual_seed(0)
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(input_fn, global_batch=GLOBAL_BATCH, weights=weights)
    state = {"model": model, "optimizer": optimizer, "loader": loader}

    @checkpoint_closure
    def save() -> None:
        checkpointer.save(executor.step, state)

    log_file = out / f"box{dist.get_rank()}.jsonl"
    with AsyncCheckpointer(out / "checkpoints") as checkpointer, Appliance(), log_file.open("w", buffering=1) as log:
        done = checkpointer.restore(state) or 0
        executor = DataExecutor(loader, num_steps=steps - done, checkpoint_steps=checkpoint_every)
        for batch in executor:
            optimizer.zero_grad()
            loss = backward(model, batch)
            optimizer.step()
            note(log, executor, batch, loss)
            save()


def backward(model: ByteModel, batch: dict[str, torch.Tensor]) -> float:
    """Compute the loss of the global batch and its gradients, summed over all boxes; return the loss."""
    predicted = (batch["labels"] >= 0).sum()
    dist.all_reduce(predicted)
    summed = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    loss = summed / predicted
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    together = torch.cat([loss.detach()[None], *(gradient.flatten() for gradient in gradients)])
    dist.all_reduce(together)
    at = 1
    for gradient in gradients:
        gradient.copy_(together[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()
    return float(together[0])


def note(log: TextIO, executor: DataExecutor, batch: dict[str, Any], loss: float) -> None:
    """Write one line for a step to the log, for demo.py, which compares runs: the rows, the loss, and the counts so
    far."""
    rows = digests(batch)
    counts = {name: [found.samples, found.tokens] for name, found in executor.stats.sources.items()}
    log.write(json.dumps({"step": executor.step, "rows": rows, "loss": loss, "counts": counts}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model of three sources of text.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--checkpoint-every", type=int, default=40, metavar="STEPS")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and logs")
    parser.add_argument(
        "--then",
        metavar="STEP:NAME=WEIGHT,...",
        help="weights of the sources after this step, such as 60:code=1,help=2",
    )
    options = parser.parse_args()
    weights = dict(WEIGHTS)
    if options.then:
        step, _, parts = options.then.partition(":")
        weights[int(step)] = {name: float(weight) for name, weight in (part.split("=") for part in parts.split(","))}
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # one core a box
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(options.steps, options.checkpoint_every, options.out, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
