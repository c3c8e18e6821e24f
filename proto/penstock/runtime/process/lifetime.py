"""The life of a process below another one of Penstock: what ends it, and what does not.

It ends with its parent, or once its parent asks for it. SIGTERM and SIGINT have no effect on it: a scheduler, a
launcher and the end of a pod send them to all processes of a job at once, and the training process, which may still
save, needs the others for that. A handler does this, because SIG_IGN would be inherited by the programs that user code
starts. Between the start of a program and its handler both signals are blocked (`spawn` with `outlives`). In children
that user code forks they have their usual effect, by which multiprocessing ends such children.

    Parent              the parent of a program that `spawn` has started
    die_with_parent     for forked children, whose parents have no threads: the kernel sends the signal when the
                        *thread* that started the process ends"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from penstock.runtime.process.watch import Process

ENDING: Final = (signal.SIGTERM, signal.SIGINT)
PARENT_LOOK_S = 1.0
"""Seconds between checks whether the parent runs, on a kernel without pidfds."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STDIN = 0


# ---- signals


_signalled_at = -math.inf
"""Monotonic time of the last signal that was outlived."""


def _no_effect(number: int, frame: Any) -> None:
    """Handle a signal that is meant for the whole job: the parent decides when this process ends."""
    global _signalled_at
    _signalled_at = time.monotonic()


def job_signalled(within_s: float, wait_s: float) -> bool:
    """Return whether the whole job got a signal in the last `within_s` seconds, or gets one within `wait_s`: it comes
    to one process after the other."""
    until = time.monotonic() + wait_s
    while time.monotonic() - _signalled_at > within_s:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def outlive_signals() -> None:
    """Let SIGTERM and SIGINT have no effect on this process, nor on its children by `spawn.fork`. Call this first, in
    the main thread."""
    for number in ENDING:
        signal.signal(number, _no_effect)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextlib.contextmanager
def signals_blocked(*numbers: int) -> Iterator[None]:
    """Block signals of this thread, also in processes that are started in the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers or ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Fork(threading.local):
    is_ours = False
    """True while `spawn.fork` forks, whose child keeps the handlers."""
    mask: Any = None
    """Signals that were blocked before the present fork."""


_fork = _Fork()


@contextlib.contextmanager
def keeping_handlers() -> Iterator[None]:
    """Let a child that is forked in the block outlive signals too."""
    _fork.is_ours = True
    try:
        yield
    finally:
        _fork.is_ours = False


def _before_fork() -> None:
    """Block the signals until the child's handlers are set: none of them may be lost, because multiprocessing sends it
    once."""
    if signal.getsignal(signal.SIGTERM) is _no_effect:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def _after_fork() -> None:
    if _fork.mask is not None:
        mask, _fork.mask = _fork.mask, None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    if _fork.mask is not None and not _fork.is_ours:
        if signal.getsignal(signal.SIGTERM) is _no_effect:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is _no_effect:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


# ---- the parent


class Parent(Process):
    """Parent of this program. Makes this process outlive signals. Raises ProcessLookupError if process `pid` is no
    longer its parent."""

    def __init__(self, pid: int) -> None:
        outlive_signals()
        self.can_ask = stat.S_ISSOCK(os.fstat(_STDIN).st_mode)
        """True if it asks through standard input for the end (`spawn` with `linked`). Otherwise, as from a script,
        SIGTERM does."""
        super().__init__(pid)
        if os.getppid() != pid:  # the parent ended before it was opened, and its id was reused
            self.close()
            raise ProcessLookupError(
                f"the parent of process {os.getpid()} (process {pid}) has ended: end this process too"
            )

    def on_end(self, then: Callable[[], object]) -> None:
        """Let the running event loop call `then` once, when the parent ends or asks for the end of this process."""

        def once() -> None:
            self.close()
            then()

        import asyncio

        super().on_end(once)
        if not self.can_ask:
            return
        loop, unwatch = asyncio.get_running_loop(), self._unwatch
        loop.add_reader(_STDIN, once)

        def unwatch_both() -> None:
            loop.remove_reader(_STDIN)
            if unwatch is not None:
                unwatch()

        self._unwatch = unwatch_both


def wait_for_parent_end(pid: int) -> None:
    """Block this thread until process `pid`, the parent of this process, has ended, also without pidfds."""
    try:
        with Process(pid) as parent:
            if os.getppid() == pid:
                parent.wait()
    except OSError:
        while os.getppid() == pid:
            time.sleep(PARENT_LOOK_S)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send a signal when process `parent` dies. End this process at once if it has died already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Make this process the parent of those of its descendants whose own parent dies, in place of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    import ctypes  # imported here because it takes 3 ms and watching does not need it

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
