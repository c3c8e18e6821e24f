"""The process that children are forked from: torch imported once, nothing started.

Importing torch takes seconds and 150 MB; forking a process that has done so takes milliseconds, and the pages are
shared. The daemon itself must never fork, for it runs gRPC; so each run has a zygote, a fresh interpreter (with the
run's PYTHONHASHSEED, which only a fresh one takes) that imports what runners need, has no threads, no gRPC and no user
code, and then only forks. A child leads a process group of its own, so that whatever user code starts can be killed
with it, and dies with its zygote, as the zygote dies with its daemon.
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
from typing import NoReturn

from penstock.proto.errors import LaneLostError
from penstock.worker.control import Channel, Message

__all__ = ["die_with_parent", "main"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Be killed when `parent`, this process's parent, dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Serve fork requests on the inherited control socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal reaches us too; the daemon, who drains, stops us
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    parent = int(sys.argv[2])
    die_with_parent(parent)
    import torch

    from penstock.worker import runner, scratch  # noqa: F401  # what every child needs, loaded once

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    channel.send("up")
    children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, id)
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    try:
        while True:
            for fd, _ in poll.poll():
                if fd in children:
                    poll.unregister(fd)
                    pid, number = children.pop(fd)
                    os.close(fd)
                    _, status = os.waitpid(pid, 0)
                    channel.send("exited", id=number, status=os.waitstatus_to_exitcode(status))
                else:
                    while (message := channel.receive(wait=False)) is not None:
                        pid = _fork(message, channel)
                        pidfd = os.pidfd_open(pid)
                        children[pidfd] = pid, message.fields["id"]
                        poll.register(pidfd, select.POLLIN)
                        channel.send("forked", id=message.fields["id"], pid=pid)
    except LaneLostError:
        for pid, _ in children.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _fork(message: Message, channel: Channel) -> int:
    control, output, ledger = message.fds
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
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
