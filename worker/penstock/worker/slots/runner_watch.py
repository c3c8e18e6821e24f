"""The watch over a slot's runner: activities, memory and speed.

An activity of half the loop's deadline is reported with the stack, so that the loop's timeout error can show both; a
slow runner is never killed. Above runner_memory a runner is replaced at a snapshot, far above it killed. The
coordinator balances slots by the rates: batches per second show the loop's speed; time per batch, without waits for
loop and ring, the runner's. It includes waits for a processor, which grow with more workers on the same cores, so these
are measured too. User code can write anything into the page, so impossible figures are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.proto.v1 import coordinator_pb2
from penstock.worker.processes.process_use import NOTHING, ProcessorUse, held_by
from penstock.worker.slots.durable_snapshots import DurableSnapshots
from penstock.worker.slots.slot_record import SlotRecord

HANG_S = 60.0
"""Seconds after which an activity is reported, if the loop's deadline is unknown."""
SHARE = 0.5
"""Share of the loop's deadline after which one is reported: the report takes time, and the loop may have waited
longer."""
LOOKS = 8
"""Least checks of an activity before it is reported."""
_IDLE = ("waiting", "sending")
_CALLS = {"input_fn": "input_fn", "iter": "iter()", "next": "next()", "state_dict": "state_dict()"}
_CALLS["load_state_dict"] = "load_state_dict()"


def hang_s(timeout_s: float) -> float:
    """timeout_s: the loop's deadline for a batch, 0 = unknown."""
    return SHARE * timeout_s if timeout_s > 0 else HANG_S


@dataclass
class Stall:
    """Activity and batches, and the monotonic time since which both are unchanged."""

    activity: str = "starting"
    total: int = -1
    since: float = 0.0

    def look(self, now: float, activity: str, for_s: float, total: int) -> float:
        """Return the seconds since both are unchanged. for_s: seconds since the activity began, from the page."""
        if (activity, total) != (self.activity, self.total):
            self.activity, self.total, self.since = activity, total, now
        self.since = max(self.since, now - for_s)
        return now - self.since

    @property
    def idle(self) -> bool:
        return self.activity in _IDLE

    def text(self, now: float, wall: float) -> str:
        """Return such as "in next() of batch 17 since 12:03:41 UTC by the worker's clock". wall: Unix time, seconds."""
        what = _CALLS.get(self.activity, self.activity)
        batch = f" of batch {self.total + 1}" if self.activity == "next" else ""
        clock = time.strftime("%H:%M:%S", time.gmtime(wall - (now - self.since)))
        return f"in {what}{batch} since {clock} UTC by the worker's clock"


MEMORY_S = 1.0
MEMORY_SHARE = 0.02
"""Share of a processor for measuring one runner: large ones are measured more rarely."""
HARD_LIMIT = 2
"""Multiple of the limit above which a runner is killed at once."""
SAVED_LOOK_S = 0.05
"""Seconds between two checks for savable progress of a runner to be replaced."""


class MemoryWatch:
    def __init__(
        self,
        slot: SlotRecord,
        durable: DurableSnapshots,
        lose: Callable[[str], None],
        spawn: Callable[[Awaitable[None]], asyncio.Task[None]],
    ) -> None:
        self._slot, self._durable, self._lose, self._spawn = slot, durable, lose, spawn

    async def run(self, pid: int, limit: int) -> None:
        """Measure until the slot ends. Above `limit` bytes save progress and replace the runner; above HARD_LIMIT times
        it kill it."""
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
            held += slot.store.bytes  # which the daemon holds for it
            most = max(most, held)
            what = f"it used {_mib(most)} of memory, above the limit of {_mib(limit)} (penstock worker --runner-memory)"
            far = held > HARD_LIMIT * limit
            if far and not (young and begun):
                # With the loss, report the batch that the runner was making, because that batch may be the cause.
                self._lose(f"was killed after batch {slot.progress_page.total}, because {what}")
            elif far or (saving is not None and saving.done()):
                slot.recycle, slot.outgrown = True, young
                self._lose(f"was replaced after batch {slot.progress_page.total}, because {what}")
            elif saving is None and held > limit and slot.ready.is_set():
                saving = self._spawn(self._save_progress())

    async def _save_progress(self) -> None:
        """Make progress durable first: the next runner would replay the same batches with as much memory. Wait until
        the loop has taken a batch after one of this runner's own snapshots, if any."""
        slot = self._slot
        await slot.begun.wait()
        while own_totals := [
            point.total for point in slot.store if not point.epoch_start and point.position not in slot.from_before
        ]:
            slot.progress_page.refresh()
            if own_totals[0] < slot.progress_page.delivered:
                break
            await asyncio.sleep(SAVED_LOOK_S)
        await self._durable.prepare_migration()


def _looked_at(pid: int, limit: int) -> tuple[int, float]:
    began = time.thread_time()
    held = held_by(pid, limit)
    return held, time.thread_time() - began


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


WINDOW_S = 1.0


@dataclass
class BatchRates:
    """Rates at the last reading. A batch under way counts as soon as it takes longer than usual."""

    since: float
    batches_per_s: float = 0.0
    batch_s: float = 0.0
    """Work per batch; 0 = unknown."""
    batch_cpu_s: float = 0.0
    """Processor time per batch; 0 = unknown."""
    batch_delay_s: float = 0.0
    """Waits for a processor per batch, within `batch_s`."""
    _total: int = 0
    _worked_s: float = 0.0
    _used: ProcessorUse = NOTHING
    """At the last reading with a new batch."""
    _done: int = 0

    def due(self, now: float) -> bool:
        return now - self.since >= WINDOW_S

    def look(self, now: float, total: int, worked_s: float, used: ProcessorUse = NOTHING) -> None:
        """Update from a reading, if due. worked_s: seconds spent on batches so far."""
        if not self.due(now):
            return
        self.batches_per_s = max(0, total - self._total) / (now - self.since)
        self.since, self._total = now, total
        spent, made = worked_s - self._worked_s, total - self._done
        if not math.isfinite(spent) or spent < 0 or made < 0:
            self._worked_s, self._done = (worked_s if math.isfinite(worked_s) else 0.0), total
            self._used = used
        elif made:
            self._set_rates(spent, used, made)
            self._worked_s, self._used, self._done = worked_s, used, total
        elif self.batch_s and spent > self.batch_s:
            self._set_rates(spent, used, 1)

    def _set_rates(self, spent: float, used: ProcessorUse, made: int) -> None:
        self.batch_s = spent / made
        self.batch_cpu_s = max(0.0, used.cpu_s - self._used.cpu_s) / made
        self.batch_delay_s = min(spent, max(0.0, used.delay_s - self._used.delay_s)) / made
