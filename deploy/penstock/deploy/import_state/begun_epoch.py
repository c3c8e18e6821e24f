"""Epoch that another library began, as row numbers: the rows that were delivered, and those that come next.

The other library's order differs from Penstock's. So the order itself is imported: the delivered rows, and then the
other rows in the order in which that library would have delivered them. All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.proto.errors import InvalidArgumentError, StateMismatchError

__all__ = ["BegunEpoch", "ImportedEpoch", "imported", "whole_steps"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BegunEpoch:
    """Epoch that another library began, with the rows in the order in which that library delivers them."""

    epoch: int
    """Number of the epoch, from 0."""
    order: Ints
    """Row numbers in the order of delivery; int64, shape (n,). Rows may be missing (drop_last) or repeated (padded
    batch)."""
    delivered: int
    """Number of rows at the beginning of `order` that were delivered."""
    step: int
    """Number of steps since the beginning of the first epoch."""


@dataclass(frozen=True)
class ImportedEpoch:
    """Epoch for Penstock, made from one that another library began. It has each row once."""

    epoch: int
    order: Ints
    """Numbers of all rows, the delivered ones first; int64, shape (rows,)."""
    seen: int
    """Number of rows at the beginning of `order` that were delivered."""
    step: int
    """Number of steps since the beginning of the first epoch."""


def imported(begun: BegunEpoch, rows: int) -> ImportedEpoch:
    """Return another library's epoch as an epoch with each of the dataset's `rows` rows once, the delivered rows first:
    a second delivery of a row is left out, and rows that the other library leaves out come at the end.

    Raises StateMismatchError if the epoch has rows that the dataset lacks, InvalidArgumentError if `rows` is below 1.
    """
    order = begun.order
    if rows < 1:
        raise InvalidArgumentError(f"--rows must be at least 1, got {rows}. Pass the number of rows of the dataset")
    if len(order) and not 0 <= order.min() <= order.max() < rows:
        raise StateMismatchError(
            f"the dataset must have at least {order.max() + 1} rows, as the state was saved with, got {rows}. Pass the "
            "number of rows of that dataset"
        )
    _, first = np.unique(order, return_index=True)
    first.sort()
    once = order[first]
    rest = np.setdiff1d(np.arange(rows, dtype=np.int64), once, assume_unique=True)
    seen = int(np.searchsorted(first, begun.delivered))
    return ImportedEpoch(begun.epoch, np.concatenate([once, rest]), seen, begun.step)


def whole_steps(delivered: int, batch: int, length: int | None = None) -> int:
    """Return the number of steps in which `delivered` rows were delivered.

    Args:
        delivered: number of rows.
        batch: number of rows of a step, of all ranks together.
        length: number of rows of the epoch, if the epoch ends with a step of its own, which may have fewer rows than
            `batch`; None: a step may have the last rows of one epoch and the first rows of the next.

    Raises StateMismatchError if these rows end in the middle of a step.
    """
    if batch < 1:
        raise InvalidArgumentError(
            f"--batch-size must be at least 1, got {batch}. Pass the number of rows of a step, over all ranks"
        )
    if delivered % batch and (length is None or delivered < length):
        raise StateMismatchError(
            f"the number of delivered rows must be a multiple of {batch}, the rows of a step, got {delivered}. Pass "
            "the right --batch-size (over all ranks), or a state that was saved between two steps"
        )
    return -(-delivered // batch)
