"""Interface of sources in logical shards, and the promises that sources, layers and the loader rely on.

A source has a fixed number L of logical shards, for any number of boxes (data-parallel ranks) and workers. A cursor
reads one shard of one epoch sequentially, and each sample's place is (shard, index in the shard). Everything that has a
buffer or a counter (packing, mixing, windows) works inside one shard, and a cursor's saved position contains its state.
So a change of the number of workers moves whole shards and never divides a buffer. Layers are sources made from
sources:

    LogicalShards -> Mapped -> Chunked -> Packed -> WindowShuffled -> ShardLoader

Every source makes these promises, and tests/datasets/sharded checks them for each:

- `open(shard, epoch, seed)` yields the same samples each time, in any process, no matter what else is open.
- `open(shard, epoch, seed, saved)` with a position saved after n samples yields the samples from n on. A saved
  position is a value of penstock.proto.state.codec without references to mutable objects. A position can be saved
  before the first sample, between two samples, and after the last; saving it changes nothing, and takes microseconds.
  For a source with restore keys the saved position after n samples must always be the same, no matter where the cursor
  was opened. A restore key (shard_keys.py) is a text in a batch by which a sample can be read again. It contains a
  saved position, and a batch must be the same each time it is made.
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
"""Saved position of a cursor in its shard, with the state of its buffers. It is None, or a small tree of dicts, lists,
numbers, text, bytes, tensors and arrays (a value of penstock.proto.state.codec)."""

PositionOf = Callable[[int], int]
"""Function that converts the index of a sample in one shard to the sample's position in the order of all shards'
samples, which is the order in which batches contain them."""


class Origin(NamedTuple):
    """Source of a Mixture that a sample comes from, for counts of samples by source. A cursor may have an attribute
    `origin`: the origin of the sample that `next` returned last."""

    source: str = ""
    """Name of the sample's source in a Mixture; "outer/inner" for nested Mixtures; "" without a Mixture; "(mixed)" for
    a list of a Grouped whose samples have different sources."""
    skipped: Mapping[str, int] = {}
    """Number of samples, by source, that layers left out between the previous sample of the shard and this one."""
    parts: tuple[tuple[str, int], ...] = ()
    """Pairs (source, number of tokens) of the documents in a packed line, or in all lines of a Grouped's list; empty
    for a sample without packed lines."""

    def within(self, name: str) -> Origin:
        """Return this origin with "`name`/" before the names of its sources. `name`: name that an outer Mixture has for
        the source that contains these."""
        if not (self.source or self.skipped or self.parts):
            return Origin(name)

        def inner(source: str) -> str:
            return f"{name}/{source}" if source else name

        skipped = {inner(source): count for source, count in self.skipped.items()}
        return Origin(inner(self.source), skipped, tuple((inner(source), size) for source, size in self.parts))

    def after(self, left_out: Mapping[str, int]) -> Origin:
        """Return this origin with `left_out` added to its counts of left-out samples. `left_out`: number of samples
        that a layer left out just before this one, by source."""
        return self._replace(skipped=summed(self.skipped, left_out)) if left_out else self

    def leaving_out(self, left_out: Mapping[str, int]) -> dict[str, int]:
        """Return the number of left-out samples, by source, after a layer has left out this origin's sample, too: the
        sum of `left_out`, of this origin's own counts, and of 1 for the sample. `left_out`: number of samples that the
        layer left out just before this one, by source."""
        return summed(left_out, summed(self.skipped, {self.source: 1}))


NOWHERE = Origin()
"""Origin of a sample that comes from no Mixture, and before which no sample was left out."""


def cursor_origin(cursor: Any) -> Origin:
    """Return the origin of the sample that a cursor returned last; NOWHERE if the cursor has no attribute `origin`."""
    found = getattr(cursor, "origin", NOWHERE)
    return found if isinstance(found, Origin) else NOWHERE


def is_traced(cursor: Any) -> bool:
    """Return True if a cursor is traced: its samples may have different origins. A layer that changes the order of
    samples must then keep the origin of each."""
    return getattr(cursor, "traced", False) is True


def summed(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of two dicts of counts, name by name. A name that is missing in one of them counts 0 there."""
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
    """Records of a source, numbered from 0 through all of its pieces, and where they are in its order."""

    total: int
    """Number of all records."""
    numbers: Callable[[int, int, Ints, Ints], Ints]
    """Function (epoch, seed, shards, indices) that returns the number of the record at each place (shards[i],
    indices[i]). Epoch and seed are those with which the source is opened."""


def known_records(source: ShardedSource) -> KnownRecords | None:
    """Return the known records of a source; None if the source cannot compute which record a sample is."""
    found = getattr(source, "known_records", None)
    return None if found is None else found()
