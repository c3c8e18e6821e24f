"""Memory and processor time that a runner and all its descendants use.

Memory is the proportional share of anonymous memory, in RAM and in swap: a page that N processes share counts 1/N in
each. So neither the fork server's memory nor memory that a loader's worker processes have from a fork is counted twice.
Shared memory (the ring, the progress page, tensors that torch's worker processes pass on) and mapped files are not
counted. The kernel needs 20 ms for each GiB to compute proportional shares. The plain size of a process, in which a
shared page counts in full, costs almost nothing and is never less. So the shares are read only if the sum of the plain
sizes is above the limit. The kernel hides the shares of another user's process (without CAP_SYS_PTRACE) and of a
process that made itself undumpable; for these the plain size counts.

Linux counts for each thread the time in which it ran, and in which it waited for a processor. /proc/PID/schedstat holds
those of the main thread. A main thread that neither runs nor waits for a processor is stopped, or waits for a disk, a
peer or another thread. A process that is slow because the machine is busy has a high second number. So a deadline that
counts only the time in which the main thread neither ran nor waited works on an idle machine and on one with a load of
140.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.web.prometheus import cpu_seconds


def held_by(runner: int, enough: int = 0) -> int:
    """Return the memory that the runner and all its descendants hold, in bytes; 0 if the runner is gone.

    enough: number of bytes up to which a rough result, in which shared memory counts once for each process, will do.
    """
    all_of_it = family(runner)  # the runner is a subreaper: all its descendants stay below it
    most = sum(_sizes(pid, "status", "RssAnon", "VmSwap") for pid in all_of_it)
    if most <= enough:
        return most
    return sum(
        _sizes(pid, "smaps_rollup", "Pss_Anon", "SwapPss") or _sizes(pid, "status", "RssAnon", "VmSwap")
        for pid in all_of_it
    )


def family(pid: int) -> list[int]:
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with contextlib.suppress(OSError):
                    pids += map(int, (task / "children").read_text().split())
    return pids


def _sizes(pid: int, file: str, *names: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields[name].split()[0]) << 10 for name in names if name in fields)


LOOK_S = 0.25
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
    """Return the seconds for which a process's main thread ran, and waited for a processor; None if they are not
    known."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(ran) * 1e-9, int(waited) * 1e-9


@dataclass(frozen=True)
class ProcessorUse:
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
        counted = _counted(self.pid)
        if counted is None:
            return 1.0
        wanted, before, since = sum(counted), self._wanted, self._at
        self._wanted, self._at = wanted, now
        return (wanted - before) / (now - since) if since and now > since else 1.0


async def wait_while_active(done: Awaitable[object], pid: int, still_s: float, most_s: float) -> None:
    """Wait for `done`, which process `pid` must complete, as long as its main thread runs or waits for a processor. If
    the wait fails, cancel `done`.

    Raises TimeoutError if the main thread neither ran nor waited for a processor for `still_s` seconds, or the whole
    wait took `most_s` seconds.
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
