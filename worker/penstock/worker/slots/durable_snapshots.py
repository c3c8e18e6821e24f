"""Durable restart points of a slot: copies at the coordinator, from which a runner on another worker can continue. A
launch's first one becomes durable before any batch can be fetched, so that every delivered batch can be recovered.
Later runners can make it again, so if it is large only its position is kept."""

from __future__ import annotations

import asyncio
import random

from penstock.proto.errors import JournalError, OverloadedError, PenstockError, SupersededError, UnknownRunError
from penstock.proto.v1 import coordinator_pb2
from penstock.worker.processes.child_processes import about_slot
from penstock.worker.slots.slot_record import COORDINATOR_ERRORS, SlotHost, SlotRecord
from penstock.worker.slots.snapshots import HEADER, StoredSnapshot

LARGE = 1 << 20
"""Bytes above which only the position of a launch's first restart point is kept."""
AGAIN_S = 0.2
IDLE_S = 5.0
"""Longest pause in seconds between two looks for batches that the loop has taken, while it takes none."""


class DurableSnapshots:
    def __init__(self, slot: SlotRecord, host: SlotHost) -> None:
        self._slot, self._host = slot, host
        self.refused = ""
        """Why the coordinator does not keep the point sent last; "" = it does, or none was sent."""

    async def keep_up(self) -> None:
        """Make the newest point before the last delivered batch durable, at the quota's interval."""
        slot = self._slot
        await slot.ready.wait()
        # The slots of a job start together, so each begins after a random delay.
        await asyncio.sleep(random.random() * self._host.snapshot_quota.every_s)
        delivered, pause_s = -1, 0.0
        while True:
            size = 0
            # Skip restart points beyond the last delivered batch: the loop may still abandon that part of the stream.
            slot.progress_page.refresh()
            is_idle, delivered = slot.progress_page.delivered == delivered, slot.progress_page.delivered
            for point in self.newest(delivered):
                if not point.durable:
                    size += len(point.data)
                    await self.make(point)
            least_s = self._host.snapshot_quota.pause_s(size)
            pause_s = max(least_s, min(2 * pause_s, IDLE_S)) if is_idle else least_s
            await asyncio.sleep(pause_s)

    def newest(self, below: int | None = None) -> list[StoredSnapshot]:
        """Return the newest point to restore from, if any. below: it must lie before this batch of the slot."""
        slot = self._slot
        return [point for point in slot.store if below is None or point.total < below][-1:]

    async def prepare_migration(self) -> None:
        """Make durable the newest point before the last batch that the loop took. That batch is between the last one
        reported to the runner and the last one made, so it may take two."""
        self._slot.progress_page.refresh()
        for point in self.newest(self._slot.progress_page.delivered) + self.newest():
            if not point.durable:
                await self.make(point)

    async def make(self, point: StoredSnapshot, *, waits_for_disk: bool = True) -> None:
        """Send a point, waiting while the coordinator is unreachable or overloaded, or its disk is full. One that was
        refused or could not be sent counts as durable too, so that it is not sent again."""
        slot, logged = self._slot, False
        data = b"" if point.begins and len(point.data) > LARGE else point.data
        place = {name: getattr(point, name) for name in HEADER}
        header = coordinator_pb2.SnapshotHeader(**about_slot(slot.assignment), **place, size=len(data))
        while True:
            try:
                refused = (await self._host.coordinator.put_snapshot(header, data)).refused
                self._count(refused, len(data))
                break
            except COORDINATOR_ERRORS as error:  # OverloadedError is one of them
                if isinstance(error, JournalError) and not waits_for_disk:
                    self.refused = error.message
                    break
                if not logged:
                    slot.log.warning("%s: a snapshot waits for the coordinator: %s", slot.name, error.message)
                logged = True
                await asyncio.sleep(error.retry_after_s if isinstance(error, OverloadedError) else AGAIN_S)
            except (SupersededError, UnknownRunError) as error:
                # The run ended or the slot moved during the call; the next heartbeat's reply ends this slot.
                slot.log.debug("%s: a snapshot is not needed any more: %s", slot.name, error.message)
                break
            except PenstockError as error:
                slot.log.warning(
                    "%s: a snapshot could not be sent to the coordinator, so a recovery replays from an older one: %s",
                    slot.name,
                    error.message,
                )
                self.refused = error.message
                break
        point.durable = True

    def _count(self, refused: str, size: int) -> None:
        slot, counters = self._slot, self._host.counters
        if refused:
            counters.snapshots_refused += 1
        else:
            counters.snapshots_sent += 1
            counters.snapshot_sent_bytes += size
        if refused and not self.refused:
            why = "the coordinator does not keep a snapshot of the loader, so a recovery replays from an older one"
            slot.log.warning("%s: %s: %s", slot.name, why, refused)
        self.refused = refused
