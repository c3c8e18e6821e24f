"""Processor time of other processes: time in which a process ran, and time in which it waited for a processor.

Linux counts both for each thread, in nanoseconds. /proc/PID/schedstat holds the times of the main thread, and only
these are used here; `ProcessorUse.cpu_s` alone counts all threads. A main thread that neither runs nor waits for a
processor is stopped, or waits for a disk, a peer or another thread. A process that is slow because the machine is busy
has a high second number. So a deadline that counts only the time in which the main thread neither ran nor waited works
on an idle machine and on one with a load of 140.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.web.prometheus import cpu_seconds
from penstock.worker.resources.memory_use import family

__all__ = ["NOTHING", "ProcessorDemand", "ProcessorUse", "cores", "used_by", "wait_while_active"]

LOOK_S = 0.25
"""Seconds between two measurements of a process while waiting for it."""
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores(quota: Path = _CGROUP_QUOTA) -> int:
    """Return the number of processors that this process may use: those in its affinity mask, or fewer if its container
    has a smaller quota."""
    usable = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(usable, -(-int(allowed) // int(period))))
    except (OSError, ValueError):  # no cgroup, or "max"
        return usable


def _counted(pid: int) -> tuple[float, float] | None:
    """Return the seconds for which a process's main thread ran, and the seconds for which it waited for a processor.
    Return None if the process is gone, or if the kernel does not report these times."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(ran) * 1e-9, int(waited) * 1e-9


@dataclass(frozen=True)
class ProcessorUse:
    """Processor time of a process, counted from its start."""

    cpu_s: float
    """Seconds in which the process and its descendants ran, summed over all threads."""
    delay_s: float
    """Seconds in which the process's main thread waited for a processor."""


NOTHING = ProcessorUse(0.0, 0.0)


def used_by(pid: int) -> ProcessorUse:
    """Return the processor time that a process has used; `NOTHING` if the process is gone."""
    counted = _counted(pid)
    return ProcessorUse(cpu_seconds(family(pid)), counted[1] if counted is not None else 0.0)


@dataclass
class ProcessorDemand:
    """Meter for the share of time in which a process's main thread runs or waits for a processor."""

    pid: int
    _at: float = 0.0
    _wanted: float = 0.0

    def look(self, now: float) -> float:
        """Return the share of the time since the last call in which the main thread ran or waited for a processor.
        Return 1.0 at the first call, and if these times cannot be read."""
        counted = _counted(self.pid)
        if counted is None:
            return 1.0
        wanted, before, since = sum(counted), self._wanted, self._at
        self._wanted, self._at = wanted, now
        return (wanted - before) / (now - since) if since and now > since else 1.0


async def wait_while_active(done: Awaitable[object], pid: int, still_s: float, most_s: float) -> None:
    """Wait for `done`, which process `pid` must complete, as long as the main thread of the process runs or waits for a
    processor. If the wait fails, cancel `done`.

    Raises:
        TimeoutError: the main thread neither ran nor waited for a processor for `still_s` seconds (or its times could
            not be read), or the whole wait took `most_s` seconds.
    """
    waiting = asyncio.ensure_future(done)
    began = moved = time.monotonic()
    seen = _counted(pid)
    try:
        while not (await asyncio.wait([waiting], timeout=LOOK_S))[0]:
            now, counted = time.monotonic(), _counted(pid)
            if counted != seen:
                seen, moved = counted, now
            if now - moved >= still_s or now - began >= most_s:
                raise TimeoutError
        waiting.result()
    finally:
        waiting.cancel()
