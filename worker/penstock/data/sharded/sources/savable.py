"""Source made from a user's iterables: each shard is one stream (opaque.py), which cannot be split. So more workers
than streams do not make reading faster, and skipping samples means reading them."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from typing import Any

from penstock.data.arguments import at_least_one
from penstock.data.sharded.protocol import PositionOf, SavedPosition
from penstock.data.sharded.sources.opaque import (
    BEGINNING,
    SNAPSHOT_EVERY,
    SNAPSHOT_S,
    OpaqueStream,
    SampleDigests,
    StreamMark,
)
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateCorruptError, StateMismatchError
from penstock.proto.state.generators import derive_seed

__all__ = ["GarbageCollection", "Savable"]


class Savable:
    """Source made from the iterables that `make(shard)` returns. Each is a stream, one logical shard, whose position
    can be saved after any sample.

        Repeated(Savable(lambda shard: open_records(f"part-{shard}"), shards=16))

    `make(shard)` returns an iterable: for example a dataset or loader with `state_dict` and `load_state_dict`
    (torchdata's StatefulDataLoader), the root node of a torchdata.nodes graph, or a generator. It is called for each
    epoch and each resume, and must return a new object each time, which yields the same samples in the same epoch.

    A stream resumes from its newest saved state, or without one from its beginning, and reads the samples since then
    again. They are compared with those that were delivered.

    While a stream's code runs, the generators of `random`, `numpy.random` and `torch` have states of the stream, seeded
    by the source's seed, the shard and the epoch. So the code needs no seed of its own, and the drawn numbers do not
    depend on other streams; a source that is in a Mixture twice draws different numbers. Threads that a stream starts
    draw from the generators of the stream that runs at that time.

    Without Repeated, each worker reads all streams, and skips the rows of other workers. With Repeated, each worker
    reads only streams of its own, if the numbers divide (see ShardLoader).
    """

    endless = False

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        shards: int,
        snapshot_every: int = SNAPSHOT_EVERY,
        snapshot_s: float = SNAPSHOT_S,
        capture_rng: bool = True,
        batch_rows: int | None = None,
        collect_every: int | None = None,
        config: Any = None,
    ) -> None:
        """
        Args:
            make: function from a shard's number to an iterable.
            shards: number of streams.
            snapshot_every, snapshot_s: number of samples, and of seconds, after which a stream's state is saved again,
                whichever comes first, to limit how much a resume reads again; less often if it took more than 1% of the
                time.
            capture_rng: True: give the process's random generators the stream's states while its code runs. False:
                leave them alone, which saves 15 us a sample; the streams must then not use them.
            batch_rows: number of rows in each sample, if the streams' samples are batches; None: samples are rows, and
                the batch size of a ShardLoader may change freely. A ShardLoader refuses a state that was saved with
                another number. A cursor that is used without one accepts a position that was saved with a multiple of
                it: it reads the stream again up to the same row, and does not compare the samples.
            collect_every: number of samples of this process after which Python's garbage collector runs, instead of its
                own schedule. It then never visits objects that exist when the first stream is opened. None: leave it
                alone.
            config: other settings that decide the samples (a buffer's size, a file's name), as a JSON value. A state
                that was saved with a different value is refused.

        Raises InvalidArgumentError for invalid arguments.
        """
        if not callable(make):
            raise InvalidArgumentError(
                f"make must be a function from a shard's number to an iterable, got {type(make).__name__}. Pass a "
                "function"
            )
        self._make = make
        self._shards = at_least_one("shards", shards)
        self._every = at_least_one("snapshot_every", snapshot_every)
        if not isinstance(snapshot_s, int | float) or not snapshot_s > 0:
            raise InvalidArgumentError(
                f"snapshot_s must be a number of seconds above 0, got {snapshot_s!r}. Pass a larger number"
            )
        self._seconds, self._own_random = float(snapshot_s), bool(capture_rng)
        self._rows = None if batch_rows is None else at_least_one("batch_rows", batch_rows)
        self._collect = None if collect_every is None else at_least_one("collect_every", collect_every)
        self._config = _json("config", config)
        self._digests = SampleDigests()

    @property
    def keyed(self) -> bool:
        return self._own_random

    @property
    def num_shards(self) -> int:
        return self._shards

    def described(self) -> dict[str, Any]:
        return {
            "kind": "Savable",
            "shards": self._shards,
            "capture_rng": self._own_random,
            "batch_rows": self._rows,
            "config": self._config,
        }

    def lengths(self, epoch: int) -> Sequence[int] | None:
        return None

    def open(
        self,
        shard: int,
        epoch: int,
        seed: int,
        saved: SavedPosition | None = None,
        position_of: PositionOf | None = None,
    ) -> _Cursor:
        if not 0 <= shard < self._shards:
            raise InvalidArgumentError(
                f"shard must be at least 0 and below {self._shards}, got {shard}. Count shards from 0"
            )
        name = f"stream {shard} of {self._shards}"
        stream = OpaqueStream(
            lambda: self._make(shard),
            name,
            digests=self._digests,
            seed=derive_seed(seed, "Savable", shard, epoch) if self._own_random else None,
            mark=None if saved is None else self._mark(saved, name),
            snapshot_every=self._every,
            snapshot_s=self._seconds,
        )
        return _Cursor(stream, name, self._rows, None if self._collect is None else GarbageCollection(self._collect))

    def _mark(self, saved: SavedPosition, name: str) -> StreamMark:
        """Return the position that `saved` contains, converted to batches of the present `batch_rows`."""
        mark = StreamMark.of(saved, name)
        rows = saved.get("rows")
        if rows == self._rows:
            return mark
        if type(rows) is not int or rows < 1 or self._rows is None:
            if not (rows is None or (type(rows) is int and rows > 0)):
                raise StateCorruptError(
                    f"the saved position of {name} is damaged: batch_rows is {rows!r}. Load an older state"
                )
            divisor = "" if rows is None else ", or a divisor of it"
            raise StateMismatchError(
                f"{name}: batch_rows must be {rows}, as in the saved state{divisor}, got {self._rows}. Pass this value"
            )
        if rows % self._rows:
            raise StateMismatchError(
                f"{name}: batch_rows must be {rows}, as in the saved state, or a divisor of it, got {self._rows}, so "
                f"the saved position may lie within a batch. Pass {rows}, or a divisor of it"
            )
        passed = mark.passed * (rows // self._rows)
        return StreamMark(passed, None if passed else BEGINNING)


class _Cursor:
    def __init__(self, stream: OpaqueStream, name: str, rows: int | None, collecting: GarbageCollection | None) -> None:
        self._stream, self._name, self._rows, self._collecting = stream, name, rows, collecting

    def __iter__(self) -> _Cursor:
        return self

    def __next__(self) -> Any:
        try:
            sample = next(self._stream)
        except StopIteration:
            self.close()
            if self._stream.passed == 0:
                raise DatasetError(
                    f"{self._name}: each stream must have at least one sample, got none. Check that make(shard) "
                    "returns a new iterable at each call"
                ) from None
            raise
        if self._collecting is not None:
            self._collecting.passed()
        return sample

    def skip(self, count: int) -> int:
        return sum(1 for _ in zip(range(count), self, strict=False))

    def saved_position(self) -> SavedPosition:
        return {**self._stream.saved_position(), "rows": self._rows}

    def close(self) -> None:
        self._stream.close()
        if self._collecting is not None:
            self._collecting.close()

    def __del__(self) -> None:
        self.close()


def _json(name: str, value: Any) -> Any:
    """Return `value` as JSON returns it (a tuple becomes a list), or raise InvalidArgumentError."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{name} must be a JSON value: {error}. Use dicts, lists, texts and numbers"
        ) from None


