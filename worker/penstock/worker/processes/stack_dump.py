"""Python stacks of a child process, for the daemon to read while it hangs, or after a crash. faulthandler writes from a
signal handler to a file in memory, even while user code holds the GIL. Its size is sealed, so that a child cannot make
the daemon read more, and so are its seals: with one against writing, the daemon could not empty it. Its descriptor is
high, because some user code closes all low ones."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import os
import signal
import time
from pathlib import Path

from penstock.proto.tracebacks import fold_stack
from penstock.runtime.process.watch import Process, stat_of

SIGNAL = signal.SIGRTMAX - 2
"""A real-time signal, because libraries and users rarely use those."""
SIZE = 32 << 10
SHOWN = 8 << 10
"""Characters of stacks in an error. The end is cut: there are the oldest frames or threads."""
WAIT_S = 1.0
_LOOK_S = 0.02
_STOPPED = "is stopped by a signal; run kill -CONT {pid} to continue it"
_IN_KERNEL = "waits in the kernel, for a disk or a network filesystem"
_UNHANDLED = "has only just started, or user code has changed or blocks the handler of the signal that asks for stacks"
_WHY_NONE = {"": "has ended", "T": _STOPPED, "t": _STOPPED, "D": _IN_KERNEL}
_HIGH_FD = 768  # below 1024, the usual soft limit


def write_stacks_to(fd: int) -> None:
    """Write all threads' stacks to `fd` at SIGNAL and at a crash, through a high duplicate if the limit allows one."""
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
        os.close(fd)
    except OSError:
        high = fd  # the process's limit of descriptors is below _HIGH_FD
    faulthandler.enable(high, all_threads=True)
    faulthandler.register(SIGNAL, high, all_threads=True)


def state_of(pid: int) -> str:
    return next(iter(stat_of(pid)), "")


class StackFile:
    """File in memory with the stacks of one child, which inherits it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("penstock-stack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, SIZE)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1

    def read(self) -> str:
        """Return what was written since the last `clear`."""
        if self.fd < 0:
            return ""
        text = os.pread(self.fd, SIZE, 0).split(b"\0", 1)[0].decode(errors="replace")
        text = fold_stack(text.partition("\nExtension modules:")[0].strip())  # a long list, useless here
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}\n  ... {len(text) - SHOWN} characters left out"

    def clear(self) -> None:
        os.pwrite(self.fd, bytes(SIZE), 0)
        os.lseek(self.fd, 0, os.SEEK_SET)  # the child writes through the same open file

    async def ask(self, process: Process) -> str:
        """Return the child's present stacks, or one line that says why there is none."""
        pid = process.pid
        state = state_of(pid)
        why = _WHY_NONE.get(state if self.fd >= 0 else "", "")
        if why or not _handles(pid):
            return f"(no stack: process {pid} {why.format(pid=pid) or _UNHANDLED})"
        self.clear()
        with contextlib.suppress(OSError):
            process.send(SIGNAL)
        text, until = "", time.monotonic() + WAIT_S
        while time.monotonic() < until and self.fd >= 0:
            await asyncio.sleep(_LOOK_S)
            before, text = text, self.read()
            if text and text == before:
                break
        if self.fd >= 0:
            self.clear()
        return text or f"(no stack: process {pid} did not write its stack within {WAIT_S:g} s)"


def _handles(pid: int) -> bool:
    """Return whether SIGNAL is handled; otherwise it would kill."""
    masks = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("SigCgt", "SigBlk"):
                masks[name] = int(value, 16)
    bit = 1 << (SIGNAL - 1)
    return bool(masks.get("SigCgt", 0) & bit) and not masks.get("SigBlk", bit) & bit
