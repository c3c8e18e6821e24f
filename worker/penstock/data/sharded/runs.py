"""Runs of samples: several consecutive samples of a shard that a cursor returns in one call. (A training run is not
meant in this module.)

A call for each sample through each layer takes several microseconds. So a cursor may have a method `take(count)`. It
returns a `Run`: up to `count` samples, with a function that gives the saved position before each of them. A layer that
takes more samples than it uses at once, such as Packed, needs these positions for its own saved position.

Not every cursor can have `take`. The state of an iterable from user code must be taken before its next sample is read,
so its cursor has only `__next__`. The function `take` below accepts all cursors, and returns runs of one sample for
such a cursor. A cursor with `take` gets its `__next__` from RunCursor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.protocol import NOWHERE, Cursor, Origin, SavedPosition, cursor_origin

__all__ = ["Run", "RunCursor", "take", "take_with_positions"]


def _no_position(number: int) -> SavedPosition:
    raise AssertionError(f"a run without position() must have at most one sample, asked for sample {number}")


class Run(NamedTuple):
    """Several consecutive samples of a shard, as `take` returns them. They are numbered from 0."""

    samples: Iterable[Any] = ()
    """Samples, to be iterated once, before the cursor is used again. Each may be made by user code when the iteration
    reaches it. If that fails, the samples before it are valid, and the cursor must be closed."""
    size: int = 0
    """Number of samples; 0 only at the end of the shard."""
    position: Callable[[int], SavedPosition] = _no_position
    """Function from n to the saved position before sample n, for 0 < n < size. For the positions before the first and
    after the last sample, call the cursor's `saved_position` before and after `take`."""
    origins: Sequence[Origin] = ()
    """Origin of each sample; empty if no sample has one."""
    continues: Sequence[bool] = ()
    """For each sample, True if it is a piece of a Chunked that continues the piece before it; empty if none is."""
    tokens: tuple[Ints, Sequence[int]] | None = None
    """Tokens of all samples, if they are pieces of a Chunked, for layers that need no separate tensors: an int64 array
    with the tokens one after the other, and the number of tokens of each piece. None for other samples."""


class RunCursor:
    """Base class of cursors that have `take`. It is not an `abc.ABC`, because isinstance() is slower for such
    classes."""

    origin: Origin = NOWHERE
    """Origin of the sample that `next` returned last."""

    def take(self, count: int) -> Run:
        """Return the next samples: at least one unless the shard has ended, and at most `count`, which is at least
        1."""
        raise NotImplementedError

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        run = self.take(1)
        for sample in run.samples:
            self.origin = run.origins[0] if run.origins else NOWHERE
            return sample
        raise StopIteration


def take(cursor: Cursor, count: int) -> Run:
    """Return the next samples of any cursor as a run, of at most `count` samples. For a cursor without `take` the run
    has only one."""
    if isinstance(cursor, RunCursor):
        return cursor.take(count)
    for sample in cursor:
        origin = cursor_origin(cursor)
        return Run((sample,), 1, origins=() if origin is NOWHERE else (origin,))
    return Run()


def take_with_positions(cursor: Cursor, count: int) -> Run:
    """Return the next samples of any cursor as a run, of at most `count` samples. From a cursor without `take`, the
    samples are read one by one, and the saved position is taken before each. That is slow, so use this function only if
    all positions are needed."""
    if isinstance(cursor, RunCursor):
        return cursor.take(count)
    positions: list[SavedPosition] = []
    origins: list[Origin] = []
    samples: list[Any] = []
    error: Exception | None = None
    while len(samples) < count and error is None:
        before = cursor.saved_position() if samples else None
        try:
            sample = next(cursor)
        except StopIteration:
            break
        except Exception as failed:
            if not samples:
                raise
            error = failed
        else:
            samples.append(sample)
            origins.append(cursor_origin(cursor))
        positions.append(before)
    traced = any(origin is not NOWHERE for origin in origins)
    return Run(_then(samples, error), len(positions), positions.__getitem__, origins if traced else ())


def _then(samples: Sequence[Any], error: Exception | None) -> Iterator[Any]:
    """Yield samples, and then raise `error`, which the sample after them raised; None: no error."""
    yield from samples
    if error is not None:
        raise error
