"""The process that children are forked from: torch imported once, nothing started.

Importing torch takes seconds and 150 MB; forking a process that has done so takes milliseconds, and the pages are
shared. The daemon itself must never fork, for it runs gRPC; so each run has a fork server, a fresh interpreter (with
the run's PYTHONHASHSEED, which only a fresh one takes) that imports what runners need, has no threads, no gRPC and no
user code, and then only forks. A child leads a process group of its own and is a subreaper (see orphans.py), so that
whatever user code starts can be killed with it, and dies with its fork server.

The daemon gets a pidfd of each child with the answer to its request: it sees the child's end by that, also while the
fork server is stopped. The exit status is the fork server's to tell.

A fork server outlives its daemon by a moment, for a killed one cannot clean up: it sees the end of the control socket,
kills all that its children started, and what they left to it, and goes. So it is in a group of its own, or a kill of
the daemon's group would take it along; and if somebody had stopped it, the daemon's death continues it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import NoReturn

from penstock.proto.errors import LaneLostError
from penstock.runtime.process import sandbox
from penstock.worker.processes import control_groups
from penstock.worker.processes.control_channel import (
    DESCRIPTORS_CLOSED,
    ControlChannel,
    ControlMessage,
    DescriptorsClosedError,
)
from penstock.worker.processes.orphans import Orphans, become_subreaper, forget_shared_memory
from penstock.worker.processes.runner_user import RunnerUser
from penstock.worker.processes.stack_dump import write_stacks_to

__all__ = ["die_with_parent", "main"]

_PR_SET_PDEATHSIG = 1
ORPHANS_S = 0.05
"""Between two looks at orphans that are about to end."""
LAST_LOOKS = 90
"""At orphans, at the end; a fork bomb may be quicker, and the fork server goes all the same."""


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Be sent this signal when `parent`, this process's parent, dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Serve fork requests on the inherited control socket until it closes."""
    channel = ControlChannel(socket.socket(fileno=int(sys.argv[1])))
    die_with_parent(int(sys.argv[2]), signal.SIGCONT)
    become_subreaper()
    gc.disable()  # it would walk, again and again, what is imported to stay: a fifth of the time that torch takes
    import numpy.random  # noqa: F401  # which numpy itself puts off: 5 ms in each child, for they seed it
    import torch

    # What children need, loaded once.
    from penstock import data  # noqa: F401
    from penstock.worker.runner import helper_process, replayer, runner  # noqa: F401

    if "main" in sys.argv[3:]:
        # Each runner will load the trainer's main script, that penstock.client, and that pydantic: 0.15 s, once here.
        import pydantic_settings  # noqa: F401
    torch.set_num_threads(1)
    gc.freeze()  # garbage too: to find it would take 0.1 s, and it is a mebibyte
    gc.enable()
    deaths, wake = os.pipe()
    for fd in (deaths, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}  # pid -> the daemon's number for it
    orphans, left = Orphans(), False
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    poll.register(deaths, select.POLLIN)
    try:
        channel.send("up")
        while True:
            ready = poll.poll(ORPHANS_S * 1000 if left else None)
            for fd, _ in ready:
                if fd == deaths:
                    with contextlib.suppress(BlockingIOError):
                        os.read(deaths, 4096)
                    _reap(children, channel, orphans)
                    left = True
                    continue
                while (message := channel.receive(wait=False)) is not None:
                    number = message.fields["id"]
                    pid = _fork(message, channel, (deaths, wake))
                    children[pid] = number
                    pidfd = os.pidfd_open(pid)
                    channel.send("forked", fds=[pidfd], id=number, pid=pid)
                    os.close(pidfd)
            left = left and orphans.end(children)
    except (LaneLostError, BrokenPipeError, ConnectionResetError):
        pass  # the daemon is gone, or wants us gone
    finally:
        _end(children, orphans)
    os._exit(0)  # nothing here is worth the half second in which the interpreter would take torch apart


def _reap(children: dict[int, int], channel: ControlChannel, orphans: Orphans) -> None:
    """Collect the children that have died, and tell their ends. Their group goes first, while its number is theirs."""
    for pid in list(children):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            continue
        if not orphans.spares(children):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        forget_shared_memory([pid])
        channel.send("exited", id=children.pop(pid), status=status)


def _end(children: Iterable[int], orphans: Orphans) -> None:
    """Kill all that is below us: our children, and then what became ours when they died."""
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        forget_shared_memory([pid])
    for _ in range(LAST_LOOKS):
        if not orphans.end(()):
            return
        time.sleep(ORPHANS_S)


def _fork(message: ControlMessage, channel: ControlChannel, own: Iterable[int]) -> int:
    """`own`: descriptors that are no business of a child's."""
    control, output, progress_page, stacks = message.fds
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.sock.close()
        for fd in own:
            os.close(fd)
        fields = message.fields
        _child(me, fields["role"], fields["tempdir"], fields["group"], control, output, progress_page, stacks)
    for fd in message.fds:
        os.close(fd)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return pid


def _give_up_rights(tempdir: str) -> None:
    """`tempdir`: where multiprocessing, and its processes below this one, put their sockets if this user may."""
    for trait in sys.argv[3:]:
        if trait.startswith("user="):
            RunnerUser.decode(trait.removeprefix("user=")).become()
    if "caged" in sys.argv[3:]:
        sandbox.enter()
    if tempdir and os.access(tempdir, os.W_OK | os.X_OK):
        multiprocessing.current_process()._config["tempdir"] = tempdir  # type: ignore[attr-defined]


def _child(
    parent: int, role: str, tempdir: str, group: str, control: int, output: int, progress_page: int, stacks: int
) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        become_subreaper()
        write_stacks_to(stacks)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; the daemon stops us
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        if group:
            control_groups.enter(group)
        _give_up_rights(tempdir)
        die_with_parent(parent)  # which a change of user undoes
        from penstock.worker.processes.progress_page import ProgressPage
        from penstock.worker.runner import helper_process, replayer, runner

        channel = ControlChannel(socket.socket(fileno=control))
        if role == "runner":
            runner.run_slot(channel, ProgressPage(progress_page))
        elif role == "helper":
            helper_process.run_helper(channel)
        else:
            replayer.run_task(channel)
        code = 0
    except DescriptorsClosedError:
        code = DESCRIPTORS_CLOSED
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
