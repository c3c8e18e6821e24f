"""The fork server: the process from which a worker's runners and helper processes are forked.

Importing torch takes a second or more and 150 MB. Forking a process that has imported torch takes milliseconds, and the
memory is shared. The daemon itself must never fork, because it runs gRPC. So the daemon starts a fork server: a fresh
interpreter that imports the modules that runners need, has no threads, no gRPC and no user code, and then only forks.
One fork server serves all runs of the daemon. A child leads a process group of its own and is a subreaper (see
orphans.py). So every process that user code starts can be killed with the child, and dies with its fork server.

Some modules are needed by few runners: a training job's main script that defines input_fn imports pydantic, for 0.1 s
of processor time. The fork server imports them when it is told to, before such a runner is forked. `penstock doctor`
and `penstock replay` run loaders in children of a fork server, too, by programs of their own.

The daemon gets a pidfd of each child with the answer to its request. The pidfd shows the child's end, also while the
fork server is stopped. Only the fork server, as the parent, gets the exit status, and reports it to the daemon.

A fork server outlives its daemon by a moment, because a killed daemon cannot clean up: when the control socket closes,
the fork server kills its children, their descendants and orphans, and ends. The fork server has a process group of its
own, so that a kill of the daemon's group does not kill it too. A fork server that is stopped by a signal is continued
when the daemon dies.
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
from penstock.runtime.process.end import has_ended, kill_child, reap
from penstock.runtime.process.spawn import fork
from penstock.runtime.process.titles import name_process
from penstock.runtime.process.watch import Process, become_subreaper, die_with_parent
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
"""What `ps` shows of the programs of this package. A command names the module of its own program instead."""
LAST_LOOKS = 90
"""Largest number of checks for orphans while the fork server ends. Then it ends even if some still live, for example
those of a fork bomb."""


def main() -> None:
    channel = ControlChannel(socket.socket(fileno=int(sys.argv[1])))
    die_with_parent(int(sys.argv[2]), signal.SIGCONT)
    become_subreaper()
    name_process("penstock forks")
    with _collected_once():
        # numpy imports its generators on first use, and each child seeds them: 5 ms less for each child
        import numpy.random  # noqa: F401
        import torch

        # modules that children need, loaded once
        from penstock import data  # noqa: F401
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
    """Turn the garbage collector off in the `with` block, and exempt what exists then from all later collections. The
    collector would scan all objects again and again, for a fifth of the time that importing torch takes. The imports
    leave 1 MiB of garbage, which is kept, because finding it would take 0.1 s."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def _reap(children: dict[int, int], channel: ControlChannel, orphans: Orphans) -> None:
    """Reap dead children, and report their exit status to the daemon. A child's process group is killed first, while
    its process id cannot yet be reused; but not while an orphan needs time to clean up."""
    for pid in list(children):
        if not has_ended(pid):
            continue
        status = reap(pid, group=not orphans.spares(children))
        forget_shared_memory([pid])
        channel.send("exited", id=children.pop(pid), status=status)


def _end(children: Iterable[int], orphans: Orphans) -> None:
    for pid in children:
        kill_child(pid)
        reap(pid, group=False)
        forget_shared_memory([pid])
    for _ in range(LAST_LOOKS):
        if not orphans.end(()):
            return
        time.sleep(ORPHANS_S)


def _fork(message: ControlMessage, channel: ControlChannel, own: Iterable[int]) -> int:
    """Fork a child as the daemon's message requests. own: descriptors of the fork server that the child must close."""
    pid = fork(partial(_child, os.getpid(), message, channel, own))
    for fd in message.fds:
        os.close(fd)
    return pid


def _drop_privileges(tempdir: str) -> None:
    """Change the user and enter the sandbox, as the fork server's command line says. tempdir: directory for the sockets
    of multiprocessing, used only if the new user may write to it."""
    for trait in sys.argv[3:]:
        if trait.startswith("user="):
            RunnerUser.decode(trait.removeprefix("user=")).become()
    if "sandboxed" in sys.argv[3:]:
        sandbox.enter()
    if tempdir and os.access(tempdir, os.W_OK | os.X_OK):
        multiprocessing.current_process()._config["tempdir"] = tempdir  # type: ignore[attr-defined]


def _child(parent: int, message: ControlMessage, parents_channel: ControlChannel, own: Iterable[int]) -> int:
    """Run the program of a forked child, and return its exit status. Errors of user code are handled inside. An
    exception here is a bug of Penstock, or comes from the machine, for example if the child cannot become the runners'
    user."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parents_channel.sock.close()
    for fd in own:
        os.close(fd)
    control, output, stacks, *progress_page = message.fds
    become_subreaper()
    write_stacks_to(stacks)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer; the daemon stops this process
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _drop_privileges(message.fields["tempdir"])
    die_with_parent(parent)  # again, because a change of user undoes it
    from penstock.worker.processes.progress_page import ProgressPage
    from penstock.worker.runner import replayer, runner

    channel, role = ControlChannel(socket.socket(fileno=control)), message.fields["role"]
    name_process(f"penstock {_NAMES.get(role, 'loader')}")
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
