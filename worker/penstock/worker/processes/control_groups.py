"""Control groups (cgroup v2), one for each child that runs user code. They are used only if the daemon's own control
group holds no other processes.

    <the daemon's own group>     delegated to it: systemd's Delegate=yes, a container with a writable /sys/fs/cgroup
      penstock-daemon            the daemon and its fork servers: a group with subgroups can have no processes itself
      penstock-runners           pids.max: processes and threads of all runners together
        1, 2, ...                one for each child: memory.max; the kernel kills all its processes (memory.oom.group)

The kernel enforces these limits at every moment. The memory watch (memory_watch.py) measures once a second or more
rarely, and replaces a runner at a snapshot. A group counts more memory than the watch: also rings, and each page that a
loader's processes share. So a group's limit is 1 GiB above the size at which the watch kills a runner. The group stops
a runner whose memory grows faster than the watch measures.

A group also ends processes that outlive their child: some seconds after the child's end (GROUP_S of
child_processes.py), all processes still in the group are killed at once, even if they keep forking.

Only user code that runs as another user (runner_user.py) cannot leave its group. No groups are made if the daemon's
group has processes that are not the daemon's, because Penstock must not move other processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from penstock.worker.resources.memory_use import family

__all__ = ["SPARE_BYTES", "ControlGroups", "OutOfMemory", "enter", "here", "out_of_memory", "own_group", "why_not"]

_log = logging.getLogger("penstock.worker")

DAEMON, RUNNERS = "penstock-daemon", "penstock-runners"
CONTROLLERS = ("memory", "pids")
SPARE_BYTES = 1 << 30
"""Bytes that a group may hold beyond the limit of the memory watch. The rings (shared memory for batches) of a
data-parallel rank take about 512 MiB, and a ring that became too small may exist beside its larger replacement."""
_REMEDY = (
    "Give the worker a group of its own: set Delegate=yes in a systemd unit, start the worker from a shell with "
    "systemd-run --scope -p Delegate=yes (and --user unless you are root), or make /sys/fs/cgroup writable in a "
    "container"
)


class OutOfMemory(Enum):
    """Kind of memory limit that was reached when the kernel killed a process of a child's control group (cgroup)."""

    NO = "no limit: the kernel has killed no process"
    OWN = "the group's own limit"
    ABOVE = "the limit of a group above, or of the machine"


def own_group(cgroups: str, mounts: str) -> Path | None:
    """Return the folder of a process's control group. Return None unless the group is in a cgroup v2 hierarchy that is
    mounted here.

    Args:
        cgroups: text of /proc/PID/cgroup of the process.
        mounts: text of /proc/PID/mountinfo of the process.
    """
    name = next((line[3:] for line in cgroups.splitlines() if line.startswith("0::/")), "")
    if not name or ".." in name.split("/"):  # the group lies above the part of the hierarchy that this namespace shows
        return None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, point = (field.encode().decode("unicode_escape") for field in before.split(" ")[3:5])
        inside = name == root or name.startswith(root.rstrip("/") + "/")
        if after.split(" ")[0] == "cgroup2" and inside:
            return Path(point, name[len(root.rstrip("/")) :].lstrip("/"))
    return None


def why_not(own: Path | None, own_pids: Sequence[int], controllers: Sequence[str] = CONTROLLERS) -> str:
    """Return the reason why control groups cannot be made below the daemon's group, with a remedy if the operator of
    the worker can do something; "" if they can be made.

    Args:
        own: folder of the daemon's group, from own_group.
        own_pids: ids of the processes that may be moved: the daemon and the processes that it started.
        controllers: names of the controllers that the group must have.
    """
    if own is None:
        return "this process's control group is not in a mounted cgroup v2 hierarchy"
    if not all(os.access(own / name, os.W_OK) for name in ("", "cgroup.procs", "cgroup.subtree_control")):
        return f"the worker must be allowed to write to {own}, but is not. {_REMEDY}"
    try:
        lacking = [name for name in controllers if name not in (own / "cgroup.controllers").read_text().split()]
        there = [int(pid) for pid in (own / "cgroup.procs").read_text().split()]
    except OSError as error:
        return f"{own} cannot be read: {error.strerror}"
    if lacking:
        return (
            f"{own} does not have the controller {', '.join(lacking)}: the groups above do not delegate it, or this "
            "machine uses cgroup v1 for it"
        )
    others = sum(pid not in own_pids for pid in there)  # a process of another namespace is listed as 0
    if others:
        return f"{own} has {others} processes that do not belong to the worker. {_REMEDY}"
    return ""


def enter(group: str) -> None:
    """Move this process into a group from `ControlGroups.make`. Processes that this process starts later are in the
    group too. Raise OSError on failure."""
    Path(group, "cgroup.procs").write_text("0")


