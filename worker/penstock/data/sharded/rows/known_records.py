"""Sources that know, without reading, which record of the data each sample is.

A ShardLoader that balances rows by cost must find the cost of a sample before it reads the sample. The costs are listed
by record, so it needs the record's number at a place (shard, index in the shard). LogicalShards of indexable pieces can
compute this number. Mapped and Repeated pass it on. Layers that leave samples out, pack or mix them cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.protocol import ShardedSource

__all__ = ["KnownRecords", "known_records"]


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
