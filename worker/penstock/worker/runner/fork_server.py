"""The fork server: the process from which a worker's runners and helper processes are forked.

Importing torch takes a second or more and 150 MB; a fork takes milliseconds and shares memory. The daemon must never
fork, because it runs gRPC. So a fresh interpreter without threads, gRPC and user code imports what runners need, and
then only forks, for all runs. A child leads a process group and is a subreaper (orphans.py), so all that user code
starts can be killed with it, and dies with its fork server.

`penstock doctor` and `penstock replay` use a fork server too, with programs of their own. The daemon gets a pidfd
of each child, which shows its end also while the fork server is stopped; only the fork server, as parent, gets the
status.

It outlives its daemon by a moment, because a killed daemon cannot clean up: when the control socket closes, it kills
children, descendants and orphans. It has its own process group, so that a kill of the daemon's group spares it, and is
continued when the daemon dies if a signal has stopped it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial

from penstock.proto.errors import LaneLostError
from penstock.runtime.process import forks, sandbox
from penstock.runtime.process.end import has_ended, reap, signal_child
from penstock.runtime.process.lifetime import become_subreaper, die_with_parent, outlive_signals
from penstock.runtime.process.spawn import fork
from penstock.runtime.process.titles import name_process
from penstock.runtime.process.watch import Process
from penstock.worker.processes.control_channel import (
    DESCRIPTORS_CLOSED,
    ControlChannel,
    ControlMessage,
    DescriptorsClosedError,
)
from penstock.worker.processes.orphans import Orphans, forget_shared_memory
from penstock.worker.processes.runner_user import RunnerUser
from penstock.worker.processes.stack_dump import write_stacks_to

ORPHANS_S = 0.05
_NAMES = {"runner": "runner", "task": "replay"}
"""What `ps` shows; a command names the module of its own program instead."""
LAST_LOOKS = 90
"""Checks for orphans at the end; then some may still live, such as those of a fork bomb."""


def main() -> None:
    outlive_signals()
    channel = ControlChannel(socket.socket(fileno=int(sys.argv[1])))
    die_with_parent(int(sys.argv[2]), signal.SIGCONT)
    become_subreaper()
    name_process("penstock-forks")
    with _collected_once():
        # numpy imports its generators on first use, and each child seeds them: 5 ms less for each child
        import numpy.random  # noqa: F401

        # modules that children need, loaded once; pydantic_settings for scripts that import penstock.client
        import pydantic_settings  # noqa: F401
        import torch

        from penstock.data.loading import torch_datasets  # noqa: F401
        from penstock.worker.runner import replayer, runner  # noqa: F401
    torch.set_num_threads(1)
    deaths, wake = os.pipe()
    for fd in (deaths, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}  # pid -> the daemon's number for the child
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
                    if message.kind == "import":
                        with _collected_once():
                            importlib.import_module(message.fields["module"])
                        continue
                    number = message.fields["id"]
                    pid = _fork(message, channel, (deaths, wake))
                    children[pid] = number
                    with Process(pid) as child:
                        channel.send("forked", fds=[child.fileno()], id=number, pid=pid)
            left = left and orphans.end(children)
    except (LaneLostError, BrokenPipeError, ConnectionResetError):
        pass  # the daemon has ended, or has closed the socket to end this process
    finally:
        _end(children, orphans)
    os._exit(0)  # the interpreter's own shutdown would take half a second


@contextlib.contextmanager
def _collected_once() -> Iterator[None]:
    """Turn the collector off in the block, and exempt what exists then: it would scan all again, for a fifth of torch's
    import. The imports leave 1 MiB of garbage, kept because finding it takes 0.1 s."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def _reap(children: dict[int, int], channel: ControlChannel, orphans: Orphans) -> None:
    """Reap dead children, and report their status. The process group is killed first, before its id can be reused,
    unless an orphan needs time to clean up."""
    for pid in list(children):
        if not has_ended(pid):
            continue
        status = reap(pid, group=not orphans.spares(children))
        forget_shared_memory([pid])
        channel.send("exited", id=children.pop(pid), status=status)


def _end(children: Iterable[int], orphans: Orphans) -> None:
    for pid in children:
        signal_child(pid)
        reap(pid, group=False)
        forget_shared_memory([pid])
    for _ in range(LAST_LOOKS):
        if not orphans.end(()):
            return
        time.sleep(ORPHANS_S)


def _fork(message: ControlMessage, channel: ControlChannel, own: Iterable[int]) -> int:
    """own: descriptors that the child must close."""
    pid = fork(partial(_child, os.getpid(), message, channel, own))
    for fd in message.fds:
        os.close(fd)
    return pid


def _drop_privileges(tempdir: str) -> None:
    """Change user and enter the sandbox, as the command line says. tempdir: for multiprocessing, if the new user may
    write to it."""
    for trait in sys.argv[3:]:
        if trait.startswith("user="):
            RunnerUser.decode(trait.removeprefix("user=")).become()
    if "sandboxed" in sys.argv[3:]:
        sandbox.enter()
    if tempdir and os.access(tempdir, os.W_OK | os.X_OK):
        multiprocessing.current_process()._config["tempdir"] = tempdir  # type: ignore[attr-defined]


def _child(parent: int, message: ControlMessage, parents_channel: ControlChannel, own: Iterable[int]) -> int:
    """Return the exit status of a child's program. Errors of user code are handled inside; an exception here is a bug,
    or the machine's, for example if the child cannot become the runners' user."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parents_channel.sock.close()
    for fd in own:
        os.close(fd)
    control, output, stacks, *progress_page = message.fds
    become_subreaper()
    write_stacks_to(stacks)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _drop_privileges(message.fields["tempdir"])
    die_with_parent(parent)  # again, because a change of user undoes it
    from penstock.worker.processes.progress_page import ProgressPage
    from penstock.worker.runner import replayer, runner

    channel, role = ControlChannel(socket.socket(fileno=control)), message.fields["role"]
    name_process(f"penstock-{_NAMES.get(role, 'loader')}")
    try:
        if role == "runner":
            runner.run_slot(channel, ProgressPage(*progress_page))
        else:
            forks.host_user_code()
            forks.keep(channel)
            program = replayer.run_task if role == "task" else importlib.import_module(role).run_child
            with contextlib.suppress(LaneLostError):
                program(channel)
    except DescriptorsClosedError:
        return DESCRIPTORS_CLOSED
    finally:
        channel.sock.detach()  # not closed: user code may have closed it, and reused the descriptor's number
    return 0


if __name__ == "__main__":
    main()
