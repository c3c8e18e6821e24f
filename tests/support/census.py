"""Resources of a process and its descendants, counted from /proc: for tests that a fault leaves nothing behind."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

from waiting import until

__all__ = [
    "abandoned",
    "alive",
    "census",
    "children",
    "descendants",
    "held",
    "open_as",
    "own_memory",
    "runners",
    "settled",
    "sockets",
]


def descendants(root: int) -> list[int]:
    """All processes below `root`, parents first; zombies are no processes any more."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry))
    found, front = [], [root]
    while front:
        front = [child for parent in front for child in children.get(parent, ())]
        found += front
    return found


def runners(daemon: int) -> list[int]:
    """Return the processes that the fork servers of a daemon forked: runners, and helper processes."""
    return [child for fork_server in children(daemon, "fork_server") for child in children(fork_server)]


def children(parent: int, sign: str = "") -> list[int]:
    """Return the children whose command line contains `sign`."""
    found = []
    for pid in descendants(parent):
        try:
            above = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if above == parent and sign.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def held() -> set[str]:
    """The descriptors and threads of this process, and the processes below it. Compare sets, not counts: what earlier
    tests left may go at any time."""
    found = {f"thread {thread.name} {thread.native_id}" for thread in threading.enumerate()}
    found |= {f"process {pid}" for pid in descendants(os.getpid())}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of this very listing
            found.add(f"descriptor {fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


def open_as(sign: str) -> list[str]:
    """This process's descriptors of files whose path begins so. Of all its descriptors some may be those of earlier
    tests, whose threads close them when they come to it: a mere count would count those too."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of this very listing
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(sign)]


def alive(pids: list[int]) -> list[int]:
    """Return the processes among `pids` that have not ended."""
    return [pid for pid in pids if not _ended(pid)]


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _kind(target: str) -> str:
    if target.startswith("/memfd:"):
        return target.split(" ")[0].removeprefix("/memfd:")
    if target.startswith(("socket:", "pipe:")):
        return target.partition(":")[0]
    return target.removeprefix("anon_inode:").strip("[]") if target.startswith("anon_inode:") else "file"


def census(pid: int) -> Counter[str]:
    """Count threads and open descriptors, by kind, of the process itself, and its descendants.

    A fork server that waits for the next run is kept on purpose, for minutes: each is counted as "fork servers",
    and the socket, and pidfd, that belong to it are not counted. Nor are both ends of a connection of the coordinator
    to itself: it opens one when a lease is half over (appliance/server/queue_probe.py), and gRPC ends it when it idles.
    """
    found: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[_kind(os.readlink(f"/proc/{pid}/fd/{fd}"))] += 1
        except OSError:
            continue
    found["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    for child in descendants(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"penstock.worker.runner.fork_server" in command and parent == pid:
            found["fork servers"] += 1
        else:
            found["processes"] += 1
    to_itself = sum("state 03" in held and held.endswith("/own") for held in sockets(pid))
    found["socket"] -= found["fork servers"] + 2 * to_itself
    found["pidfd"] -= min(found["pidfd"], found["fork servers"])
    found["names"] = len(abandoned())
    return found


_TYPES = {"0001": "stream", "0002": "datagram", "0005": "seqpacket"}


def sockets(pid: int) -> list[str]:
    """Describe the sockets that the process itself holds: Unix sockets by type, state and path, TCP sockets by their
    ports and state, with the kernel's numbers of states (TCP: 01 = established, 0A = listens)."""
    known: dict[str, str] = {}
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        _, _, _, _, kind, state, inode, *path = line.split()
        known[inode] = " ".join(["unix", _TYPES.get(kind, kind), f"state {state}", *path])
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # no IPv6
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, near, far, state, *_, inode = line.split()[:10]
                ports = [int(end.rpartition(":")[2], 16) for end in (near, far)]
                known[inode] = f"{table} {ports[0]} to {ports[1]} state {state}"
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if target.startswith("socket:["):
                found.append(known.get(target[len("socket:[") : -1], target))
    return sorted(found)


def own_memory(pid: int) -> int:
    """Bytes of the process alone, in RAM and swap: what it allocated, and what it has touched of rings and other shared
    memory. Mapped files are not counted."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024 * sum(int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssShmem:", "VmSwap:"))


def peak_memory(pid: int) -> int:
    """Return the largest memory that the process has had, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def abandoned() -> set[str]:
    """Names in shared memory whose maker has ended: torch and multiprocessing write its pid into them. What living
    processes have there is theirs, maybe those of another test that runs meanwhile."""
    made = {name: re.match(r"(?:torch_|pym-)(\d+)", name) for name in os.listdir("/dev/shm")}
    return {name for name, by in made.items() if by and not alive([int(by[1])])}


LOOSE = {"fork servers": 1, "threads": 6}
"""Largest numbers by which a count may grow: an idle fork server, asyncio's pool of threads."""


def settled(pids: list[int], before: list[Counter[str]], deadline_s: float) -> None:
    """Wait until every process holds what it held before, and fail with the difference if that does not come."""

    def difference() -> dict[int, dict[str, int]]:
        more = {}
        for pid, then in zip(pids, before, strict=True):
            now = census(pid)
            grown = {kind: now[kind] - then[kind] for kind in now if now[kind] > then[kind] + LOOSE.get(kind, 0)}
            if grown:
                more[pid] = grown
        return more

    def held_by_process() -> str:
        more = difference()
        named = {pid: sockets(pid) for pid, grown in more.items() if "socket" in grown}
        return f"still held, by process: {more}" + (f"; all sockets there: {named}" if named else "")

    until(lambda: not difference(), deadline_s, held_by_process)
