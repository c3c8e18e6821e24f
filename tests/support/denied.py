"""What kernels and containers deny, denied for real to the process that asks for it, and to all that it starts.

`deny` is a seccomp filter, as in a container's profile; `cover` hides a folder below an empty filesystem in a mount
namespace of its own. Neither can be taken back, so call them in a child (`fork`)."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

__all__ = ["CALLS", "cover", "deny"]

CALLS = {
    # system call: number on x86-64, on 64-bit ARM
    "eventfd": (290, 19),
    "fallocate": (285, 47),
    "flock": (73, 32),
    "memfd_create": (319, 279),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "sched_getaffinity": (204, 123),
}
_LOAD_NUMBER, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_CLONE_NEWNS, _MS_REC_PRIVATE = 0x20000, 0x44000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def deny(call: str, number: int = errno.EPERM) -> None:
    """Let this system call fail with this error number."""
    of_machine = CALLS[call][platform.machine() != "x86_64"]
    lines = ((_LOAD_NUMBER, 0, 0, 0), (_IF_EQUAL, 0, 1, of_machine), (_RETURN, 0, 0, _ERRNO | number))
    code = b"".join(struct.pack("HBBI", *line) for line in (*lines, (_RETURN, 0, 0, _ALLOW)))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _checked(_libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(lines) + 1, code)), 0, 0))


def cover(*folders: str, read_only: bool = False) -> None:
    """Hide folders below empty filesystems, which soon are full. Raises PermissionError without the right to mount."""
    _checked(_libc.unshare(_CLONE_NEWNS))
    _checked(_libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None))
    for folder in folders:
        _checked(_libc.mount(b"none", folder.encode(), b"tmpfs", int(read_only), b"size=64k"))
