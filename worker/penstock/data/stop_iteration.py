"""Conversion of a StopIteration that a user's function raises into an error.

A function that calls `next` on an empty iterator raises StopIteration. Inside another iterator this looks like the end
of the data, and the rest of a shard or an epoch would silently be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.proto.errors import DatasetError

__all__ = ["forbid_stop_iteration", "stop_iteration_error"]


def stop_iteration_error(what: str) -> DatasetError:
    """Return the error to raise instead of a StopIteration. `what`: the function that raised it."""
    return DatasetError(
        f"StopIteration came out of {what}, where it would look like the end of the data: call next() only on "
        "iterators that are not empty, or pass it a default"
    )


@contextmanager
def forbid_stop_iteration(what: str) -> Iterator[None]:
    """Raise DatasetError for a StopIteration that a user's function raises."""
    try:
        yield
    except StopIteration as error:
        raise stop_iteration_error(what) from error
