"""The watch over a runner's memory, if the setting runner_memory limits the memory. A runner above the limit is
replaced at a snapshot. A runner far above the limit is killed."""

from __future__ import annotations

import asyncio
import contextlib
import time

from penstock.proto.v1 import coordinator_pb2
from penstock.worker.resources.memory_use import held_by
from penstock.worker.slots.durable_snapshots import DurableSnapshots
from penstock.worker.slots.slot_interfaces import SlotContext

__all__ = ["MemoryWatch"]

MEMORY_S = 1.0
"""Seconds between two measurements of a runner's memory."""
MEMORY_SHARE = 0.02
"""Largest share of a processor that measuring one runner's memory may take. Measuring a large runner takes longer, so
large runners are measured more rarely."""
HARD_LIMIT = 2
"""Multiple of the memory limit above which a runner is killed at once."""
SAVED_LOOK_S = 0.05
"""Seconds between two checks whether a runner that is about to be replaced has made progress that can be saved: a
snapshot, and a batch after it that the training loop has taken."""


class MemoryWatch:
    """Watch over the memory of one slot's runner."""

    def __init__(self, slot: SlotContext, durable: DurableSnapshots) -> None:
        self._slot, self._durable = slot, durable

    async def run(self, pid: int, limit: int) -> None:
        """Measure the memory of the runner and its descendants until the slot ends. If it exceeds the limit, save the
        runner's progress, and replace the runner by another one. If it exceeds HARD_LIMIT times the limit, kill the
        runner at once.

        pid: process id of the runner. limit: largest memory, in bytes.
        """
        slot = self._slot
        took, most, begun, young = 0.0, 0, False, True
        saving: asyncio.Task[None] | None = None
        while slot.phase != coordinator_pb2.FAILED:
            period = max(MEMORY_S, took / MEMORY_SHARE)
            if saving is not None:  # saving waits for an unreachable coordinator, and meanwhile the runner grows
                await asyncio.wait((saving,), timeout=period)
            elif begun:
                await asyncio.sleep(period)
            else:  # measure once right after the first batch
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(slot.begun.wait(), period)
            if saving is None:
                young = not begun
            begun = slot.begun.is_set()
            held, took = await asyncio.to_thread(_looked_at, pid, limit)
            most = max(most, held)
            what = f"it used {_mib(most)} of memory, above the limit of {_mib(limit)} (penstock worker --runner-memory)"
            far = held > HARD_LIMIT * limit
            if far and not (young and begun):
                # With the loss, report the batch that the runner was making, because that batch may be the cause.
                slot.lose(f"was killed after batch {slot.progress_page.total}, because {what}")
            elif far or (saving is not None and saving.done()):
                slot.recycle, slot.outgrown = True, young
                slot.lose(f"was replaced after batch {slot.progress_page.total}, because {what}")
            elif saving is None and held > limit and slot.ready.is_set():
                saving = slot.spawn(self._save_progress())

    async def _save_progress(self) -> None:
        """Make this runner's progress durable (kept by the coordinator) before the runner is replaced. Otherwise the
        next runner would replay the same batches, and use the same amount of memory.

        Wait until the training loop has taken a batch after one of the runner's own snapshots. Return at once if there
        is none.
        """
        slot = self._slot
        await slot.begun.wait()
        while own := [
            point.total for point in slot.store if not point.epoch_start and point.position not in slot.from_before
        ]:
            slot.progress_page.refresh()
            if own[0] < slot.progress_page.delivered:
                break
            await asyncio.sleep(SAVED_LOOK_S)
        await self._durable.prepare_migration()


def _looked_at(pid: int, limit: int) -> tuple[int, float]:
    """Return the memory that a runner and its descendants hold in bytes, and the processor time that measuring it took
    in seconds."""
    began = time.thread_time()
    held = held_by(pid, limit)
    return held, time.thread_time() - began


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
