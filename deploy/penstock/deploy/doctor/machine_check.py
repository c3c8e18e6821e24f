"""Checks of `penstock doctor machine`: whether kernel, memory and open files suffice for runners, which a daemon's
start does not show."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import platform
import resource
import secrets
import socket
from collections.abc import Callable, Iterator

from penstock.deploy.console.settings import WorkerSettings
from penstock.deploy.doctor.findings import Finding, ok, problem, warning
from penstock.runtime.config.settings import find
from penstock.runtime.process import sandbox
from penstock.runtime.process.free_memory import free_memory
from penstock.runtime.process.watch import Process, become_subreaper
from penstock.runtime.telemetry.units import size

__all__ = ["check_files", "check_kernel", "check_machine", "check_memory", "check_sandbox"]

RUNNER_BYTES = 512 << 20
"""Memory of a runner in bytes: with torch 170 MiB resident, 60 of them private; the rest for ring and data."""
RUNNER_FILES = 24
"""File descriptors per runner: 10 with a lane over TCP; the rest for growing rings and senders at the same time."""
DAEMON_FILES = 128


def check_machine(slots: int | None = None) -> Iterator[Finding]:
    """Yield all findings. `slots`: of a worker here; None: the effective setting, or the number of cores."""
    yield check_kernel(platform.release(), _kernel_gaps())
    yield check_sandbox(sandbox.why_not_whole())
    slots = slots or _slots_set() or os.cpu_count() or 1
    yield check_memory(free_memory(), slots)
    yield check_files(*resource.getrlimit(resource.RLIMIT_NOFILE), slots)


def _slots_set() -> int | None:
    setting = next(setting for setting in find(WorkerSettings) if setting.field == "slots")
    return None if setting.problem or not setting.source else setting.value


def check_kernel(release: str, missing: dict[str, str]) -> Finding:
    """`missing`: kernel feature -> why it cannot be used."""
    if missing:
        return problem(
            "kernel",
            f"{release} without " + "; ".join(f"{name} ({why})" for name, why in missing.items()),
            "Linux 5.3 or newer is needed, and a sandbox (seccomp, gVisor) must allow memfd_create, pidfd_open, prctl "
            "and Unix sockets.",
        )
    return ok("kernel", f"{release}: sealed memfd, pidfd, subreaper, SEQPACKET with descriptors")


def check_sandbox(lacking: str) -> Finding:
    """`lacking`: the kernel feature that the sandbox of runners misses; "" if none."""
    if lacking:
        return warning(
            "sandbox",
            f"runners gain no privileges, but can signal and trace other processes of their user: {lacking}",
            "Give workers a user of their own, or a newer kernel.",
        )
    return ok("sandbox", "runners gain no privileges, and signal and trace only what they have started")


def check_memory(left: int, slots: int) -> Finding:
    """`left`: free bytes of the machine, or of this process's control groups."""
    need = slots * RUNNER_BYTES
    found = f"{size(left)} free; {slots} slots take about {size(need)} before your data. Rings count as shared"
    if left < RUNNER_BYTES:
        return problem("memory", found, "Not enough for a single runner: use another machine, or raise the limit.")
    if left < need:
        fit = left // RUNNER_BYTES
        return warning("memory", found, f"penstock worker --slots {fit}, or --runner-memory SIZE to bound each runner.")
    return ok("memory", found)


def check_files(soft: int, hard: int, slots: int) -> Finding:
    """`soft`, `hard`: limits on open files; -1: none."""
    need = DAEMON_FILES + RUNNER_FILES * slots
    most, hard_most = ("any number" if limit < 0 else str(limit) for limit in (soft, hard))
    found = f"{most} at most ({hard_most} after ulimit -n); {slots} slots may need {need}"
    if 0 <= soft < need:
        return problem(
            "open files",
            found,
            f"ulimit -n {max(need, 65536)} before the daemon starts; systemd: LimitNOFILE=65536; docker run --ulimit "
            "nofile=65536",
        )
    return ok("open files", found)


def _kernel_gaps() -> dict[str, str]:
    """Return kernel feature -> why Penstock cannot use it here."""
    tries: dict[str, Callable[[], object]] = {
        "memfd_create with seals": _sealed_memfd,
        "pidfd_open": lambda: Process(os.getpid()).close(),
        "PR_SET_CHILD_SUBREAPER": become_subreaper,
        "abstract Unix sockets": _abstract_socket,
        "SEQPACKET with descriptors (SCM_RIGHTS)": _passed_descriptor,
    }
    gaps = {}
    for name, use in tries.items():
        try:
            use()
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
