"""Properties of this machine that `penstock doctor` checks, read from the kernel, the disk and the network.
machine_findings.py judges them.

A probe that tries what Penstock does undoes it. No probe needs privileges. Errors of the system are not raised: they
are the result, or the result is the value for "unknown" (None, "" or 0).
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from penstock.runtime.process.watch import Process

__all__ = [
    "bind_error",
    "cgroup_left",
    "clock_source",
    "clock_synchronised",
    "cuda_packages",
    "fsync_s",
    "installed",
    "kernel_gaps",
    "memory_available",
    "nearest",
    "nvidia_devices",
    "requirements",
]

CGROUPS = Path("/sys/fs/cgroup")
SYNCS = 9
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_STA_UNSYNC, _STATUS_AT, _TIMEX_BYTES = 0x40, 40, 512
_O_DIRECT_BLOCK = 4096


def requirements() -> list[str]:
    """Return the packages that the installed package of Penstock requires, with versions. Optional packages (extras)
    are left out."""
    try:
        return [each for each in metadata.requires("penstock") or () if ";" not in each]
    except metadata.PackageNotFoundError:
        return []


def installed(requires: list[str]) -> dict[str, str]:
    """Return the names and versions of the packages in `requires` that are installed."""
    found = {}
    for requirement in requires:
        name = requirement.partition(">")[0].strip()
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def cuda_packages() -> int:
    """Return the number of installed packages that belong to CUDA."""
    return sum((each.name or "").lower().startswith("nvidia-") for each in metadata.distributions())


def nvidia_devices() -> int:
    """Return the number of NVIDIA devices that the kernel reports."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def kernel_gaps() -> dict[str, str]:
    """Return the names of the kernel features that Penstock uses and cannot use here, each with the reason. It needs
    all of them but O_DIRECT, which is optional."""
    tries: dict[str, Callable[[], object]] = {
        "memfd_create with seals": _sealed_memfd,
        "pidfd_open": lambda: Process(os.getpid()).close(),
        "PR_SET_CHILD_SUBREAPER": _subreaper,
        "abstract Unix sockets": _abstract_socket,
        "SEQPACKET with descriptors (SCM_RIGHTS)": _passed_descriptor,
        "O_DIRECT": _direct,
    }
    gaps = {}
    for name, do in tries.items():
        try:
            do()
        except OSError as error:
            gaps[name] = error.strerror or str(error)
    return gaps


def _sealed_memfd() -> None:
    fd = os.memfd_create("penstock-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals != seals:
            raise OSError(0, "the kernel accepts seals on a memfd, but does not apply them")
    finally:
        os.close(fd)


def _subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    was = ctypes.c_int()
    for arguments in (
        (_PR_GET_CHILD_SUBREAPER, ctypes.byref(was)),
        (_PR_SET_CHILD_SUBREAPER, 1),
        (_PR_SET_CHILD_SUBREAPER, was.value),
    ):
        if libc.prctl(*arguments, 0, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"\0penstock-doctor-{secrets.token_hex(8)}")
        listening.listen(1)


def _passed_descriptor() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        rights = array.array("i", [ours.fileno()])
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
        for fd in fds:
            os.close(fd)
        if not fds:
            raise OSError(0, "the passed file descriptor did not arrive")


def _direct() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fd = os.open(os.path.join(folder, "direct"), os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            with mmap.mmap(-1, _O_DIRECT_BLOCK) as block:
                os.write(fd, block)
        finally:
            os.close(fd)


def memory_available(meminfo: str) -> int:
    """Return the number of bytes of memory that can be used without swapping; 0 if it is unknown. `meminfo`: text of
    /proc/meminfo."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def cgroup_left(what: str, root: Path = CGROUPS) -> tuple[int, int] | None:
    """Return the limit of a control group on memory (in bytes) or on processes, and how much of it is unused. Of this
    process's group and all groups above it, take the one with the least unused. Return None if none has a limit.
    `what`: "memory" or "pids" (processes).

    Memory that caches files which were not used lately counts as free, because the kernel reclaims it.
    """
    rooms = []
    for folder in _cgroups(root):
        limit, used = _number(folder / f"{what}.max"), _number(folder / f"{what}.current") or 0
        if limit is not None:
            rooms.append((limit - used + _cached(folder) if what == "memory" else limit - used, limit))
    return min(rooms)[::-1] if rooms else None


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folder of this process's control group, then the folders of the groups above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    own = next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "/")
    folder = root / own.strip("/")
    yield folder
    while folder != root:
        folder = folder.parent
        yield folder


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached(folder: Path) -> int:
    try:
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)


def clock_source() -> str:
    """Return the name of the kernel's clock source; "" if it is unknown."""
    try:
        return Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        return ""


def clock_synchronised() -> bool | None:
    """Return True if the wall clock is synchronised, according to the kernel's adjtimex; None if that is unknown."""
    if sys.maxsize < 1 << 32:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)  # all zero, which only queries
    if libc.adjtimex(timex) < 0:
        return None
    return not int.from_bytes(timex.raw[_STATUS_AT : _STATUS_AT + 4], sys.byteorder) & _STA_UNSYNC


def nearest(path: Path) -> Path:
    """Return `path` if it exists, otherwise the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def fsync_s(folder: Path) -> float | None:
    """Return the median duration of an fsync of 4 KiB in the folder, in seconds; None if the folder is not writable."""
    took = []
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(SYNCS):
                file.write(bytes(4096))
                file.flush()
                began = time.perf_counter()
                os.fsync(file.fileno())
                took.append(time.perf_counter() - began)
    except OSError:
        return None
    return statistics.median(took)


def bind_error(host: str, port: int) -> OSError | None:
    """Return the error that prevents listening at an address; None if listening is possible."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        return error
    return None
