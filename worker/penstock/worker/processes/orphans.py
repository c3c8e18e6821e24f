"""Cleanup after a dead runner: its orphaned processes, and the shared memory of torch's loader processes.

A runner is a subreaper, so what its user code starts becomes a child of the fork server when it dies, and of the daemon
when that dies. A child of theirs that Penstock did not start is an orphan, and is killed. Two kinds that clean up and
end by themselves get a few seconds: multiprocessing's resource tracker and torch's manager of shared memory. Only own
children are examined, so a reused process id is never killed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

from penstock.runtime.process.end import reap_orphan, signal_child
from penstock.runtime.process.watch import stat_of

GRACE_S = 3.5
"""Seconds that orphans which clean up get. torch's manager waits for 2 s after its last user."""
_SHARED_MEMORY = Path("/dev/shm")


def forget_shared_memory(pids: Collection[int]) -> None:
    """Remove files in /dev/shm of dead processes. torch unlinks one right after creation, so it stays only after a kill
    in between."""
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
    def __init__(self) -> None:
        self._spared: dict[int, float] = {}  # pid -> time at which the orphan is killed, monotonic seconds

    def end(self, own_pids: Collection[int]) -> bool:
        """Kill and reap orphans. Return True if some live: then call again soon. own_pids: children started by this
        process, which do not count, nor do those in its process group."""
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
                signal_child(pid)
        self._spared = spared
        return bool(living)

    def spares(self, own_pids: Collection[int]) -> bool:
        return any(map(_cleans_up, _orphans_of(own_pids)))


def _orphans_of(own_pids: Collection[int]) -> list[int]:
    group = os.getpgrp()
    return [pid for pid in own_children() if pid not in own_pids and _group_of(pid) not in (group, None)]


def own_children() -> list[int]:
    """Return the children that the kernel lists, quickly also on a busy machine. One that ends meanwhile may be
    missing."""
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
