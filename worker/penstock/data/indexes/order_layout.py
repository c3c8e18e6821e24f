"""Division of a dataset's samples that decides their order: units that are read as a whole, and the files they lie in.

It is that of the dataset's own shards. A dataset that was made of another one, with the same samples by the same
numbers, has a note of the other's in its index: it then has the other's order, and the same fingerprint, so that states
and restore keys of either are good for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.data.indexes.shard_table import ShardTable
from penstock.proto.errors import DatasetError

__all__ = ["OrderLayout", "joined_files", "joint_fingerprint", "mean_sample_bytes"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class OrderLayout:
    """Units of a dataset's samples, in the order of their numbers."""

    fingerprint: str
    """Digest of the data, which changes with them, and does not depend on where they are stored."""
    units: Ints
    """Number of samples in each unit: a row group, or else a shard; shape (units,)."""
    counts: Ints | None
    """Number of units in each file; None if each has one."""
    blocks: bool
    """True if a file has blocks that are decoded as a whole."""
    decoded: tuple[int, int]
    """Bytes of all decoded blocks whose size is known, and the number of samples in them."""
    own: bool = True
    """True if the units are those of the dataset's own shards."""

    @property
    def files(self) -> Ints:
        """Number of the file that each unit lies in, ascending from 0; shape (units,)."""
        if self.counts is None:
            return np.arange(len(self.units))
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @staticmethod
    def of(table: ShardTable) -> OrderLayout:
        """Return the layout of a dataset's own shards."""
        facts = table.facts
        decoded = facts.decoded_bytes, facts.decoded_samples
        return OrderLayout(_fingerprint(table), table.sizes, table.counts, facts.blocks, decoded)

    @staticmethod
    def noted(notes: Mapping[str, Any], table: ShardTable, name: str) -> OrderLayout:
        """Return the layout that an index has notes of, or else that of its shards. Raises DatasetError for notes that
        do not fit the shards."""
        note = notes.get("order")
        if note is None:
            return OrderLayout.of(table)
        try:
            units, counts = (np.array(note[each], np.int64).reshape(-1) for each in ("units", "files"))
            if (units < 0).any() or (counts < 0).any() or int(counts.sum()) != len(units):
                raise ValueError("its lists units and files must describe the same blocks")
            if int(units.sum()) != int(table.starts[-1]):
                raise ValueError(f"it must have {int(table.starts[-1])} samples, as the shards, got {int(units.sum())}")
            decoded = int(note["decoded"][0]), int(note["decoded"][1])
            return OrderLayout(str(note["fingerprint"]), units, counts, bool(note["blocks"]), decoded, own=False)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise DatasetError(
                f"{name}: penstock.order in the index must be the order of the dataset from which this one was "
                f"converted: {type(error).__name__}: {error}. Convert that dataset again"
            ) from None

    def note(self) -> dict[str, Any]:
        """Return the note from which `noted` makes this layout."""
        counts = np.ones(len(self.units), np.int64) if self.counts is None else self.counts
        return {
            "fingerprint": self.fingerprint,
            "units": self.units.tolist(),
            "files": counts.tolist(),
            "blocks": self.blocks,
            "decoded": list(self.decoded),
        }


def joined_files(layouts: Sequence[OrderLayout]) -> list[Ints] | None:
    """Return the number of the file that each unit lies in, for each stream, counted through all streams; None if no
    file has blocks."""
    if not any(each.blocks for each in layouts):
        return None
    found, begin = [], 0
    for each in layouts:
        found.append(each.files + begin)
        begin += int(each.files[-1]) + 1 if len(each.files) else 0
    return found


def mean_sample_bytes(layouts: Sequence[OrderLayout]) -> float:
    """Return the mean number of bytes that a sample takes in a decoded block of any stream; 0 if it is unknown."""
    return sum(each.decoded[0] for each in layouts) / max(1, sum(each.decoded[1] for each in layouts))


def joint_fingerprint(layouts: Sequence[OrderLayout]) -> str:
    """Return one fingerprint of the shards of all streams of a dataset."""
    if len(layouts) == 1:
        return layouts[0].fingerprint
    return xxhash.xxh3_128("".join(f"{each.fingerprint}\n" for each in layouts).encode()).hexdigest()


def _fingerprint(table: ShardTable) -> str:
    digest = xxhash.xxh3_128(f"stream of {len(table)}\n".encode())
    table.describe(digest)
    return digest.hexdigest()