def out_of_memory(group: str) -> OutOfMemory:
    """Return the kind of memory limit that was reached, if the kernel has killed a process in this group; otherwise
    OutOfMemory.NO."""
    try:
        events = dict(line.split() for line in Path(group, "memory.events").read_text().splitlines())
    except (OSError, ValueError):
        return OutOfMemory.NO
    if events.get("oom_kill", "0") == "0":
        return OutOfMemory.NO
    return OutOfMemory.ABOVE if events.get("oom", "0") == "0" else OutOfMemory.OWN


class ControlGroups:
    """Control groups (cgroups) of one daemon's children. Made by `take`."""

    def __init__(self, own: Path, memory: int, processes: int, controllers: Sequence[str]) -> None:
        self.memory = memory
        self._own, self._processes, self._controllers = own, processes, controllers
        self._count = 0
        self._busy: set[str] = set()
        """Folders of groups of dead children that still have processes."""

    @classmethod
    def take(
        cls,
        own: Path | None,
        own_pids: Sequence[int],
        *,
        memory: int = 0,
        processes: int = 0,
        controllers: Sequence[str] = CONTROLLERS,
    ) -> tuple[ControlGroups | None, str]:
        """Divide the daemon's control group: move the daemon into a new group below `own`, so that groups for its
        children can be made beside the new group.

        Return the groups and "". If the group cannot be divided, return None and the reason, and change nothing.

        Args:
            own, own_pids, controllers: see why_not.
            memory: largest number of bytes that each child may hold; 0 = no limit.
            processes: largest number of processes and threads of all children together; 0 = no limit.
        """
        refused = why_not(own, own_pids, controllers)
        if own is None or refused:
            return None, refused
        groups = cls(own, memory, processes, controllers)
        try:
            groups._divide(own_pids)
        except OSError as error:
            groups.close(own_pids)
            return None, f"{own} cannot be divided: {error.strerror} ({error.filename or 'cgroup.procs'})"
        return groups, ""

    def _divide(self, own_pids: Sequence[int]) -> None:
        for name in (DAEMON, RUNNERS):
            (self._own / name).mkdir(exist_ok=True)  # a killed daemon leaves its groups
        for pid in own_pids:
            with contextlib.suppress(ProcessLookupError):
                (self._own / DAEMON / "cgroup.procs").write_text(str(pid))
        for group in (self._own, self._own / RUNNERS):
            (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in self._controllers))
        if "pids" in self._controllers:
            (self._own / RUNNERS / "pids.max").write_text(str(self._processes or "max"))

    def make(self) -> str:
        """Make a control group for a child that is about to be forked, and return the group's folder. If that fails,
        log a warning and return ""."""
        self._forget_empty()
        self._count += 1
        group = self._own / RUNNERS / str(self._count)
        try:
            group.mkdir(exist_ok=True)
            if "memory" in self._controllers:
                (group / "memory.oom.group").write_text("1")
                (group / "memory.max").write_text(str(self.memory or "max"))
        except OSError as error:
            _log.warning(
                "a control group could not be made, so a child process starts without the kernel's memory limit: %s",
                error,
            )
            self.remove(str(group))
            return ""
        return str(group)

    def remove(self, group: str) -> bool:
        """Remove the group of a dead child. Return False if the group still has processes. The caller must then `kill`
        the group a little later: some of these processes clean up before they end (orphans.py)."""
        if group:
            self._busy.add(group)
            self._forget_empty()
        return group not in self._busy

    def kill(self, group: str) -> None:
        """Kill all processes that are still in a dead child's group. Remove the group's folder if they are gone at
        once; otherwise it is removed when the next child's group is made."""
        if group in self._busy:
            with contextlib.suppress(OSError):  # no such file before Linux 5.14: orphans.py alone ends them
                Path(group, "cgroup.kill").write_text("1")
            self._forget_empty()

    def _forget_empty(self) -> None:
        for group in list(self._busy):
            with contextlib.suppress(OSError):
                os.rmdir(group)
            if not os.path.isdir(group):
                self._busy.discard(group)

    def close(self, own_pids: Sequence[int]) -> None:
        """Undo `take` once all children are dead: move the daemon back and remove the groups."""
        with contextlib.suppress(OSError):
            (self._own / RUNNERS / "cgroup.kill").write_text("1")
        with contextlib.suppress(OSError):
            for group in (self._own / RUNNERS).iterdir():
                if group.is_dir():
                    self._busy.add(str(group))
        self._forget_empty()
        without = " ".join(f"-{name}" for name in self._controllers)
        with contextlib.suppress(OSError):
            os.rmdir(self._own / RUNNERS)
        with contextlib.suppress(OSError):
            (self._own / "cgroup.subtree_control").write_text(without)
        for pid in own_pids:
            with contextlib.suppress(OSError):
                (self._own / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(OSError):
            os.rmdir(self._own / DAEMON)


def here() -> tuple[Path | None, list[int]]:
    """Return the folder of this process's control group (None if not available), and the ids of this process and its
    descendants."""
    texts = (Path("/proc/self", name).read_text() for name in ("cgroup", "mountinfo"))
    return own_group(*texts), family(os.getpid())
