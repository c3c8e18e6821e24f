"""The process that children are forked from: torch imported once, nothing started.

Importing torch takes seconds and 150 MB; forking a process that has done so takes milliseconds, and the pages are
shared. The daemon itself must never fork, for it runs gRPC; so each run has a zygote, a fresh interpreter (with the
run's PYTHONHASHSEED, which only a fresh one takes) that imports what runners need, has no threads, no gRPC and no user
code, and then only forks. A child leads a process group of its own, so that whatever user code starts can be killed
with it, and dies with its zygote.

A zygote outlives its daemon by a moment, for a killed one cannot clean up: it sees the end of the control socket, kills
all that its children started, and what they left to it, and goes. So it is in a group of its own, or a kill of the
daemon's group would take it along; and if somebody had stopped it, the daemon's death continues it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from penstock.proto.errors import LaneLostError
from penstock.worker.control import Channel, Message

__all__ = ["die_with_parent", "main"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
LAST_KILLS = 100
"""Rounds of killing what is still there, at the end; a fork bomb may be quicker, and the zygote goes all the same."""


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Be sent this signal when `parent`, this process's parent, dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Serve fork requests on the inherited control socket until it closes."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    die_with_parent(int(sys.argv[2]), signal.SIGCONT)
    # What a runner leaves behind comes here to be reaped, and not to whatever is process 1 of a container.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    import torch

    from penstock.worker import runner, scratch  # noqa: F401  # what every child needs, loaded once

    if "main" in sys.argv[3:]:
        # Each runner will load the trainer's main script, that penstock.client, and that pydantic: 0.15 s, once here.
        import pydantic_settings  # noqa: F401
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    deaths, wake = os.pipe()
    for fd in (deaths, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}  # pid -> the daemon's number for it
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    poll.register(deaths, select.POLLIN)
    try:
        channel.send("up")
        while True:
            for fd, _ in poll.poll():
                if fd == deaths:
                    with contextlib.suppress(BlockingIOError):
                        os.read(deaths, 4096)
                    _reap(children, channel)
                    continue
                while (message := channel.receive(wait=False)) is not None:
                    number = message.fields["id"]
                    pid = _fork(message, channel)
                    children[pid] = number
                    channel.send("forked", id=number, pid=pid)
    except (LaneLostError, BrokenPipeError, ConnectionResetError):
        pass  # the daemon is gone, or wants us gone
    finally:
        _end(children)


def _reap(children: dict[int, int], channel: Channel) -> None:
    """Collect all that have died: our children, whose end is told, and what they orphaned."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid in children:
            # Its group goes with it, before anybody can take the number: the pid is reserved while the group lives.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            channel.send("exited", id=children.pop(pid), status=os.waitstatus_to_exitcode(status))


def _end(groups: Iterable[int]) -> None:
    """Kill all that is below us: our children's groups, and then what became ours when they died."""
    for pid in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    for _ in range(LAST_KILLS):
        below = [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
        if not below:
            return
        for pid in below:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(message: Message, channel: Channel) -> int:
    control, output, ledger = message.fds
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.sock.close()
        _child(me, message.fields["role"], control, output, ledger)
    for fd in (control, output, ledger):
        os.close(fd)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return pid


def _child(parent: int, role: str, control: int, output: int, ledger: int) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; the daemon stops us
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        from penstock.worker import runner, scratch
        from penstock.worker.ledger import Ledger

        channel = Channel(socket.socket(fileno=control))
        if role == "runner":
            runner.run_slot(channel, Ledger(ledger))
        else:
            scratch.run_scratch(channel)
        code = 0
    except BaseException as error:
        # Out of the runner's own code: user errors never get here.
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
