"""Runs of consecutive samples, which cursors hand out in one call.

A call for each sample through each layer takes several microseconds. So a cursor may have a method `take(count)` that
returns a run: up to `count` samples, with a function that gives the saved position before each of them. A layer that
takes more samples than it uses at once, such as Packed, needs these positions for its own saved position.

A cursor can only have `take` if the positions between its samples are known after the samples were read. A stream of
user code has to be asked before each sample, so its cursor has `__next__` alone, and the function `take` makes runs of
one sample of it. A cursor that has `take` gets its `__next__` from RunCursor.
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
    """Consecutive samples of a shard."""

    samples: Iterable[Any] = ()
    """Samples, to be iterated once, before the cursor is used again. User code may run for each of them; if that
    fails, the samples before are valid, and the cursor must be closed."""
    size: int = 0
    """Number of samples; 0 only at the end of the shard."""
    position: Callable[[int], SavedPosition] = _no_position
    """Function from n to the saved position before sample n, for 0 < n < size. The positions before the first sample
    and after the last one are those of the cursor before and after the call of `take`."""
    origins: Sequence[Origin] = ()
    """Origin of each sample; empty if all are NOWHERE."""
    continues: Sequence[bool] = ()
    """For each sample True if it is a piece of a Chunked that continues the document of the piece before; empty if none
    does."""
    tokens: tuple[Ints, Sequence[int]] | None = None
    """Samples once more, if they are pieces of a Chunked: an int64 array with all of them one after the other, and
    their sizes. None for other samples."""


class RunCursor:
    """Base class of cursors that have `take`. Not an abstract class, because isinstance() of one takes longer."""

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
    """Return the next samples of any cursor, as RunCursor.take does."""
    if isinstance(cursor, RunCursor):
        return cursor.take(count)
    for sample in cursor:
        origin = cursor_origin(cursor)
        return Run((sample,), 1, origins=() if origin is NOWHERE else (origin,))
    return Run()


def take_with_positions(cursor: Cursor, count: int) -> Run:
    """Return the next samples of any cursor as a run of more than one. For a cursor without `take` a position is saved
    before each sample, so this is for callers that need all positions."""
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
    """Yield samples, and raise the error of the sample after them, if there is one."""
    yield from samples
    if error is not None:
        raise error
