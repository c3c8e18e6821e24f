"""An epoch that another library began, as row numbers: which rows it delivered, and which come next. Pure functions.

The other library's order differs from ours. So what is imported is the order itself: the rows that were delivered, then
the others as that library would have delivered them. Positions in it are exact, whatever library made it.
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
    """An epoch as its library delivers it."""

    epoch: int
    """Number of the epoch, from 0."""
    order: Ints
    """Rows in the order of delivery. Rows may be missing, as with drop_last, or come twice, as in a padded batch."""
    delivered: int
    """Number of rows, from the beginning of `order`, that were delivered."""
    step: int
    """Steps since the beginning of the first epoch."""


@dataclass(frozen=True)
class ImportedEpoch:
    """An epoch in which each row comes once."""

    epoch: int
    order: Ints
    """All rows: those that were delivered, then the others."""
    seen: int
    """Number of rows that were delivered."""
    step: int
    """Steps since the beginning of the first epoch."""


def imported(begun: BegunEpoch, rows: int) -> ImportedEpoch:
    """Return an epoch of a dataset of `rows` rows, in which each row comes once: a second delivery of a row is left
    out, and rows that the other library leaves out come at the end.

    Raises StateMismatchError if the epoch has rows that the dataset lacks.
    """
    order = begun.order
    if rows < 1:
        raise InvalidArgumentError(f"rows must be at least 1, got {rows}")
    if len(order) and not 0 <= order.min() <= order.max() < rows:
        raise StateMismatchError(
            f"the state is of a dataset with at least {order.max() + 1} rows, but the dataset has {rows}: pass the "
            "dataset that the state was saved with"
        )
    _, first = np.unique(order, return_index=True)
    first.sort()
    once = order[first]
    rest = np.setdiff1d(np.arange(rows, dtype=np.int64), once, assume_unique=True)
    seen = int(np.searchsorted(first, begun.delivered))
    return ImportedEpoch(begun.epoch, np.concatenate([once, rest]), seen, begun.step)


def whole_steps(delivered: int, batch: int, length: int | None = None) -> int:
    """Return the number of steps in which `delivered` rows come.

    Args:
        batch: rows of a step, of all ranks together.
        length: rows of an epoch whose last step may have fewer; None: steps do not end with epochs.

    Raises StateMismatchError if these rows end within a step.
    """
    if batch < 1:
        raise InvalidArgumentError(f"--batch-size must be at least 1, got {batch}")
    if delivered % batch and (length is None or delivered < length):
        raise StateMismatchError(
            f"the state lies within a step: {delivered} rows were delivered, which is no multiple of {batch}, the rows "
            "of a step. Pass the right --batch-size (of all ranks together), or a state that was saved between two "
            "steps"
        )
    return -(-delivered // batch)
