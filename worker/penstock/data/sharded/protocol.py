"""What a source in logical shards is: the contract between shards, layers, and the loader that deals them out.

A source has L logical shards, whatever the number of boxes and workers. A shard of an epoch is read along by a cursor,
and each sample's place is (shard, index). Everything that has a buffer or a counter (packing, mixing, windows) lives
inside one shard, and a cursor's token says where it stands; so a change of the number of workers moves whole shards
and never cuts through a buffer. Layers are sources made from sources:

    LogicalShards -> Mapped -> Chunked -> Packed -> WindowShuffled -> ShardLoader

What every source promises, and tests/datasets/sharded holds for each:

- `open(shard, epoch, seed)` yields the same samples each time, in whatever process, with whatever else is open.
- `open(shard, epoch, seed, token)` with a token taken after n samples yields the samples from n on. A token is a value
  of penstock.proto.state.codec, holds no reference to what moves on, and can be taken before the first sample, between
  two, and behind the last; taking it changes nothing, and costs microseconds. At the same place it is the same, whoever
  comes there and however, if the source is to be used with restore keys: they hold it, and batches hold them.
- `skip(n)` leaves the cursor where n times `next` would have left it, without making samples where it can.
- What was taken out of a source is never lost in a layer: a token with the samples that lie in a buffer says from
  where to read them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["Cursor", "Place", "ShardedSource", "Token"]

Token = Any
"""None, or a tree of dicts, lists, numbers, text, bytes, tensors and arrays: a value of penstock.proto.state.codec.
Small."""

Place = Callable[[int], int]
"""Index of a shard's sample -> its position among the samples of all shards, in the order in which they are dealt."""


class Cursor(Iterator[Any], Protocol):
    """One shard of one epoch, read along. `next` raises StopIteration behind the last sample, again and again."""

    def skip(self, count: int) -> int:
        """Pass over `count` samples, or as many as there are left; returns how many that were."""

    def token(self) -> Token:
        """From where `open` goes on with the next sample."""

    def close(self) -> None:
        """Let go of files; may be called twice."""


@runtime_checkable
class ShardedSource(Protocol):
    """Samples in logical shards."""

    @property
    def num_shards(self) -> int:
        """L: at least 1, and the same for any number of boxes and workers."""

    @property
    def endless(self) -> bool:
        """Cursors never end, and the epoch is always 0: each shard goes on in the next epoch by itself."""

    def described(self) -> dict[str, Any]:
        """All that decides which samples come in which order, as a value of JSON. It is saved with a state, and a state
        that says otherwise is refused by the names and values of this. So it names kind, settings and each `source`."""

    def lengths(self, epoch: int) -> Sequence[int] | None:
        """Samples of each shard in this epoch, if that is known without reading them."""

    def open(self, shard: int, epoch: int, seed: int, token: Token | None = None, place: Place | None = None) -> Cursor:
        """A cursor at the shard's beginning, or where the token says.

        Args:
            seed: of all randomness. A layer derives what it uses by derive_seed(seed, NAME, ...), and gives the seed on
                to its source; one that has several gives each another one.
            place: where this cursor's samples come among those of all shards; None: index i of shard s is the sample
                at i * num_shards + s. A layer that yields one sample for each of its source's passes it on, unless it
                yields them in another order.

        Raises DatasetError for data that cannot be read or are not as they were said to be, StateCorruptError for a
        token that cannot be.
        """
