"""Runs: several consecutive samples that a cursor's method `take(count)` returns in one call, because a call for each
sample through each layer takes several microseconds. Not every cursor can: the state of an iterable from user code must
be taken before its next sample is read. The function `take` below accepts all cursors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.protocol import NOWHERE, Cursor, Origin, SavedPosition, cursor_origin


def _no_position(number: int) -> SavedPosition:
    raise AssertionError(f"a run without position() must have at most one sample, asked for sample {number}")


class Run(NamedTuple):
    samples: Iterable[Any] = ()
    """To be iterated once, before the cursor is used again. User code may make each when the iteration reaches it; if
    that fails, the samples before it are valid, and the cursor must be closed."""
    size: int = 0
    """Number of samples; 0 only at the end of the shard."""
    position: Callable[[int], SavedPosition] = _no_position
    origins: Sequence[Origin] = ()
    """Origin of each sample; empty if no sample has one."""
    continues: Sequence[bool] = ()
    """For each sample, True if it is a piece of a Chunked that continues the piece before it."""
    tokens: tuple[Ints, Sequence[int]] | None = None
    """For pieces of a Chunked: all tokens one after the other (int64), and the number of tokens of each piece."""


class RunCursor:
    """Base class of cursors that have `take`. No `abc.ABC`, because isinstance() is slower for such classes."""

    origin: Origin = NOWHERE

    def take(self, count: int) -> Run:
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
    """Return the next samples of any cursor, at most `count`; one if it has no `take`."""
    if isinstance(cursor, RunCursor):
        return cursor.take(count)
    for sample in cursor:
        origin = cursor_origin(cursor)
        return Run((sample,), 1, origins=() if origin is NOWHERE else (origin,))
    return Run()


def take_with_positions(cursor: Cursor, count: int) -> Run:
    """Return at most `count` samples of any cursor. Without `take` they are read one by one, with the saved position
    before each: slow, so only for those who need all positions."""
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
    yield from samples
    if error is not None:
        raise error
