"""Source made from a user's iterables: each shard is one stream (opaque.py), which cannot be split. So more workers
than streams do not make reading faster, and skipping samples means reading them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.data.arguments import at_least_one
from penstock.data.sharded.protocol import PositionOf, SavedPosition
from penstock.data.sharded.sources.opaque import (
    SNAPSHOT_EVERY,
    SNAPSHOT_S,
    OpaqueStream,
    SampleDigests,
    StreamMark,
)
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.proto.state.generators import derive_seed


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
    by the source's seed, the shard and the epoch; a source that is in a Mixture twice draws different numbers. Threads
    that a stream starts draw from the generators of the stream that runs at that time.
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
            batch_rows: number of rows in each sample, if the streams' samples are batches; None: samples are rows. A
                state that was saved with another number is refused.
            config: other settings that decide the samples (a buffer's size, a file's name), as a JSON value. A state
                that was saved with a different value is refused.
        """
        if not callable(make):
            raise InvalidArgumentError(f"make must be a function of a shard's number, got {type(make).__name__}")
        self._make = make
        self._shards = at_least_one("shards", shards)
        self._every = at_least_one("snapshot_every", snapshot_every)
        if not isinstance(snapshot_s, int | float) or not snapshot_s > 0:
            raise InvalidArgumentError(f"snapshot_s must be a number of seconds above 0, got {snapshot_s!r}")
        self._seconds, self._own_random = float(snapshot_s), bool(capture_rng)
        self._rows = None if batch_rows is None else at_least_one("batch_rows", batch_rows)
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
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> _Cursor:
        assert 0 <= shard < self._shards, f"shard {shard} of {self._shards}"
        name = f"stream {shard} of {self._shards}"
        stream = OpaqueStream(
            lambda: self._make(shard),
            name,
            digests=self._digests,
            seed=derive_seed(seed, "Savable", shard, epoch) if self._own_random else None,
            mark=None if saved is None else StreamMark.of(saved, name),
            snapshot_every=self._every,
            snapshot_s=self._seconds,
        )
        return _Cursor(stream, name)


class _Cursor(Iterator[Any]):
    def __init__(self, stream: OpaqueStream, name: str) -> None:
        self._stream, self._name = stream, name

    def __next__(self) -> Any:
        try:
            sample = next(self._stream)
        except StopIteration:
            self.close()
            if self._stream.passed == 0:
                raise DatasetError(f"{self._name}: each stream must have at least one sample, got none") from None
            raise
        return sample

    def skip(self, count: int) -> int:
        return sum(1 for _ in zip(range(count), self, strict=False))

    def saved_position(self) -> SavedPosition:
        return self._stream.saved_position()

    def close(self) -> None:
        self._stream.close()

    def __del__(self) -> None:
        self.close()


def _json(name: str, value: Any) -> Any:
    """Return `value` as JSON returns it (a tuple becomes a list), or raise InvalidArgumentError."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} must be a JSON value: {error}") from None
