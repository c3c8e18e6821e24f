"""Memory and processor time that a runner and all its descendants use.

Memory is the proportional share of anonymous memory, in RAM and swap: a page of N processes counts 1/N, so what came by
forks is not counted twice. Shared memory (ring, progress page, torch's tensors) and mapped files are not counted. The
kernel takes 20 ms a GiB for the shares; the plain size, never less, is almost free. So shares are read only if plain
sizes exceed the limit. Where the kernel hides shares (another user's process, without CAP_SYS_PTRACE, or an undumpable
one), the plain size counts.

/proc/PID/schedstat holds the times in which the main thread ran and waited for a processor. If it does neither, it is
stopped or waits for a disk, a peer or a thread; one on a busy machine waits for a processor. So a deadline that counts
only the time with neither works on an idle machine and on one with a load of 140.
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
    """Return the bytes held by the runner and its descendants; 0 if gone. enough: bytes up to which a rough result will
    do, in which shared memory counts for each process."""
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
    """Return the processors in this process's affinity mask, or fewer by its container's quota."""
    usable = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(usable, -(-int(allowed) // int(period))))
    except (OSError, ValueError):  # no cgroup, or "max"
        return usable


def _counted(pid: int) -> tuple[float, float] | None:
    """Return the seconds for which the main thread ran, and waited for a processor."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(ran) * 1e-9, int(waited) * 1e-9


@dataclass(frozen=True)
class ProcessorUse:
    cpu_s: float
    """Seconds in which the process and its descendants ran, over all threads."""
    delay_s: float
    """Seconds in which the main thread waited for a processor."""


NOTHING = ProcessorUse(0.0, 0.0)


def used_by(pid: int) -> ProcessorUse:
    counted = _counted(pid)
    return ProcessorUse(cpu_seconds(family(pid)), counted[1] if counted is not None else 0.0)


@dataclass
class ProcessorDemand:
    """Meter for the share of time in which a main thread runs or waits for a processor."""

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
    """Wait for `done`, or cancel it and raise TimeoutError if the main thread neither ran nor waited for a processor
    for `still_s` seconds, or after `most_s` seconds."""
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
