"""Number of steps of a training, computed from the user's limits on steps and epochs."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from penstock.client.stream.checkpoint_schedule import checked_int
from penstock.proto.errors import InvalidArgumentError

__all__ = ["compute_num_steps"]


def compute_num_steps(
    dataloader: Any,
    initial_step: int = 0,
    num_steps: int | None = None,
    max_steps: int | None = None,
    num_epochs: int | None = None,
    steps_per_epoch: int | None = None,
    grad_accum_steps: int = 1,
) -> int:
    """Return the number of steps that training still has to take: the smallest number that num_steps, max_steps and
    num_epochs allow.

    Args:
        dataloader: loader; its len(), if it has one, is the number of batches of an epoch.
        initial_step: number of steps already taken, from which training resumes.
        num_steps: number of steps to take after initial_step; None: no limit. Not allowed together with num_epochs.
        max_steps: total number of steps, including those before initial_step; None: no limit.
        num_epochs: number of epochs to take after initial_step; None: no limit. Needs the dataloader's len().
        steps_per_epoch: number of batches (not steps) to use of an epoch, at most len(); None: len(). Ignored if the
            dataloader has no len().
        grad_accum_steps: number of batches in one step, whose gradients are accumulated. An epoch has
            steps_per_epoch // grad_accum_steps steps. num_steps and max_steps count steps, not batches.

    Raises:
        InvalidArgumentError: num_steps, max_steps and num_epochs are all None; a value is too small; max_steps are
            taken already; or values contradict each other or the dataloader's len().
        TypeError: a value is not an int.
    """
    if num_epochs is not None and num_steps is not None:
        raise InvalidArgumentError(
            f"only one of num_steps and num_epochs can be given, got {num_steps} and {num_epochs}: pass one of them"
        )
    if num_steps is None and num_epochs is None and max_steps is None:
        raise InvalidArgumentError("num_steps, max_steps or num_epochs must be given, got none: pass one of them")
    start = checked_int("initial_step", initial_step, least=0)
    accumulated = checked_int("grad_accum_steps", grad_accum_steps)
    bounds = []
    if num_steps is not None:
        bounds.append(checked_int("num_steps", num_steps))
    if max_steps is not None:
        bounds.append(checked_int("max_steps", max_steps) - start)
        if bounds[-1] < 1:
            raise InvalidArgumentError(
                f"initial_step must be below max_steps={max_steps}, got {start}: the training is complete. Raise "
                "max_steps to continue"
            )
    epochs = None if num_epochs is None else checked_int("num_epochs", num_epochs)
    wanted = None if steps_per_epoch is None else checked_int("steps_per_epoch", steps_per_epoch)
    length = _length(dataloader)
    if length is None and epochs is not None:
        raise InvalidArgumentError(
            f"num_epochs needs a dataloader with a len(), got a {type(dataloader).__qualname__} without a len(): pass "
            "num_steps or max_steps instead"
        )
    if length is not None:
        per_epoch = _per_epoch(length, wanted, accumulated)
        if epochs is not None:
            bounds.append(epochs * per_epoch)
    return min(bounds)


def _per_epoch(length: int, wanted: int | None, accumulated: int) -> int:
    """Return the number of steps in an epoch of `length` batches, each step taking `accumulated` of them. `wanted`:
    number of batches to use of each epoch; None: all."""
    if length < 1:
        raise InvalidArgumentError(f"len() of the dataloader must be >= 1, got {length}: check the dataset's path")
    if wanted is not None and wanted > length:
        raise InvalidArgumentError(
            f"steps_per_epoch must be at most the {length} batches of an epoch, got {wanted}: pass a smaller number"
        )
    batches = length if wanted is None else wanted
    if accumulated > batches:
        raise InvalidArgumentError(
            f"grad_accum_steps must be at most the {batches} batches that are used of an epoch, got {accumulated}: "
            f"pass a smaller number{'' if wanted is None else ', or raise steps_per_epoch'}"
        )
    return batches // accumulated


def _length(dataloader: Sized) -> int | None:
    try:
        return len(dataloader)
    except TypeError:
        return None
