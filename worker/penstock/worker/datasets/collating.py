"""The function that makes a batch of samples, called so that no mistake in it ends a pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.proto.errors import InvalidArgumentError
from penstock.worker.datasets.no_end import no_end

__all__ = ["checked_collate"]


def checked_collate(collate_fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The same function, but a StopIteration that comes out of it is a DatasetError: out of an iterator's `__next__` it
    would say that the pass is over, and the rest of the epoch would be left out in silence."""
    if not callable(collate_fn):
        raise InvalidArgumentError(
            f"collate_fn={collate_fn!r}: it is a function that makes a batch of a list of samples"
        )
    return partial(_collated, collate_fn)  # which can be sent to a process


def _collated(collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    with no_end("the collate_fn"):
        return collate_fn(samples)
