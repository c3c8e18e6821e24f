"""Protection of Penstock's processes from children that user code forks in them.

A fork shares the process's sockets, rings and progress pages: a child that uses them takes its parent's frames and
writes into its ring. Children that never return to Penstock's code (multiprocessing, torch, `subprocess`) do no harm,
so forking is not forbidden, but an at-fork hook disconnects each child:

    keep(thing)         registers an object of this process. In a child its method `forked()` is called first.
    silence(fd)         for `forked()`: the descriptor keeps its number, but is connected to nothing.
    unshare(map, fd)    for `forked()`: memory keeps its content and address, and the child's writes stay in the child.

A process that calls user code (a runner, a helper) calls `host_user_code()`. If a child of it (`strayed`) returns to
Penstock's code, it ends (`leave`), and its traceback is logged. In a training process objects check their
`OwnerProcess` instead, and raise ForkedProcessError. Forks by C libraries are not detected."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import traceback
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from penstock.proto.errors import ForkedProcessError

_PRIVATE_FIXED = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED, for which the module mmap has no name
_libc = ctypes.CDLL(None, use_errno=True)  # early: in a child the linker may be locked
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

strayed = False
"""True in a process that user code has forked in a runner or helper process."""
_hosts_user_code = False


class _Kept(Protocol):
    def forked(self) -> None:
        """Disconnect this object from the parent process. The at-fork hook calls this method in a forked child."""


_kept: weakref.WeakSet[Any] = weakref.WeakSet()


def keep(thing: _Kept) -> None:
    """Register an object: it is disconnected in children forked from now on, but not in their children."""
    _kept.add(thing)


def host_user_code() -> None:
    """Mark this process as one that runs user code: its forked children end if they return to Penstock's code."""
    global _hosts_user_code
    _hosts_user_code = True


@contextlib.contextmanager
def hosting(*things: _Kept) -> Iterator[None]:
    """Disconnect objects in children that user code forks inside the block, but not later."""
    global _hosts_user_code
    before, _hosts_user_code = _hosts_user_code, True
    for thing in things:
        keep(thing)
    try:
        yield
    finally:
        if strayed:
            leave()
        _hosts_user_code = before
        for thing in things:
            _kept.discard(thing)


def _disarm() -> None:
    global strayed
    strayed = strayed or _hosts_user_code
    for thing in list(_kept):
        try:
            thing.forked()
        except Exception:  # continue: the child must run, with all other things disconnected
            traceback.print_exc()
    _kept.clear()


os.register_at_fork(after_in_child=_disarm)


def silence(fd: int) -> None:
    """Disconnect a descriptor from its file. It stays open, so that its number is not given to another file."""
    if fd < 0:
        return
    with contextlib.suppress(OSError):
        try:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # no free descriptors: at least close this one
            os.close(fd)
            return
        os.dup2(null, fd, inheritable=False)
        os.close(null)


def unshare(memory: mmap.mmap, fd: int) -> None:
    """Make a shared mapping of `fd` private to this process. Raises OSError if it must stay shared."""
    buffer = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(buffer)
    del buffer
    found = _libc.mmap(address, len(memory), mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE_FIXED, fd, 0)
    if found != address:
        raise OSError(ctypes.get_errno(), "memory that a forked child shares with its parent cannot be made private")


class OwnerProcess:
    """Process in which an object was made. Its forked children must not use the object."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self.pid

    def check(self, what: str) -> None:
        """Raise ForkedProcessError in a forked child. `what`: such as "the connection to the coordinator"."""
        if not self.is_here:
            raise self.error(what)

    def error(self, what: str) -> ForkedProcessError:
        return ForkedProcessError(
            f"{what} must be used in process {self.pid}, which made it, got a use in its forked child {os.getpid()}: "
            'start this one with multiprocessing.get_context("spawn"), and make an Appliance of its own here'
        )


def leave() -> NoReturn:
    """End this process, which user code forked, with the exit status of sys.exit() if that was called, else 1."""
    code = 1
    try:
        code = _log_end(sys.exc_info()[1])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _log_end(error: BaseException | None) -> int:
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    how = "raised" if error is not None else "returned"
    print(f"process {os.getpid()}, forked by input_fn or its loader, {how} into Penstock's code", file=sys.stderr)
    print("It is ended, and its parent continues. End forked children by os._exit().", file=sys.stderr)
    if error is not None:
        traceback.print_exception(error)
    return 1
