"""Conversion of StopIteration into another error, if a user's function raises it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.proto.errors import DatasetError


def stop_iteration_error(what: str) -> DatasetError:
    return DatasetError(
        f"a StopIteration must not come out of {what}, where it would look like the end of the data. Call next() only "
        "on iterators that are not empty, or as next(iterator, default)"
    )


@contextmanager
def forbid_stop_iteration(what: str) -> Iterator[None]:
    """Raise DatasetError in place of a StopIteration of the user's function that `what` names."""
    try:
        yield
    except StopIteration as error:
        raise stop_iteration_error(what) from error
