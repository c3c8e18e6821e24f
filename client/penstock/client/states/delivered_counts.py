"""Counts of the samples and tokens delivered to a box (a data-parallel rank): one row for each source of a mixture and
each key that the loader counts by (penstock.data.Counts)."""

from __future__ import annotations

import threading
from collections import deque

from penstock.proto.errors import ProtocolError
from penstock.proto.state.counts import MOST_GROUPS, Rows, is_whole, merged_rows, read_changes

__all__ = ["DeliveredCounts"]

FOLDED_AT = 64
"""Number of batches of a slot after which the counts that came with them are decoded and added up. Until then the
counts are kept as bytes, so that a batch costs the training thread little."""


class DeliveredCounts:
    """Counts of the samples in the delivered batches of a box, one row for each (source, key). A batch comes with the
    rows whose counts it changed. The training thread takes these rows; any thread may read the sums over all slots.

    Args:
        slots: number of slots of the box.
    """

    def __init__(self, slots: int) -> None:
        self._changes: list[deque[bytes]] = [deque() for _ in range(slots)]
        self._rows: list[Rows] = [{} for _ in range(slots)]
        self._lock = threading.Lock()

    def begin(self, rows: Rows) -> None:
        """Begin with the counts of a loaded state. The counts of the whole box are kept as those of slot 0, because the
        loader of slot 0 continues them."""
        with self._lock:
            self._rows[0] = dict(rows)

    def take(self, slot: int, changes: bytes) -> None:
        """Add the changed counts that came with a delivered batch of a slot. `changes`: encoded rows, see
        penstock.proto.state.counts. Once FOLDED_AT changes of the slot wait, decode them. Raises ProtocolError then if
        one of them is malformed."""
        kept = self._changes[slot]
        if is_whole(changes):
            kept.clear()  # these are all counts of the slot, not only changed ones
        kept.append(changes)
        if len(kept) >= FOLDED_AT:
            with self._lock:
                self._fold(slot)

    def rows(self) -> Rows:
        """Return the counts of all slots together, by (source, key). Raises ProtocolError if a slot sent malformed
        counts."""
        with self._lock:
            for slot in range(len(self._rows)):
                self._fold(slot)
            return merged_rows(self._rows)

    def _fold(self, slot: int) -> None:
        changes = self._changes[slot]
        while True:
            try:
                newest = changes.popleft()  # the training thread may clear the queue meanwhile
            except IndexError:
                return
            rows = read_changes(newest)
            self._rows[slot] = rows = rows if is_whole(newest) else {**self._rows[slot], **rows}
            if len(rows) > MOST_GROUPS:
                raise ProtocolError(
                    f"a loader must count at most {MOST_GROUPS} groups (pairs of source and key), got {len(rows)}: use "
                    "fewer sources or keys"
                )
