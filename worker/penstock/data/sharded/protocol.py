"""Contract of a source in logical shards, between shards, layers, and the loader that partitions them.

A source has L logical shards, whatever the number of boxes and workers. A shard of an epoch is read sequentially by a
cursor, and each sample's position is (shard, index). Everything that has a buffer or a counter (packing, mixing,
windows) works inside one shard, and a cursor's token contains its state. So a change of the number of workers moves
whole shards and never divides a buffer. Layers are sources made from sources:

    LogicalShards -> Mapped -> Chunked -> Packed -> WindowShuffled -> ShardLoader

Every source makes these promises, and tests/datasets/sharded checks them for each:

- `open(shard, epoch, seed)` yields the same samples each time, in any process, whatever else is open.
- `open(shard, epoch, seed, token)` with a token taken after n samples yields the samples from n on. A token is a value
  of penstock.proto.state.codec without references to mutable objects. It can be taken before the first sample,
  between two, and after the last; taking it changes nothing, and takes microseconds. For a source with restore keys
  the token of a position must always be the same, however the position was reached: keys contain it, and batches
  contain keys.
- `skip(n)` leaves the cursor where n times `next` would have left it, without making samples where possible.
- A layer never loses samples that it took from its source: if samples are in its buffer, its token contains the
  source's position from which to read them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["Cursor", "Place", "ShardedSource", "Token"]

Token = Any
"""State of a cursor: None, or a small tree of dicts, lists, numbers, text, bytes, tensors and arrays (a value of
penstock.proto.state.codec)."""

Place = Callable[[int], int]
"""Function from a shard's sample index to the sample's position among those of all shards, in the order of batches."""


class Cursor(Iterator[Any], Protocol):
    """Sequential reader of one shard in one epoch. After the last sample every call of `next` raises StopIteration."""

    def skip(self, count: int) -> int:
        """Skip `count` samples, or all that are left. Return how many were skipped."""

    def token(self) -> Token:
        """Return the position as a token, with which `ShardedSource.open` continues at the next sample."""

    def close(self) -> None:
        """Close files; may be called twice."""


@runtime_checkable
class ShardedSource(Protocol):
    """Interface of a source: samples in a fixed number of logical shards, which are read independently."""

    @property
    def num_shards(self) -> int:
        """Number of shards, L: at least 1, and the same for any number of boxes and workers."""

    @property
    def endless(self) -> bool:
        """True if cursors never end. The epoch is then always 0: each shard begins its next epoch by itself."""

    def described(self) -> dict[str, Any]:
        """Return everything that decides the samples and their order, as a JSON value: kind, settings, and the
        description of each `source`. It is saved with a state. A state with a different description is refused by an
        error that names the differing values."""

    def lengths(self, epoch: int) -> Sequence[int] | None:
        """Return the samples of each shard in this epoch, or None if they are unknown before reading."""

    def open(self, shard: int, epoch: int, seed: int, token: Token | None = None, place: Place | None = None) -> Cursor:
        """Return a cursor at the shard's beginning, or at the token's position.

        Args:
            seed: seed of all randomness. A layer derives its own by derive_seed(seed, NAME, ...), and passes the seed
                on to its source; a layer with several sources passes each a different one.
            place: positions of this cursor's samples among those of all shards; None: index i of shard s is the sample
                at i * num_shards + s. A layer that yields one sample for each of its source's passes it on, unless it
                yields them in another order.

        Raises DatasetError for data that cannot be read or differ from their description, StateCorruptError for an
        invalid token.
        """
