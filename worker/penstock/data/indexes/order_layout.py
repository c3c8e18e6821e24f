"""Division of a dataset's samples that decides their order: *units* that are read as a whole (row groups, or whole
shards), and the files in which they lie.

A dataset is divided as its own shards are, unless it was converted from another one, with the same samples under the
same numbers. Then a note in its index describes the original's division, and order, fingerprint, states and restore
keys are those of the original.
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

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class OrderLayout:
    """Units in ascending order of their samples' numbers, which decide the samples' order."""

    fingerprint: str
    """Digest of the data, wherever they are stored."""
    units: Ints
    """Number of samples in each row group, or shard without row groups; shape (units,)."""
    counts: Ints | None
    """Number of units in each file; shape (files,). None if each file is one unit."""
    blocks: bool
    """A file has blocks (such as row groups) that are decoded as a whole."""
    decoded: tuple[int, int]
    """(bytes of all decoded blocks whose size is known, number of samples in these blocks)."""

    @property
    def files(self) -> Ints:
        """File of each unit, ascending from 0; shape (units,)."""
        if self.counts is None:
            return np.arange(len(self.units))
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @staticmethod
    def of(table: ShardTable) -> OrderLayout:
        """Return the layout of a dataset whose own shards decide the order."""
        facts = table.facts
        decoded = facts.decoded_bytes, facts.decoded_samples
        return OrderLayout(table.fingerprint, table.sizes, table.counts, facts.blocks, decoded)

    @staticmethod
    def noted(notes: Mapping[str, Any], table: ShardTable, name: str) -> OrderLayout:
        """Return the layout in an index's notes, else of its shards. Raise DatasetError for one that does not fit."""
        note = notes.get("order")
        if note is None:
            return OrderLayout.of(table)
        try:
            units, counts = (np.array(note[each], np.int64).reshape(-1) for each in ("units", "files"))
            if (units < 0).any() or (counts < 0).any() or int(counts.sum()) != len(units):
                raise ValueError("the sum of its list 'files' must be the length of its list 'units'")
            if units.sum() != table.sizes.sum():
                raise ValueError(f"its list 'units' must have {table.sizes.sum()} samples in all, got {units.sum()}")
            decoded = int(note["decoded"][0]), int(note["decoded"][1])
            return OrderLayout(str(note["fingerprint"]), units, counts, bool(note["blocks"]), decoded)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise DatasetError(
                f"{name}: penstock.order in the index is invalid: {type(error).__name__}: {error}. Convert again"
            ) from None

    def note(self) -> dict[str, Any]:
        """Return JSON values for a converted dataset's index, from which `noted` makes the layout."""
        counts = np.ones(len(self.units), np.int64) if self.counts is None else self.counts
        return {
            "fingerprint": self.fingerprint,
            "units": self.units.tolist(),
            "files": counts.tolist(),
            "blocks": self.blocks,
            "decoded": list(self.decoded),
        }


def joined_files(layouts: Sequence[OrderLayout]) -> list[Ints] | None:
    """Return the file of each unit, an array for each stream, with files counted through all streams. Return None if no
    file has blocks, because each unit is then a file."""
    if not any(each.blocks for each in layouts):
        return None
    found, begin = [], 0
    for each in layouts:
        found.append(each.files + begin)
        begin += int(each.files[-1]) + 1 if len(each.files) else 0
    return found


def mean_sample_bytes(layouts: Sequence[OrderLayout]) -> float:
    """Return the mean bytes of a sample in a decoded block of any stream; 0 if unknown."""
    return sum(each.decoded[0] for each in layouts) / max(1, sum(each.decoded[1] for each in layouts))


def joint_fingerprint(layouts: Sequence[OrderLayout]) -> str:
    if len(layouts) == 1:
        return layouts[0].fingerprint
    return xxhash.xxh3_128("".join(f"{each.fingerprint}\n" for each in layouts).encode()).hexdigest()
