"""Index of snapshots.db: the kept snapshots and blobs, without their data, and the values that may be dropped.

A slot may have to restart strictly before its last delivered batch, and a state may be requested for any step in the
retention window. So the newest snapshot before the window is kept, and all newer ones. Older snapshots are not needed
any more. The start of the window, as a slot's position, is taken from positions that the box reported. It does not
follow from the step alone: near the end of an epoch, the slots that still have batches take the steps of those that
have ended.

Pure: the index decides what to drop, and the service removes it from disk once its replacement is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.appliance.model.entities import SlotKey
from penstock.appliance.model.limits import Limits

_MORE = (
    "end jobs that are no longer needed, or raise the budget (penstock coordinator --budget; "
    "PENSTOCK_COORDINATOR_BUDGET, which an embedded coordinator reads too)"
)


@dataclass(frozen=True, order=True)
class DurableSnapshot:
    """Position and size of one durable snapshot."""

    total: int
    epoch: int
    size: int
    epoch_start: bool = False
    """True if the snapshot was taken at the start of an epoch, False if after a batch."""

    @property
    def is_sure(self) -> bool:
        """True if any loader can restart from the snapshot: see Kept in penstock.worker.slots.snapshots."""
        return not self.epoch_start or self.epoch == 0


@dataclass(frozen=True)
class DropSnapshot:
    """Order to remove a snapshot from disk."""

    key: SlotKey
    total: int
    epoch: int


@dataclass(frozen=True)
class DropAttempt:
    """Order to remove all snapshots of an attempt from disk."""

    run: str
    attempt: int


@dataclass(frozen=True)
class DropBlob:
    """Order to remove a blob (a state to resume from, or large arguments) from disk."""

    name: str


Drop = DropSnapshot | DropAttempt | DropBlob


@dataclass
class _Blob:
    size: int
    touched: float
    credential: str = ""
    """Digest of the credential token of the blob's sender; "" = not known, because the coordinator was restarted
    since."""


class SnapshotIndex:
    """Index of the snapshots and blobs on disk."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._snapshots: dict[tuple[str, int], dict[SlotKey, list[DurableSnapshot]]] = {}
        """(run, attempt) -> snapshots of its slots, grouped so that an attempt can be dropped without a search."""
        self._blobs: dict[str, _Blob] = {}
        self._drops: list[Drop] = []
        self.used = 0
        """Number of bytes of all snapshots and blobs."""
        self.coming = 0
        """Number of bytes that transfers under way have declared, counted so that transfers together do not exceed the
        budget."""

    @property
    def free(self) -> int:
        return max(0, self._limits.budget - self.used - self.coming)

    @contextmanager
    def expecting(self, size: int) -> Iterator[None]:
        """Return a context during which a value of this size is counted as in transfer."""
        self.coming += size
        try:
            yield
        finally:
            self.coming -= size

    def load(
        self, snapshots: Iterable[tuple[SlotKey, DurableSnapshot]], blobs: Iterable[tuple[str, int]], now: float
    ) -> None:
        """Add the snapshots and blobs that the database holds at the start."""
        for key, kept in snapshots:
            self.add(key, kept)
        for name, size in blobs:
            self.add_blob(name, size, now)

    def take_drops(self) -> list[Drop]:
        """Return the values that may be removed from disk since the last call."""
        drops, self._drops = self._drops, []
        return drops

    # ------------------------------------------------------------------------------------------------ snapshots

    def snapshots(self, key: SlotKey) -> list[DurableSnapshot]:
        """Return the slot's snapshots, oldest first."""
        return list(self._of(key))

    def _of(self, key: SlotKey) -> Sequence[DurableSnapshot]:
        of_attempt = self._snapshots.get((key.run, key.attempt))
        return of_attempt.get(key, ()) if of_attempt is not None else ()

    def find(self, key: SlotKey, total: int, epoch: int) -> DurableSnapshot:
        """Return the snapshot at this position. If the index does not have the snapshot, for example because the
        attempt is over, return one with a size of 0."""
        there = (kept for kept in self._of(key) if (kept.total, kept.epoch) == (total, epoch))
        return next(there, DurableSnapshot(total, epoch, 0))

    def attempts(self) -> set[tuple[str, int]]:
        return set(self._snapshots)

    def why_refused(self, key: SlotKey, size: int) -> str:
        """Return the reason why a snapshot of this size may not be written now; "" if it may."""
        if size > self._limits.value_max:
            return (
                f"a snapshot must have at most {self._limits.value_max} bytes, got {size}: return less from the "
                "loader's state_dict()"
            )
        share = self._limits.cadence_share if self._of(key) else 1.0
        limit = int(self._limits.budget * share)
        if self.used + self.coming + size > limit:
            used = f"{self.used} of {limit} bytes of the coordinator's snapshot budget are in use"
            return f"a snapshot of {size} bytes does not fit into the budget: {used}; {_MORE}"
        return ""

    def add(self, key: SlotKey, kept: DurableSnapshot) -> None:
        """Add a snapshot that is on disk. It replaces a snapshot of the same position."""
        others = []
        for old in self._of(key):
            if (old.total, old.epoch) == (kept.total, kept.epoch):
                self.used -= old.size
            else:
                others.append(old)
        # Sorted by epoch first: an abandoned epoch may have useless snapshots beyond its last delivered batch.
        of_attempt = self._snapshots.setdefault((key.run, key.attempt), {})
        of_attempt[key] = sorted([*others, kept], key=lambda one: (one.epoch, one.total))
        self.used += kept.size

    def trim(self, key: SlotKey, edge: int) -> None:
        """Drop the slot's old snapshots. `edge`: the slot's total at the oldest position to which the box can still
        return.

        The newest snapshot below `edge` from which any loader can restart (`is_sure`) is kept, with all newer
        snapshots. If there is no such snapshot below `edge`, the newest one below `edge` takes its place.

        Snapshots are ordered by epoch and then by total, because a snapshot of an abandoned epoch can have a higher
        total than later ones.
        """
        kept = self._of(key)
        if not kept:
            return
        below = [index for index, snapshot in enumerate(kept) if snapshot.total < edge]
        sure = [index for index in below if kept[index].is_sure]
        first = min((sure or below)[-1:], default=0)
        for old in kept[:first]:
            self.used -= old.size
            self._drops.append(DropSnapshot(key, old.total, old.epoch))
        self._snapshots[key.run, key.attempt][key] = list(kept[first:])

    def drop_beyond(self, key: SlotKey, total: int) -> None:
        """Drop the slot's snapshots after its batch `total`, whose content is not valid any more."""
        for old in [kept for kept in self._of(key) if kept.total > total]:
            self.used -= old.size
            self._drops.append(DropSnapshot(key, old.total, old.epoch))
            self._snapshots[key.run, key.attempt][key].remove(old)

    def discard(self, key: SlotKey, kept: DurableSnapshot) -> None:
        """Drop a snapshot that was written but is not needed, and the one of the same position that it replaced."""
        for old in [one for one in self._of(key) if (one.total, one.epoch) == (kept.total, kept.epoch)]:
            self.used -= old.size
            self._snapshots[key.run, key.attempt][key].remove(old)
        self._drops.append(DropSnapshot(key, kept.total, kept.epoch))

    def drop_attempt(self, run: str, attempt: int) -> None:
        for kept in self._snapshots.pop((run, attempt), {}).values():
            self.used -= sum(snapshot.size for snapshot in kept)
        self._drops.append(DropAttempt(run, attempt))

    # ---------------------------------------------------------------------------------------------------- blobs

    def has_blob(self, name: str) -> bool:
        return name in self._blobs

    def blob_size(self, name: str) -> int:
        """Return the blob's size in bytes; 0 for an unknown blob."""
        blob = self._blobs.get(name)
        return 0 if blob is None else blob.size

    def why_blob_refused(self, size: int, credential: str = "") -> str:
        """Return the reason why a blob of this size may not be written now; "" if it may. `credential`: digest of the
        credential token of its sender."""
        if size > self._limits.value_max:
            return (
                f"a stored value must have at most {self._limits.value_max} bytes, got {size}: give input_fn smaller "
                "arguments, or return less from the loader's state_dict()"
            )
        if self.used + self.coming + size > self._limits.budget:
            used = f"{self.used} of {self._limits.budget} bytes of the coordinator's budget are in use"
            return f"its {size} bytes do not fit into the budget: {used}; {_MORE}"
        shares = [("such values", list(self._blobs.values()), self._limits.blob_share)]
        if credential:
            own = [blob for blob in self._blobs.values() if blob.credential == credential]
            shares.append(("such values from one token", own, self._limits.blob_token_share))
        for what, blobs, share in shares:
            held, limit = sum(blob.size for blob in blobs), int(self._limits.budget * share)
            if held + size > limit:
                used = f"{held} of {limit} bytes of the coordinator's budget for {what} are in use"
                return f"its {size} bytes do not fit into the budget: {used}; {_MORE}"
        return ""

    def spare(self, drop: Drop) -> None:
        """Cancel the drop of a value that is about to be written again."""
        self._drops = [other for other in self._drops if other != drop]

    def add_blob(self, name: str, size: int, now: float, credential: str = "") -> None:
        """Add a blob that is on disk. The age of a known blob is counted from now."""
        known = self._blobs.get(name)
        if known is not None:
            known.touched = now
            return
        self.used += size
        self._blobs[name] = _Blob(size, now, credential)

    def drop_idle_blobs(self, named: set[str], now: float) -> None:
        """Drop the blobs that no open attempt uses and that were not sent for `limits.blob_idle_s` seconds. `named`:
        names of the blobs in use."""
        for name, blob in list(self._blobs.items()):
            if name in named:
                blob.touched = now
            elif now - blob.touched > self._limits.blob_idle_s:
                del self._blobs[name]
                self.used -= blob.size
                self._drops.append(DropBlob(name))
