"""Processes below a worker daemon, as a test sees them from outside."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import census

__all__ = ["alive", "fork_servers", "has_ring", "memory_of", "runners"]


def fork_servers(daemon: int) -> list[int]:
    return census.children(daemon, "fork_server")


def runners(daemon: int) -> list[int]:
    """Return the runners that have sent something, oldest first. Helper processes have no ring."""
    return sorted(pid for pid in census.runners(daemon) if has_ring(pid))


def has_ring(pid: int) -> bool:
    """Return True if a runner, or its process of the present epoch, has mapped a ring, or the runner holds one between
    two epochs."""
    for process in (pid, *census.children(pid)):
        with contextlib.suppress(OSError):
            if "penstock-ring" in Path(f"/proc/{process}/maps").read_text():
                return True
            if any("penstock-ring" in os.readlink(fd) for fd in Path(f"/proc/{process}/fd").iterdir()):
                return True
    return False


def alive(pid: int) -> bool:
    return bool(census.alive([pid]))


def memory_of(pid: int) -> int:
    """Bytes in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
