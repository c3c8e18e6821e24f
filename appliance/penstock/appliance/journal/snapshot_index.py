"""Index of snapshots.db: kept snapshots and blobs, without their data, and those that may be removed.

A slot may restart strictly before its last delivered batch, and states of the last `retention_steps` steps may be
requested. So the newest snapshot before this window is kept, and all newer ones. The window's beginning comes from
reported positions, not from the step alone: near an epoch's end, slots take the steps of those that have ended. Pure:
the service removes values from disk once their replacement is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from penstock.proto.rpc.bounds.reply_parts import VALUE_MAX

REPLAY_SHARE = 0.9
"""Share of the budget for snapshots that only shorten a replay; the rest is for first snapshots and saved states,
without which no run can start."""
BLOB_SHARE = 0.9
"""Share of the budget for blobs; the rest is for snapshots, without which no run can start."""
BLOB_TOKEN_SHARE = 0.6
"""Share of the budget for the blobs of one credential token, if there are several tokens."""
BLOB_IDLE_S = 3600.0
"""Age in seconds at which an unused blob is dropped; boxes send blobs before they open the run."""
_MORE = "end other jobs, or raise the budget (--budget, PENSTOCK_COORDINATOR_BUDGET)"


class SlotKey(NamedTuple):
    run: str
    attempt: int
    box: int
    slot: int


@dataclass(frozen=True, order=True)
class DurableSnapshot:
    total: int
    epoch: int
    size: int
    epoch_start: bool = False
    """True if taken at the start of an epoch, False if after a batch."""

    @property
    def is_sure(self) -> bool:
        """True if every loader can restart here: after a batch, or at the start of epoch 0. Some loaders begin a later
        epoch only in the first next(), so their state there is that of the epoch before, and would end at once."""
        return not self.epoch_start or self.epoch == 0


@dataclass(frozen=True)
class DropSnapshot:
    key: SlotKey
    total: int
    epoch: int


@dataclass(frozen=True)
class DropAttempt:
    run: str
    attempt: int


@dataclass(frozen=True)
class DropBlob:
    name: str


Drop = DropSnapshot | DropAttempt | DropBlob


@dataclass
class _Blob:
    size: int
    touched: float
    credential: str = ""
    """Digest of the sender's credential token; "" = not known since a restart."""


