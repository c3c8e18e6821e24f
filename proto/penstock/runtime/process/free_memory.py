"""Free memory for a process: that of the machine, or what the process's control group leaves, whichever is less."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Return the bytes that can be allocated before the kernel kills a process: `MemAvailable`, or what is left of its
    control groups' limits (version 2; file pages count as free), whichever is less; a huge number without /proc."""
    return min([_of_machine(), *map(_of_group, _own_groups())])


def _of_machine() -> int:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 1 << 62


def _own_groups() -> list[Path]:
    try:
        path = next(line[3:] for line in OWN_GROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    own = GROUPS / path.lstrip("/")
    return [group for group in (own, *own.parents) if group.is_relative_to(GROUPS)]


def _of_group(group: Path) -> int:
    try:
        limit = int((group / "memory.max").read_text())  # "max", or no such file: no limit
        used = int((group / "memory.current").read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])
    except (OSError, ValueError):
        return 1 << 62
    return max(0, limit - used)
