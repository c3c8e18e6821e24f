"""Features of this machine's kernel that Penstock uses, as `penstock doctor` tries them. What a try does it undoes, and
no try needs privileges."""

from __future__ import annotations

import array
import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import tempfile
from collections.abc import Callable

from penstock.runtime.process.watch import Process

__all__ = ["kernel_gaps"]

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_O_DIRECT_BLOCK = 4096


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