class _Process:
    """What all streams share: the collector's settings, how many asked for others, samples since it ran."""

    def __init__(self) -> None:
        self.holders = 0
        self.samples = 0
        self.was_on = self.was_free = False

    def hold(self) -> None:
        if self.holders == 0:
            self.was_on, self.was_free = gc.isenabled(), gc.get_freeze_count() == 0
            gc.collect()
            gc.freeze()
            gc.disable()
            self.samples = 0
        self.holders += 1

    def release(self) -> None:
        self.holders -= 1
        if self.holders == 0:
            if self.was_free:
                gc.unfreeze()
            if self.was_on:
                gc.enable()


_process = _Process()


class GarbageCollection:
    """Request of one stream to collect garbage after every n samples of the process, until it is closed.

    Python collects after a number of new objects, also in the middle of a batch, and a full collection visits all
    objects, such as a tokenizer's vocabulary. So those that exist when the first stream is opened are frozen, and the
    collector runs after every n samples. Closing the last stream restores its settings.
    """

    def __init__(self, every: int) -> None:
        self._every, self._open = every, True
        _process.hold()

    def passed(self) -> None:
        _process.samples += 1
        if _process.samples >= self._every:
            _process.samples = 0
            gc.collect()

    def close(self) -> None:
        if self._open:
            self._open = False
            _process.release()
