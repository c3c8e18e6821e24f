"""Costs of a tree of processes, read from /proc: processor time, memory, rings. It imports only the standard library.

Every mode (compared way to deliver batches) is measured in the same way. Its player, the process that takes the
batches, is the root of a tree of processes. The mode's other processes are descendants of the player, and are told
apart by their command lines.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CONSUMER",
    "Process",
    "Role",
    "adopt_orphans",
    "busy_cores",
    "cpu_by_role",
    "cpu_s",
    "kill_tree",
    "machine_s",
    "memory_by_role",
    "ring_bytes",
    "rings_in",
    "role_of",
    "tree",
]

CONSUMER = "consumer"
"""Role of the root of a tree of processes: the process with the training loop, which takes the batches."""
TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36
RING_NAME = "memfd:penstock-ring"


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    command: str
    """Command line of the process, with its arguments separated by spaces."""


@dataclass(frozen=True)
class Role:
    """Role in a tree of processes, such as "sender": `name` is the role of each process whose command line contains
    `sign`."""

    sign: str
    name: str
    forked: str = ""
    """Role of a process that such a process has forked, and which has the same command line; "": the same role."""


def adopt_orphans() -> None:
    """Let this process adopt its descendants when their parent ends, so that they stay in its tree."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stat(pid: int) -> list[str]:
    # The process name in parentheses may contain any character, so fields are counted after its end; the first is the
    # state.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def tree(root: int) -> dict[int, Process]:
    """Return the process `root` and all its descendants, by pid."""
    found: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            pid = int(entry)
            try:
                parent = int(_stat(pid)[1])
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # the process has ended meanwhile
            found[pid] = Process(pid, parent, command)
    kept: dict[int, Process] = {}
    fresh = {root} & found.keys()
    while fresh:
        kept.update({pid: found[pid] for pid in fresh})
        fresh = {pid for pid, process in found.items() if process.parent in kept and pid not in kept}
    return kept


def role_of(process: Process, family: Mapping[int, Process], root: int, roles: Iterable[Role]) -> str:
    """Return the role of a process in the tree `family` with the root `root`; "other" if none of `roles` fits."""
    if process.pid == root:
        return CONSUMER
    parent = family.get(process.parent)
    for role in roles:
        if role.sign in process.command:
            forked = role.forked and parent is not None and role.sign in parent.command
            return role.forked if forked else role.name
    return "other"


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process so far, including its children that ended and were waited for.

    The process's own time is exact to the nanosecond, that of its children to a clock tick. When a process ends, its
    time is added to its parent's, so the sum over a tree stays complete.
    """
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    try:
        own = time.clock_gettime((~pid << 3) | 2)  # the id of clock_getcpuclockid(3)
    except OSError:
        own = (int(fields[11]) + int(fields[12])) / TICKS
    return own + (int(fields[13]) + int(fields[14])) / TICKS


def cpu_by_role(root: int, roles: Iterable[Role]) -> dict[str, float]:
    """Return the processor seconds that the processes of the tree with this root have used so far, by role."""
    family, roles, used = tree(root), list(roles), dict[str, float]()
    for process in family.values():
        name = role_of(process, family, root, roles)
        used[name] = used.get(name, 0.0) + cpu_s(process.pid)
    return used


def memory_by_role(root: int, roles: Iterable[Role]) -> dict[str, dict[str, float]]:
    """Return for each role in the tree: "processes", their number; "pss", their memory in MiB; and "files", the part of
    it that is mapped files, in MiB.

    Memory that several processes share is divided among them (PSS). Memory of files is divided among all processes of
    the machine that map them, of other trees too, so its share depends on other programs.
    """
    family, roles = tree(root), list(roles)
    found: dict[str, dict[str, float]] = {}
    for process in family.values():
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        sizes = {line.partition(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.endswith("kB")}
        entry = found.setdefault(role_of(process, family, root, roles), {"processes": 0, "pss": 0.0, "files": 0.0})
        entry["processes"] += 1
        entry["pss"] += sizes.get("Pss", 0.0)
        entry["files"] += sizes.get("Pss_File", 0.0)
    return found


def rings_in(maps: Iterable[str]) -> dict[int, int]:
    """Return the size in bytes of each ring of Penstock that a process has mapped, by the ring's inode. `maps`: lines
    of /proc/PID/maps."""
    rings: dict[int, int] = {}
    for line in maps:
        if RING_NAME in line:
            span, _, _, _, inode, *_ = line.split()
            start, end = (int(address, 16) for address in span.split("-"))
            rings[int(inode)] = rings.get(int(inode), 0) + end - start
    return rings


def ring_bytes(root: int) -> list[int]:
    """Return the sizes in bytes of all rings of Penstock that processes of the tree have mapped, each ring once."""
    rings: dict[int, int] = {}
    for pid in tree(root):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                for inode, size in rings_in(maps).items():
                    rings[inode] = max(size, rings.get(inode, 0))
        except OSError:
            continue
    return sorted(rings.values())


def machine_s() -> float:
    """Return the processor seconds that all processes of the machine have used since the machine started, without
    interrupts."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split(None, 4)[1:4])
    return (user + nice + system) / TICKS


def busy_cores(seconds: float) -> float:
    """Return the number of cores that all programs of the machine use on average, measured for `seconds` seconds."""
    before, started = machine_s(), time.perf_counter()
    time.sleep(seconds)
    return (machine_s() - before) / (time.perf_counter() - started)


def kill_tree(root: int, *, itself: bool) -> None:
    """Kill all descendants of the process `root`, and the process too if `itself` is True. Repeat this until no new
    process appears."""
    for _ in range(20):
        pids = [pid for pid in tree(root) if itself or pid != root]
        alive = [pid for pid in pids if _stat_state(pid) not in "ZX"]
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not alive:
            return
        time.sleep(0.02)


def _stat_state(pid: int) -> str:
    try:
        return _stat(pid)[0]
    except OSError:
        return "X"
