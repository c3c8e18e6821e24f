"""Records whose place in a source's order is known before they are read.

The shards of LogicalShards over pieces with known lengths are ranges of an order that is a function. So the record at a
place (shard, index in the shard) has a number that can be computed without reading: by this number a ShardLoader finds
the cost of a row. Mapped and Repeated keep the numbers of the records below them. Layers that leave samples out, pack
or mix them have no such numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.protocol import ShardedSource

__all__ = ["KnownRecords", "known_records"]


class KnownRecords(NamedTuple):
    """Records of a source, numbered over all of its pieces."""

    total: int
    """Number of all records."""
    numbers: Callable[[int, int, Ints, Ints], Ints]
    """Function (epoch, seed, shards, indices) that returns the number of the record at each place (shard, index in the
    shard). Epoch and seed are those with which the source is opened."""


def known_records(source: ShardedSource) -> KnownRecords | None:
    """Return the records of a source; None if it cannot tell which record a place has."""
    found = getattr(source, "known_records", None)
    return None if found is None else found()
