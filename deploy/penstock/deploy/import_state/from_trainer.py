"""Position of the Hugging Face Trainer: its checkpoint has the number of steps, and the order follows from the seed.

The Trainer's sampler is accelerate's SeedableRandomSampler: torch's permutation by a generator whose seed is that of
the run (data_seed, else seed) plus the epoch. A step takes the next batches of that order, and which rank takes which
does not matter. A step of Penstock is one batch of each rank; with gradient accumulation a step of the Trainer is
several.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.deploy.import_state.begun_epoch import BegunEpoch
from penstock.deploy.import_state.foreign_files import count, foreign_state
from penstock.proto.errors import InvalidArgumentError, StateCorruptError, StateMismatchError

__all__ = ["SEED", "trainer_epoch"]

SEED = 42
"""Default seed of transformers' TrainingArguments."""
FILE = "trainer_state.json"
TOLERANCE = 1e-6
"""Largest difference of two values of the Trainer's `epoch`, a fraction, that count as equal."""


def trainer_epoch(path: Path, rows: int, *, seed: int, ranks: int, accumulation: int, drop_last: bool) -> BegunEpoch:
    """Return the epoch that a checkpoint of the Trainer is in.

    Args:
        path: the checkpoint's folder, or trainer_state.json in it.
        rows: number of rows of the dataset.
        seed: seed of the Trainer's shuffle.
        ranks: number of processes.
        accumulation: number of batches of each rank in a step of the Trainer.
        drop_last: True if the Trainer leaves out an incomplete last batch.

    Raises StateMismatchError if the checkpoint's epoch does not follow from the other arguments.
    """
    import torch

    file = path / FILE if path.is_dir() else path
    state = foreign_state(file, "the Trainer", {"global_step", "epoch", "train_batch_size"})
    steps, epoch = count(file, state, "global_step"), state["epoch"]
    if state["train_batch_size"] is None:
        raise StateMismatchError(
            f"{file}: train_batch_size must be a number, got null, because another version of transformers wrote "
            "it. Put the number of rows of one rank's batch in its place"
        )
    own = count(file, state, "train_batch_size")
    if not isinstance(epoch, int | float):
        raise StateCorruptError(f"{file}: epoch must be a number, got {epoch!r:.100}. Pass an older checkpoint")
    if min(own, ranks, accumulation, rows) < 1:
        raise InvalidArgumentError(
            f"--rows, train_batch_size, --ranks and --accumulation must be at least 1, got {rows}, {own}, {ranks} and "
            f"{accumulation}. Correct these values"
        )
    batch = own * ranks
    batches = rows // batch if drop_last else -(-rows // batch)
    """Number of batches of each rank in an epoch."""
    updates = max(1, -(-batches // accumulation))
    number, within = divmod(steps, updates)
    within *= accumulation
    if batches < 1:
        raise StateMismatchError(
            f"--rows must be at least {batch}, a batch of {own} on each of {ranks} ranks, because --drop-last leaves "
            f"out an incomplete batch, got {rows}. Pass the dataset's --rows and the --ranks of that run, or omit "
            "--drop-last"
        )
    if abs(number + within / batches - epoch) > TOLERANCE:
        raise StateMismatchError(
            "--rows, --ranks, --accumulation and --drop-last must be those of the saved run, which was at epoch "
            f"{epoch:g} after step {steps} ({file}), got values by which step {steps} is at epoch "
            f"{number + within / batches:g}: {rows} rows, batches of {own} on {ranks} ranks, {accumulation} batches a "
            "step. Correct these options"
        )
    generator = torch.Generator()
    generator.manual_seed(seed + number)
    order = np.asarray(torch.randperm(rows, generator=generator).numpy(), np.int64)
    return BegunEpoch(number, order, min(within * batch, rows), number * batches + within)
