"""Processes below a worker daemon, as a test sees them from outside."""

from __future__ import annotations

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
    try:
        return "penstock-ring" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def alive(pid: int) -> bool:
    return bool(census.alive([pid]))


def memory_of(pid: int) -> int:
    """Bytes in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
