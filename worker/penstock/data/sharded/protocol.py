"""Interface of sources in logical shards, and the promises that sources, layers and the loader rely on.

A source has a fixed number L of logical shards, for any number of boxes and workers. A cursor reads one shard of one
epoch sequentially, and each sample's place is (shard, index in the shard). Everything that has a buffer or a counter
(packing, mixing, windows) works inside one shard, and a cursor's saved position contains its state. So a change of the
number of workers moves whole shards and never divides a buffer. Layers are sources made from sources:

    LogicalShards -> Mapped -> Chunked -> Packed -> WindowShuffled -> ShardLoader

Every source makes these promises, and tests/datasets/sharded checks them for each:

- `open(shard, epoch, seed)` yields the same samples each time, in any process, no matter what else is open.
- `open(shard, epoch, seed, saved)` with a position saved after n samples yields the samples from n on. A saved
  position is a value of penstock.proto.state.codec without references to mutable objects. A position can be saved
  before the first sample, between two samples, and after the last; saving it changes nothing, and takes microseconds.
  For a source with restore keys (shard_keys.py) the saved position after n samples must always be the same, because it
  is in the batch, and a batch must be the same each time it is made.
- `skip(n)` leaves the cursor where n times `next` would have left it, without making samples where possible.
- A layer never loses samples that it took from its source: while samples are in its buffer, the layer's saved
  position contains the source's saved position from which to read these samples again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from penstock.data.ordering.permutation import Ints

__all__ = [
    "NOWHERE",
    "Cursor",
    "KnownRecords",
    "Origin",
    "PositionOf",
    "SavedPosition",
    "ShardedSource",
    "cursor_origin",
    "is_traced",
    "known_records",
    "summed",
]


SavedPosition = Any
"""None, or a small tree of dicts, lists, numbers, text, bytes, tensors and arrays."""

PositionOf = Callable[[int], int]
"""From the index of a sample in one shard to its position in the order of all shards' samples, in which batches contain
them."""


class Origin(NamedTuple):
    """Source of a Mixture that a sample comes from, for counts by source. A cursor may have an attribute `origin`: that
    of the sample that `next` returned last."""

    source: str = ""
    """"outer/inner" for nested Mixtures; "" without a Mixture; "(mixed)" for a list of a Grouped from different
    sources."""
    skipped: Mapping[str, int] = {}
    """By source: samples that layers left out just before this one."""
    parts: tuple[tuple[str, int], ...] = ()
    """(source, number of tokens) of the documents in a packed line, or in all lines of a Grouped's list."""

    def within(self, name: str) -> Origin:
        """Return this origin with "`name`/" before the names of its sources."""
        if not (self.source or self.skipped or self.parts):
            return Origin(name)

        def inner(source: str) -> str:
            return f"{name}/{source}" if source else name

        skipped = {inner(source): count for source, count in self.skipped.items()}
        return Origin(inner(self.source), skipped, tuple((inner(source), size) for source, size in self.parts))

    def after(self, left_out: Mapping[str, int]) -> Origin:
        """Return this origin with `left_out` added to its counts of left-out samples."""
        return self._replace(skipped=summed(self.skipped, left_out)) if left_out else self

    def leaving_out(self, left_out: Mapping[str, int]) -> dict[str, int]:
        """Return the counts of left-out samples after a layer has left out this origin's sample, too: `left_out` and
        this origin's own, and 1 for the sample."""
        return summed(left_out, summed(self.skipped, {self.source: 1}))


NOWHERE = Origin()
"""Of a sample from no Mixture, before which none was left out."""


def cursor_origin(cursor: Any) -> Origin:
    found = getattr(cursor, "origin", NOWHERE)
    return found if isinstance(found, Origin) else NOWHERE


def is_traced(cursor: Any) -> bool:
    """Return True if a cursor's samples may have different origins. A layer that changes the order must keep each."""
    return getattr(cursor, "traced", False) is True


def summed(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of two dicts of counts."""
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


class Cursor(Iterator[Any], Protocol):
    """Sequential reader of one shard in one epoch. After the last sample every call of `next` raises StopIteration."""

    def skip(self, count: int) -> int:
        """Skip `count` samples, or all remaining ones if there are fewer. Return the number of skipped samples."""

    def saved_position(self) -> SavedPosition:
        """Return the cursor's position as a value that states can contain. A cursor that `ShardedSource.open` returns
        for this value continues with the next sample."""

    def close(self) -> None:
        """Close the files that the cursor has open. May be called twice."""


@runtime_checkable
class ShardedSource(Protocol):
    """Interface of a source: samples in a fixed number of logical shards, which are read independently."""

    @property
    def num_shards(self) -> int:
        """Number L of logical shards: at least 1, and the same for any number of boxes and workers."""

    @property
    def endless(self) -> bool:
        """True if the shards never end. The epoch is then always 0, and each shard repeats its own data."""

    def described(self) -> dict[str, Any]:
        """Return a description of everything that decides the samples and their order, as a JSON value: kind, settings,
        and the description of each `source` below. The description is saved with a state. A state with a different
        description is refused, by an error that names the differing values."""

    def lengths(self, epoch: int) -> Sequence[int] | None:
        """Return the number of samples in each shard in this epoch; None if the numbers are unknown before the shards
        are read."""

    def open(
        self,
        shard: int,
        epoch: int,
        seed: int,
        saved: SavedPosition | None = None,
        position_of: PositionOf | None = None,
    ) -> Cursor:
        """Return a cursor at the shard's beginning, or at a saved position.

        Args:
            shard: number of the shard, from 0.
            epoch: number of the epoch.
            seed: seed of all randomness. A layer derives its own seed by derive_seed(seed, NAME, ...), and passes
                `seed` on to its source, or a different seed to each of several sources.
            saved: what `saved_position` of an earlier cursor of this shard and epoch returned; None: the beginning.
            position_of: function from the index of a sample to its position among the samples of all shards; None:
                sample i of shard s is at position i * num_shards + s. A layer that yields one sample for each sample of
                its source passes `position_of` on, unless the layer changes the order.

        Raises DatasetError for data that cannot be read or differ from their description, StateCorruptError for an
        invalid saved position.
        """


class KnownRecords(NamedTuple):
    """Records of a source, numbered from 0 through all of its pieces, and where they are in its order: a ShardLoader
    that balances rows by cost must find a sample's cost before it reads it. LogicalShards of indexable pieces know
    them, and Mapped and Repeated pass them on."""

    total: int
    numbers: Callable[[int, int, Ints, Ints], Ints]
    """(epoch, seed, shards, indices) -> number of the record at each place. Epoch and seed are those of `open`."""


def known_records(source: ShardedSource) -> KnownRecords | None:
    found = getattr(source, "known_records", None)
    return None if found is None else found()
