"""What Penstock needs of the kernel and of the container that it runs in, tried out in some milliseconds.

Containers, sandboxes and old kernels deny system calls that processes here are built on. Met later, that would be a
bare OSError in another process, or a wait until a deadline that advises a longer one. So appliances and daemons refuse
to start where something is denied that they need (`require`), and `penstock doctor machine` shows it all. `NEEDS` is
the only list: a new dependency on the kernel belongs there."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from penstock.proto.errors import PenstockError
from penstock.runtime.files.private_folders import PrivateFolder
from penstock.runtime.telemetry.units import size

_log = logging.getLogger("penstock.machine")

Role = Literal["coordinator", "worker", "job", "embedded"]
"""What a process is to be: a coordinator, a worker daemon, a training job, and the start of an embedded appliance."""

FILES, FILES_OF_SLOT = 64, 12
"""File descriptors of a daemon, and of each of its slots: 25 and 11 are open while batches are read over TCP."""
LITTLE_SHARED_MEMORY = 1 << 20
"""Bytes. Semaphores of multiprocessing take a page each, one worker of torch's DataLoader at least its batches."""
_KERNEL = (
    "Use Linux 5.3 or later, and a container runtime whose seccomp profile allows this call, as that of Docker 20.10 "
    "and later does"
)


@dataclass(frozen=True)
class Need:
    """`probe` raises OSError where the machine lacks it; called with the number of slots."""

    name: str
    remedy: str
    probe: Callable[[int], object]
    required_by: frozenset[Role]
    wanted_by: frozenset[Role] = frozenset()
    """Roles that warn without it, because only some user code needs it."""


@dataclass(frozen=True)
class Unmet:
    need: Need
    error: OSError
    is_fatal: bool

    @property
    def why(self) -> str:
        return self.error.strerror or str(self.error)

    def __str__(self) -> str:
        return f"{self.need.name}: {self.why}. {self.need.remedy}"


def unmet_needs(*roles: Role, slots: int = 0) -> Iterator[Unmet]:
    """Yield what this machine lacks for processes with one of these roles."""
    for need in NEEDS:
        is_required = not need.required_by.isdisjoint(roles)
        if is_required or not need.wanted_by.isdisjoint(roles):
            try:
                need.probe(slots)
            except OSError as error:
                yield Unmet(need, error, is_required)


def require(who: str, *roles: Role, slots: int = 0) -> None:
    """Raise PenstockError if this machine lacks something that these roles need, and log a warning for what only some
    loaders need. `who`: what is being started. `slots`: that it is to have, if known."""
    for unmet in unmet_needs(*roles, slots=slots):
        if unmet.is_fatal:
            raise PenstockError(f"{who} cannot run here, which `penstock doctor` shows too: {unmet}")
        _log.warning("%s", unmet)


# ---- probes


def _proc(_: int) -> None:
    os.listdir("/proc/self/fd")


def _flock(_: int) -> None:
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # another process has locked it
    finally:
        os.close(fd)


def _open_files(slots: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # daemons raise their soft limit
    need = FILES + FILES_OF_SLOT * slots
    if 0 <= hard < need:
        raise OSError(errno.EMFILE, f"at most {hard} may be open, but at least {need} are needed")


@contextmanager
def _pidfd() -> Iterator[int]:
    fd = os.pidfd_open(os.getpid())
    try:
        yield fd
    finally:
        os.close(fd)


def _pidfd_open(_: int) -> None:
    with _pidfd():
        pass


def _pidfd_send_signal(_: int) -> None:
    with _pidfd() as fd:
        signal.pidfd_send_signal(fd, 0)


@contextmanager
def _memfd() -> Iterator[int]:
    fd = os.memfd_create("penstock-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        yield fd
    finally:
        os.close(fd)


def _memfd_create(_: int) -> None:
    with _memfd() as fd:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)


def _fallocate(_: int) -> None:
    with _memfd() as fd:
        os.posix_fallocate(fd, 0, 4096)


def _shared_memory(_: int) -> None:
    found = os.statvfs("/dev/shm")
    free = found.f_bavail * found.f_frsize
    if free < LITTLE_SHARED_MEMORY:
        total = size(found.f_blocks * found.f_frsize)
        raise OSError(errno.ENOSPC, f"{size(free)} of {total} are free, which loaders with processes of their own need")


_DAEMONS: frozenset[Role] = frozenset({"coordinator", "worker"})
_WORKER: frozenset[Role] = frozenset({"worker"})
_EMBEDDED: frozenset[Role] = frozenset({"embedded"})
_WITH_BATCHES: frozenset[Role] = frozenset({"worker", "job"})
_NOBODY: frozenset[Role] = frozenset()

NEEDS = (
    Need(  # first, because the other probes open files
        "open files",
        "Raise the hard limit: ulimit -Hn 65536; systemd: LimitNOFILE=65536; docker run --ulimit nofile=65536",
        _open_files,
        _DAEMONS,
    ),
    Need("/proc", "Mount it: mount -t proc proc /proc", _proc, _DAEMONS),
    Need("flock", _KERNEL, _flock, _DAEMONS),
    Need("pidfd_open", _KERNEL, _pidfd_open, _WORKER),
    Need("pidfd_send_signal", _KERNEL, _pidfd_send_signal, _WORKER),
    Need("sched_getaffinity", _KERNEL, lambda _: os.sched_getaffinity(0), _WORKER),
    Need("eventfd", _KERNEL, lambda _: os.close(os.eventfd(0, os.EFD_CLOEXEC)), _WITH_BATCHES),
    Need("memfd_create", _KERNEL, _memfd_create, _WITH_BATCHES),
    Need("fallocate", _KERNEL, _fallocate, _WITH_BATCHES),
    Need(
        "temporary folder",
        "Set TMPDIR to a folder that can be written, with a path in UTF-8",
        lambda _: PrivateFolder().close(),
        _EMBEDDED,
        _WORKER,
    ),
    Need(
        "/dev/shm",
        "Remove files there that nobody uses, or give it more memory: docker run --shm-size 2g",
        _shared_memory,
        _NOBODY,
        _WORKER,
    ),
)
