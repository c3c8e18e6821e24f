"""A StopIteration that comes out of a user's function is no end.

Functions that call `next` on something that is empty raise it, and in the middle of an iterator it would look like the
end of the data: the rest of a shard, or of an epoch, would be left out without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.proto.errors import DatasetError

__all__ = ["no_end", "not_an_end"]


def not_an_end(what: str) -> DatasetError:
    """What is raised in its place; `what` it came out of."""
    return DatasetError(
        f"StopIteration came out of {what}, where it would look like the end of the data. Was next() called on "
        "something that is empty?"
    )


@contextmanager
def no_end(what: str) -> Iterator[None]:
    """Around a user's function. Raises DatasetError for a StopIteration."""
    try:
        yield
    except StopIteration as error:
        raise not_an_end(what) from error
