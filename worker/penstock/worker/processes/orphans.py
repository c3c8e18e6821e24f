"""Removal of what a dead runner leaves behind: its orphaned processes, and the shared memory of torch's loader
processes.

A runner is a subreaper: a process that its user code starts stays a descendant of the runner, even after a double fork
or in a session of its own. When the runner dies, the process becomes a child of the fork server; when the fork server
dies, of the daemon. So any child of theirs that Penstock did not start is an orphan, and is killed. Two kinds end by
themselves once their users are gone and clean up as they do, so they get a moment: multiprocessing's resource tracker
and torch's manager of shared memory.

Only a process's own children are looked at, so a process id that the kernel has reused is never killed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

from penstock.runtime.process.end import kill_child, reap_orphan
from penstock.runtime.process.watch import stat_of

__all__ = ["GRACE_S", "Orphans", "forget_shared_memory", "own_children"]

GRACE_S = 3.5
"""Seconds that orphans get to clean up before they are killed. torch's manager of shared memory waits for 2 s after its
last user."""
_SHARED_MEMORY = Path("/dev/shm")


def forget_shared_memory(pids: Collection[int]) -> None:
    """Remove the shared memory files that torch has left for these dead processes. torch unlinks such a file right
    after it created it, so a process that is killed in between leaves the file."""
    if not pids:
        return
    owners = {str(pid) for pid in pids}
    with contextlib.suppress(OSError):
        for entry in os.scandir(_SHARED_MEMORY):
            parts = entry.name.split("_")
            if len(parts) == 4 and parts[0] == "torch" and parts[1] in owners:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


class Orphans:
    """Orphans of this process: children that it did not start, but inherited when their parent died."""

    def __init__(self) -> None:
        self._spared: dict[int, float] = {}  # pid -> end of its time to clean up, monotonic seconds

    def end(self, own_pids: Collection[int]) -> bool:
        """Kill the orphans, and reap the dead ones. Return True if some are left; the caller must then call again soon.

        own_pids: children that this process started. Children in this process's own process group are no orphans
        either.
        """
        living, dead = [], set()
        for pid in _orphans_of(own_pids):
            if reap_orphan(pid):
                dead.add(pid)
            else:
                living.append(pid)
        forget_shared_memory(dead)
        now = time.monotonic()
        spared = {}
        for pid in living:
            until = self._spared.get(pid, now + GRACE_S if _cleans_up(pid) else 0.0)
            if now < until:
                spared[pid] = until
            else:
                kill_child(pid)
        self._spared = spared
        return bool(living)

    def spares(self, own_pids: Collection[int]) -> bool:
        """Return whether there is an orphan that gets time to clean up."""
        return any(map(_cleans_up, _orphans_of(own_pids)))


def _orphans_of(own_pids: Collection[int]) -> list[int]:
    group = os.getpgrp()
    return [pid for pid in own_children() if pid not in own_pids and _group_of(pid) not in (group, None)]


def own_children() -> list[int]:
    """Return the process ids of this process's children. A child that ends meanwhile may be missed.

    The kernel keeps a list of children for each thread of this process. So the time to read them does not grow with the
    number of processes on the machine.
    """
    children: list[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError), open(f"/proc/self/task/{thread}/children") as file:
                children += map(int, file.read().split())
    except FileNotFoundError:  # a kernel without these lists
        me = [str(os.getpid())]
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and stat_of(int(pid))[1:2] == me]
    return children


def _group_of(pid: int) -> int | None:
    """Return the id of a process's process group; None if the process is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _cleans_up(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"multiprocessing.resource_tracker" in command or b"torch_shm_manager" in command
