"""Processes below one of ours, as a test sees them from outside."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from census import children


def parents() -> dict[int, tuple[int, int]]:
    """pid -> (parent, group) of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found[int(entry.name)] = (int(fields[1]), int(fields[2]))
    return found


def children_of(pid: int) -> list[int]:
    """The children of a process, oldest first."""
    return sorted(child for child, (parent, _) in parents().items() if parent == pid)


def fork_servers(daemon: int) -> list[int]:
    """Below a worker daemon."""
    return children(daemon, "fork_server")


def runners(daemon: int) -> list[int]:
    """Below a worker daemon; those that have sent something. Scratch children have no ring."""
    below = [pid for fork_server in fork_servers(daemon) for pid in children_of(fork_server)]
    return [pid for pid in below if _has_ring(pid)]


def _has_ring(pid: int) -> bool:
    try:
        return "penstock-ring" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def alive(pid: int) -> bool:
    return pid in parents()


def eventually(holds: Callable[[], object], what: str, deadline_s: float = 30.0) -> None:
    """Wait until it holds."""
    until = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.01)


def memory_of(pid: int) -> int:
    """Bytes in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
