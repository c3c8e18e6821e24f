"""Sandbox for user code, which protects processes of the same user that the user code did not start.

A runner runs as its worker's user, and could trace other jobs' runners, read their memory, or end the daemon. So:

- no new privileges: programs started here gain none by a setuid bit, so sudo and fusermount do not work;
- a Landlock domain that restricts only signals: its processes may signal and debug only each other.

Files are not restricted: no one knows which a loader reads, and Landlock forbids moves between folders then."""

from __future__ import annotations

import ctypes
import os

_PR_SET_NO_NEW_PRIVS = 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
"""Numbers of Landlock's system calls, which are the same on all architectures."""
_VERSION = 1
_SCOPE_SIGNAL = 1 << 1
SCOPES_SINCE = 6
"""First version of Landlock that can restrict signals (by scopes): that of Linux 6.12."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


def why_not_whole() -> str:
    """Return a text that says which part of the sandbox this kernel does not support; "" if it supports all parts."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    if version >= SCOPES_SINCE:
        return ""
    has = f"version {version} of Landlock" if version > 0 else f"no Landlock ({os.strerror(ctypes.get_errno())})"
    return f"the kernel has {has}, but only version {SCOPES_SINCE} (Linux 6.12) and later can restrict signals"


def enter() -> None:
    """Put this process and its later children into a new sandbox, as far as the kernel supports it, for good. It must
    have only one thread: others would stay outside."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if why_not_whole():
        return
    rules = _Ruleset(0, 0, _SCOPE_SIGNAL)
    size = ctypes.c_size_t(ctypes.sizeof(rules))
    handle = _libc.syscall(_CREATE_RULESET, ctypes.byref(rules), size, ctypes.c_uint32(0))
    if handle >= 0:
        _libc.syscall(_RESTRICT_SELF, handle, ctypes.c_uint32(0))
        os.close(handle)