class SnapshotIndex:
    """Index of the snapshots and blobs on disk, in memory. `budget`: most bytes of all of them."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._snapshots: dict[tuple[str, int], dict[SlotKey, list[DurableSnapshot]]] = {}
        """(run, attempt) -> slot -> its snapshots, so that an attempt can be dropped without a search."""
        self._blobs: dict[str, _Blob] = {}
        self._drops: list[Drop] = []
        self.used = 0
        """Bytes of all snapshots and blobs on disk."""
        self.coming = 0
        """Bytes declared by transfers under way, so that together they do not exceed the budget."""

    @property
    def free(self) -> int:
        return max(0, self.budget - self.used - self.coming)

    @contextmanager
    def expecting(self, size: int) -> Iterator[None]:
        """Return a context during which a value of `size` bytes counts as being received."""
        self.coming += size
        try:
            yield
        finally:
            self.coming -= size

    def load(
        self, snapshots: Iterable[tuple[SlotKey, DurableSnapshot]], blobs: Iterable[tuple[str, int]], now: float
    ) -> None:
        """Add what the database holds at the start, blobs as (name, size). `now`: monotonic seconds."""
        for key, kept in snapshots:
            self.add(key, kept)
        for name, size in blobs:
            self.add_blob(name, size, now)

    def take_drops(self) -> list[Drop]:
        """Return the orders to remove values given since the last call."""
        drops, self._drops = self._drops, []
        return drops

    # ------------------------------------------------------------------------------------------------ snapshots

    def snapshots(self, key: SlotKey) -> list[DurableSnapshot]:
        """Return the slot's snapshots, oldest first."""
        return list(self._of(key))

    def _of(self, key: SlotKey) -> Sequence[DurableSnapshot]:
        return self._snapshots.get((key.run, key.attempt), {}).get(key, ())

    def find(self, key: SlotKey, total: int, epoch: int) -> DurableSnapshot:
        """Return the snapshot at this position; one of size 0 if the index does not have it."""
        there = (kept for kept in self._of(key) if (kept.total, kept.epoch) == (total, epoch))
        return next(there, DurableSnapshot(total, epoch, 0))

    def attempts(self) -> set[tuple[str, int]]:
        return set(self._snapshots)

    def why_refused(self, key: SlotKey, size: int) -> str:
        """Return why a snapshot of `size` bytes may not be written now, with a remedy; "" if it may."""
        if size > VALUE_MAX:
            return f"a snapshot must have at most {VALUE_MAX} bytes, got {size}: return less from state_dict()"
        share = REPLAY_SHARE if self._of(key) else 1.0
        limit = int(self.budget * share)
        if self.used + self.coming + size > limit:
            used = f"{self.used + self.coming} of {limit} bytes of the coordinator's snapshot budget are in use"
            return f"a snapshot of {size} bytes does not fit into the budget: {used}; {_MORE}"
        return ""

    def add(self, key: SlotKey, kept: DurableSnapshot) -> None:
        """Add a snapshot that is on disk, in place of one of the same position."""
        others = []
        for old in self._of(key):
            if (old.total, old.epoch) == (kept.total, kept.epoch):
                self.used -= old.size
            else:
                others.append(old)
        # By epoch first, then by total: snapshots beyond the last delivered batch of an abandoned epoch are useless,
        # but have a higher total than later ones.
        of_attempt = self._snapshots.setdefault((key.run, key.attempt), {})
        of_attempt[key] = sorted([*others, kept], key=lambda one: (one.epoch, one.total))
        self.used += kept.size

    def trim(self, key: SlotKey, edge: int) -> None:
        """Drop old snapshots. `edge`: the slot's batches at the oldest position to which the box can return.

        Of those below `edge`, the newest `is_sure` one is kept, else the newest, and all after it. They are ordered by
        epoch, then by total, because one of an abandoned epoch can have a higher total than later ones.
        """
        kept = self._of(key)
        if not kept:
            return
        below = [index for index, snapshot in enumerate(kept) if snapshot.total < edge]
        sure = [index for index in below if kept[index].is_sure]
        first = min((sure or below)[-1:], default=0)
        for old in kept[:first]:
            self._drop(key, old)
        self._snapshots[key.run, key.attempt][key] = list(kept[first:])

    def _drop(self, key: SlotKey, old: DurableSnapshot) -> None:
        self.used -= old.size
        self._drops.append(DropSnapshot(key, old.total, old.epoch))

    def drop_beyond(self, key: SlotKey, total: int) -> None:
        """Drop the slot's snapshots after batch `total`, which a change of the mixture made invalid."""
        for old in [kept for kept in self._of(key) if kept.total > total]:
            self._drop(key, old)
            self._snapshots[key.run, key.attempt][key].remove(old)

    def discard(self, key: SlotKey, kept: DurableSnapshot) -> None:
        """Drop a snapshot written too late, and the one of the same position that it has replaced on disk."""
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
        """Return the bytes of the blob; 0 if unknown."""
        blob = self._blobs.get(name)
        return 0 if blob is None else blob.size

    def why_blob_refused(self, size: int, credential: str = "") -> str:
        """Return why a blob may not be written now, with a remedy; "" if it may. `credential`: digest of the token; ""
        = no limit for a single one."""
        if size > VALUE_MAX:
            return f"a stored value must have at most {VALUE_MAX} bytes, got {size}: give input_fn smaller arguments"
        if self.used + self.coming + size > self.budget:
            used = f"{self.used + self.coming} of {self.budget} bytes of the coordinator's budget are in use"
            return f"its {size} bytes do not fit into the budget: {used}; {_MORE}"
        shares = [("such values", list(self._blobs.values()), BLOB_SHARE)]
        if credential:
            own = [blob for blob in self._blobs.values() if blob.credential == credential]
            shares.append(("such values from one token", own, BLOB_TOKEN_SHARE))
        for what, blobs, share in shares:
            held, limit = sum(blob.size for blob in blobs), int(self.budget * share)
            if held + size > limit:
                used = f"{held} of {limit} bytes of the coordinator's budget for {what} are in use"
                return f"its {size} bytes do not fit into the budget: {used}; {_MORE}"
        return ""

    def spare(self, drop: Drop) -> None:
        """Cancel an order to remove a value that is about to be written again."""
        self._drops = [other for other in self._drops if other != drop]

    def add_blob(self, name: str, size: int, now: float, credential: str = "") -> None:
        """Add a blob that is on disk; of a known one, only the age begins again. `now`: monotonic seconds."""
        known = self._blobs.get(name)
        if known is not None:
            known.touched = now
            return
        self.used += size
        self._blobs[name] = _Blob(size, now, credential)

    def release_blobs(self, names: Iterable[str]) -> None:
        """Let `drop_idle_blobs` drop these blobs at once, unless an open attempt uses them."""
        for name in names:
            if name in self._blobs:
                self._blobs[name].touched = -math.inf

    def drop_idle_blobs(self, named: set[str], now: float) -> None:
        """Drop the blobs not in `named` (in use) that were neither sent nor used for BLOB_IDLE_S seconds."""
        for name, blob in list(self._blobs.items()):
            if name in named:
                blob.touched = now
            elif now - blob.touched > BLOB_IDLE_S:
                del self._blobs[name]
                self.used -= blob.size
                self._drops.append(DropBlob(name))
