"""Interface of sources in logical shards, and the promises that sources, layers and the loader rely on.

A source has a fixed number of logical shards. A cursor reads one shard of one epoch sequentially, and each sample's
place is (shard, index in the shard). Every buffer or counter (packing, mixing, windows) works inside one shard and is
in its cursor's saved position, so a change of the number of workers moves whole shards and divides no buffer. Layers
are sources made from sources:

    LogicalShards -> Mapped -> Chunked -> Packed -> WindowShuffled -> ShardLoader

Every source makes these promises, and tests/datasets/sharded checks them for each:

- `open(shard, epoch, seed)` yields the same samples each time, in any process, no matter what else is open.
- `open(shard, epoch, seed, saved)` with a position saved after n samples yields the samples from n on. It is a value of
  penstock.proto.state.codec without references to mutable objects, can be saved before any sample and after the last;
  saving changes nothing, and takes microseconds. With restore keys (shard_keys.py) it must be the same each time,
  because it is in the batch.
- `skip(n)` leaves the cursor where n times `next` would have left it, without making samples where possible.
- A layer loses no samples of its source: while it buffers some, its saved position contains the source's from which to
  read them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from penstock.data.ordering.permutation import Ints

SavedPosition = Any
"""What `Cursor.saved_position` returns; None: the beginning."""

PositionOf = Callable[[int], int]
"""From the index of a sample in one shard to its position in the order of all shards' samples."""


class Origin(NamedTuple):
    """Source of a Mixture that a sample comes from. A cursor's optional attribute `origin` is its last sample's."""

    source: str = ""
    """"outer/inner" for nested Mixtures; "" without a Mixture; "(mixed)" for a Grouped's list of different sources."""
    skipped: Mapping[str, int] = {}
    """By source: samples that layers left out just before this one."""
    parts: tuple[tuple[str, int], ...] = ()
    """(source, number of tokens) of the documents in a packed line, or in all lines of a Grouped's list."""

    def within(self, name: str) -> Origin:
        if not (self.source or self.skipped or self.parts):
            return Origin(name)

        def inner(source: str) -> str:
            return f"{name}/{source}" if source else name

        skipped = {inner(source): count for source, count in self.skipped.items()}
        return Origin(inner(self.source), skipped, tuple((inner(source), size) for source, size in self.parts))

    def after(self, left_out: Mapping[str, int]) -> Origin:
        return self._replace(skipped=summed(self.skipped, left_out)) if left_out else self

    def leaving_out(self, left_out: Mapping[str, int]) -> dict[str, int]:
        """Return the counts after a layer left out this origin's sample too: `left_out`, the origin's own, and 1."""
        return summed(left_out, summed(self.skipped, {self.source: 1}))


NOWHERE = Origin()
"""Of a sample from no Mixture, before which none was left out."""


def cursor_origin(cursor: Any) -> Origin:
    found = getattr(cursor, "origin", NOWHERE)
    return found if isinstance(found, Origin) else NOWHERE


def summed(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


class Cursor(Iterator[Any], Protocol):
    """Sequential reader of one shard in one epoch. After the last sample every call of `next` raises StopIteration."""

    def skip(self, count: int) -> int:
        """Skip `count` samples, or all remaining ones if there are fewer. Return the number of skipped samples."""

    def saved_position(self) -> SavedPosition:
        """Return the position as a value for states, from which `ShardedSource.open` continues with the next sample."""

    def close(self) -> None:
        """Close the files that the cursor has open. May be called twice."""


@runtime_checkable
class ShardedSource(Protocol):
    """Interface of a source: samples in a fixed number of logical shards, which are read independently."""

    @property
    def num_shards(self) -> int:
        """Number of logical shards: at least 1, and the same for any number of boxes and workers."""

    @property
    def endless(self) -> bool:
        """True if the shards never end. The epoch is then always 0, and each shard repeats its own data."""

    def described(self) -> dict[str, Any]:
        """Return everything that decides the samples and their order, as a JSON value: kind, settings, and the
        description of each `source` below. A state that was saved with another description is refused."""

    def lengths(self, epoch: int) -> Sequence[int] | None:
        """Return the number of samples in each shard; None if it is unknown before the shards are read."""

    def open(
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        """Return a cursor at the shard's beginning, or at a saved position.

        Args:
            shard: number of the shard, from 0.
            epoch: number of the epoch.
            seed: seed of all randomness. A layer derives its own by derive_seed(seed, NAME, ...), and passes `seed` on
                to its source, or a different seed to each of several.
            saved: what `saved_position` of a cursor of this shard and epoch returned; None: the beginning.
            position_of: function from a sample's index to its position among the samples of all shards; None: sample i
                of shard s is at i * num_shards + s. A layer that yields one sample for each of its source passes it on,
                unless it changes the order.

        Raises DatasetError for data that cannot be read or differ from their description, StateCorruptError for an
        invalid saved position.
        """


class KnownRecords(NamedTuple):
    """Records of a source, numbered from 0, and where they are in its order: a ShardLoader that balances rows by cost
    needs a sample's cost before it reads it. LogicalShards of indexable pieces know them; Mapped and Repeated pass them
    on."""

    total: int
    numbers: Callable[[int, int, Ints, Ints], Ints]
    """(epoch, seed, shards, indices) -> number of the record at each place; epoch and seed as in `open`."""


def known_records(source: ShardedSource) -> KnownRecords | None:
    found = getattr(source, "known_records", None)
    return None if found is None else found()
