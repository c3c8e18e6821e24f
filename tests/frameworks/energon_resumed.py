"""A job's loader of Energon, and the function that `penstock import-state --loader` calls; runs where Energon is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    stateless,
)


@stateless  # type: ignore[untyped-decorator]
def cook(sample: Any) -> Any:
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    cookers = (Cooker(cook),)


def loader(rank: int, ranks: int, *, tars: str, workers: int, buffer: int, every: int, steps: int | None = None) -> Any:
    """The loader of a rank. `every`: samples between checkpoints of a worker; 0: Energon's own."""
    data = get_train_dataset(
        tars,
        batch_size=4,
        shuffle_buffer_size=buffer,
        max_samples_per_sequence=5,
        worker_config=WorkerConfig(rank=rank, world_size=ranks, num_workers=workers),
        task_encoder=Encoder(),
    )
    often = {"checkpoint_every_sec": 0, "checkpoint_every_min_n_samples": every} if every else {}
    return get_savable_loader(data, **often)


def resumed(state: str, rank: int, ranks: int) -> Any:
    arguments = json.loads(Path(state).with_name(f"arguments-{rank}.json").read_text())
    made = loader(rank, ranks, **arguments)
    made.restore_state_rank(torch.load(state, weights_only=False))
    return made
