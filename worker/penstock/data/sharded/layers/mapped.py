"""Layers that call a function for each sample: to convert it, or to decide whether to leave it out. A `Mapped` skips
without calling it (`_EachCursor`). `Filtered`, and a `Mapped` with `skip_failures`, call it for every sample to know
which count (`_SomeCursor`). Randomness is keyed by the sample's position, so it is the same in any worker."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.data.arguments import whole
from penstock.data.ordering.permutation import mix
from penstock.data.sharded.layers.layer import Layer, SearchLimit, entered, title
from penstock.data.sharded.layers.left_out import opened
from penstock.data.sharded.protocol import (
    Cursor,
    KnownRecords,
    Origin,
    PositionOf,
    SavedPosition,
    ShardedSource,
    cursor_origin,
    known_records,
)
from penstock.data.sharded.runs import Run, RunCursor, take
from penstock.data.stop_iteration import stop_iteration_error
from penstock.proto.errors import InvalidArgumentError, SampleCorruptError
from penstock.proto.state.generators import derive_seed

_Function = Callable[..., Any]
_Decision = Callable[[Any, int], tuple[bool, Any]]


class SkipSample(Exception):
    """Raised by the function of a `Mapped(..., skip_failures=n)` to leave a sample out, which is no failure."""


class _PerSample(Layer):
    def __init__(self, source: ShardedSource, function: _Function, random: bool, name: str | None) -> None:
        super().__init__(source)
        if not callable(function):
            raise InvalidArgumentError(f"{type(self).__name__} needs a function, got {function!r}")
        self._function, self._random, self._name = function, bool(random), title(function, name)

    def settings(self) -> dict[str, Any]:
        return {"function": self._name, "random": self._random}

    def _is_random(self) -> bool:
        return self._random

    def _call(self, shard: int, epoch: int, seed: int) -> _Call:
        kind = type(self).__name__
        key = derive_seed(seed, kind.lower(), self.depth, epoch, shard) if self._random else None
        return _Call(self._function, key, f"{kind} {self._name}: shard {shard}, epoch {epoch}, sample")


class Mapped(_PerSample):
    """Layer that converts each sample of a source by a function.

    Mapped(LogicalShards([LineFile(path) for path in paths], shards=240), tokenize)
    """

    keyed = property(_PerSample._is_random)

    def __init__(
        self,
        source: ShardedSource,
        fn: _Function,
        *,
        random: bool = False,
        name: str | None = None,
        skip_failures: int = 0,
    ) -> None:
        """
        Args:
            source: source whose samples are converted.
            fn: function from a sample to a sample. Its exceptions are raised unchanged, with a note that names the
                sample; only a StopIteration becomes a DatasetError.
            random: True: call fn(sample, generator), with a numpy Generator that depends only on the seed, the epoch,
                the shard and the index. With any other generator a resume gives other samples.
            name: name of the function in a saved state; None: its qualified name. Change it when the function changes.
            skip_failures: most samples in a row for which fn may raise an exception. Such a sample is left out with a
                warning, or without one if fn raises SkipSample. Above 0, lengths are unknown, and fn is also called for
                skipped samples, as in a resume. If failures are not reproducible, the order after a resume is not
                either.
        """
        super().__init__(source, fn, random, name)
        self._skip_failures = whole("skip_failures", skip_failures)
        if self._skip_failures < 0:
            raise InvalidArgumentError(f"skip_failures must be at least 0, got {skip_failures}")

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "skip_failures": self._skip_failures}

    @property
    def one_to_one(self) -> bool:
        return not self._skip_failures

    def lengths(self, epoch: int) -> Sequence[int] | None:
        return None if self._skip_failures else self.source.lengths(epoch)

    def known_records(self) -> KnownRecords | None:
        return None if self._skip_failures else known_records(self.source)

    def open(
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        call = self._call(shard, epoch, seed)
        (index,), inner = entered(saved, "Mapped", "index")
        if not self._skip_failures:
            return _EachCursor(opened(self.source, shard, epoch, seed, inner, position_of), call, index)
        limit = SearchLimit(self.source, f"Mapped {self._name}", shard)
        return _SomeCursor(
            opened(self.source, shard, epoch, seed, inner), _Tolerant(call, self._skip_failures), index, limit
        )


class Filtered(_PerSample):
    """Layer that keeps the samples of a source for which a predicate is true."""

    keyed = property(_PerSample._is_random)

    def __init__(
        self, source: ShardedSource, predicate: _Function, *, random: bool = False, name: str | None = None
    ) -> None:
        """
        Args:
            source: source whose samples are filtered.
            predicate: function from a sample to True if the sample stays.
            random: True: call predicate(sample, generator), as in `Mapped`.
            name: name of the predicate in a saved state; None: its qualified name.
        """
        super().__init__(source, predicate, random, name)

    def open(
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        call = self._call(shard, epoch, seed)
        (index,), inner = entered(saved, "Filtered", "index")

        def taken(sample: Any, index: int) -> tuple[bool, Any]:
            return bool(call(sample, index)), sample

        limit = SearchLimit(self.source, f"Filtered {self._name}", shard)
        return _SomeCursor(opened(self.source, shard, epoch, seed, inner), taken, index, limit)


class _Call:
    def __init__(self, function: _Function, key: int | None, where: str) -> None:
        self._function, self._key, self.where = function, key, where

    def __call__(self, sample: Any, index: int) -> Any:
        try:
            if self._key is None:
                return self._function(sample)
            # A new generator for each sample instead of one that is seeded again: the function may keep it.
            return self._function(sample, np.random.Generator(np.random.PCG64(int(mix(self._key, index)))))
        except StopIteration as error:
            raise stop_iteration_error(f"{self.where} {index}") from error
        except Exception as error:
            error.add_note(f"{self.where} {index}")
            raise


class _Tolerant:
    def __init__(self, call: _Call, most: int) -> None:
        self._call, self._most, self._failed = call, most, 0

    def __call__(self, sample: Any, index: int) -> tuple[bool, Any]:
        try:
            value = self._call(sample, index)
        except SkipSample:
            self._failed = 0
            return False, None
        except Exception as error:
            self._failed += 1
            if self._failed > self._most:
                raise
            warnings.warn(f"{self._call.where} {index} is left out: {type(error).__name__}: {error}", stacklevel=4)
            return False, None
        self._failed = 0
        return True, value


def without_errors(cursor: Cursor, most: int, index: int, limit: SearchLimit, where: str) -> Cursor:
    """Return a cursor that leaves out what a tolerant RangeCursor could not decode: at most `most` samples in a row."""

    def checked(sample: Any) -> Any:
        if isinstance(sample, SampleCorruptError):
            raise sample
        return sample

    return _SomeCursor(cursor, _Tolerant(_Call(checked, None, where), most), index, limit)


class _EachCursor(RunCursor):
    def __init__(self, inner: Cursor, call: _Call, index: int) -> None:
        self._inner, self._call, self._index = inner, call, index

    def __next__(self) -> Any:  # as `take(1)`, in half of its time
        for sample in self._inner:
            self.origin = cursor_origin(self._inner)
            self._index += 1
            return self._converted(sample, self._index - 1)
        raise StopIteration

    def take(self, count: int) -> Run:
        run = take(self._inner, count)
        first, position = self._index, run.position
        self._index += run.size
        return Run(
            map(self._converted, run.samples, itertools.count(first)),
            run.size,
            lambda number: {"index": first + number, "source": position(number)},
            run.origins,
        )

    def _converted(self, sample: Any, index: int) -> Any:
        try:
            return self._call(sample, index)
        except SkipSample as error:
            raise InvalidArgumentError(
                f"{self._call.where} {index} raised SkipSample. Set skip_failures to 1 or more, or use Filtered"
            ) from error

    def skip(self, count: int) -> int:
        passed = self._inner.skip(count)
        self._index += passed
        return passed

    def saved_position(self) -> SavedPosition:
        return {"index": self._index, "source": self._inner.saved_position()}

    def close(self) -> None:
        self._inner.close()


class _SomeCursor(Iterator[Any]):
    def __init__(self, inner: Cursor, taken: _Decision, index: int, limit: SearchLimit) -> None:
        self._inner, self._taken, self._limit = inner, taken, limit
        self._left_out: dict[str, int] = {}
        """By source: samples that were left out just before the one that was yielded last."""
        self._index = index

    def __next__(self) -> Any:
        self._left_out = {}
        for sample in self._inner:
            self._index += 1
            taken, value = self._taken(sample, self._index - 1)
            if taken:
                self._limit.yielded()
                return value
            self._limit.left_out()
            self._left_out = cursor_origin(self._inner).leaving_out(self._left_out)
        raise StopIteration

    @property
    def origin(self) -> Origin:
        return cursor_origin(self._inner).after(self._left_out)

    def skip(self, count: int) -> int:
        return sum(1 for _ in zip(range(count), self, strict=False))

    def saved_position(self) -> SavedPosition:
        return {"index": self._index, "source": self._inner.saved_position()}

    def close(self) -> None:
        self._inner.close()
