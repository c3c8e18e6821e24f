"""A helper process: it has imported what a run's loaders need, and forks a fresh process for each task.

A helper process that is forked from the fork server imports the user's modules first, and whatever his input_fn
imports: a tenth of a second or a whole one, for each slot of a state. A helper does that once, and then only forks; the
child does the task (replayer.py), answers on the helper's own socket, and is gone. So no task meets what another one
left.

It is as good as a fresh one only if to import changed nothing but modules. Where the import drew random numbers, asked
for its slot, started a thread or a process, or opened a file, the helper says so and ends: tasks are done without.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn, cast

from penstock.proto.errors import LaneLostError
from penstock.proto.state import assignment as place_of
from penstock.proto.state.generators import capture_rng
from penstock.proto.v1 import records_pb2
from penstock.runtime.process import forks
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage
from penstock.worker.processes.orphans import forget_shared_memory, own_children
from penstock.worker.processes.user_code import load_input_fn
from penstock.worker.runner.fork_server import die_with_parent
from penstock.worker.runner.replayer import run_task

__all__ = ["run_helper"]


def run_helper(channel: ControlChannel) -> None:
    """Warm up, say so, and serve tasks until the daemon hangs up."""
    with contextlib.suppress(LaneLostError):
        message = cast(ControlMessage, channel.receive())
        spec = records_pb2.LoaderSpec.FromString(message.payload)
        with forks.hosting(channel):
            unfit = _warm_up(spec, message.fields["modules"])
        gc.freeze()  # what a collection would touch is copied for each task
        channel.send("warm", unfit=unfit)
        if not unfit:
            _serve(channel)


def _warm_up(spec: records_pb2.LoaderSpec, modules: Sequence[str]) -> str:
    """Import what the loader needs. Returns what else that did, "" for nothing."""
    place_of.set_assignment(place_of.NEUTRAL)
    before = _surroundings()
    try:
        load_input_fn(spec)
        for name in modules:
            with contextlib.suppress(Exception):  # not every name in sys.modules can be imported by itself
                importlib.import_module(name)
    except BaseException as error:  # sys.exit() in a module, too
        return f"it raised {type(error).__name__}"
    if place_of.looked_at():
        return "it asked for its assignment"
    after = _surroundings()
    return next((f"it changed its {what}" for what in before if before[what] != after[what]), "")


def _surroundings() -> dict[str, object]:
    """What an import should leave alone."""
    return {
        "random generators": capture_rng(),
        "threads": len(os.listdir("/proc/self/task")),
        "processes": own_children(),
        "open files": sorted(os.listdir("/proc/self/fd")),
    }


def _serve(channel: ControlChannel) -> None:
    """Until the daemon hangs up, a task dies, or leaves something behind: what is wrong then is told to a fresh child,
    and the fork server cleans up."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    me = os.getpid()
    while True:
        poll.poll()
        if channel.hung_up():
            return
        child = os.fork()
        if child == 0:
            _do_task(me, channel)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # while its number is its own
        status = os.waitpid(child, 0)[1]
        forget_shared_memory([child])
        if status or own_children():
            return


def _do_task(helper: int, channel: ControlChannel) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(helper)
        channel.send("working", pid=os.getpid())
        run_task(channel)
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
