"""A warm helper: a process that has imported the modules of a run's loaders, and forks a fresh child for each task.

A child that is forked from the fork server must first import the user's modules, and the modules that input_fn imports.
This takes 0.1 to 1 s for each slot whose state is made. A warm helper imports these modules once, and then only forks.
The forked child does the task (replayer.py), answers on the warm helper's own socket, and ends. So no task is affected
by an earlier task.

A warm helper gives the same results as a fresh child only if importing had no other effect. If an import drew random
numbers, read the assignment, started a thread or a process, or opened a file, the warm helper reports that and ends.
Then fresh children do the tasks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Sequence
from functools import partial
from typing import cast

from penstock.proto.errors import LaneLostError
from penstock.proto.state import assignment as assignments
from penstock.proto.state.generators import capture_rng
from penstock.proto.v1 import records_pb2
from penstock.runtime.process import forks
from penstock.runtime.process.end import reap
from penstock.runtime.process.spawn import fork
from penstock.runtime.process.titles import title_process
from penstock.runtime.process.watch import readable
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage
from penstock.worker.processes.orphans import forget_shared_memory, own_children
from penstock.worker.processes.user_code import load_input_fn
from penstock.worker.runner.replayer import run_task

__all__ = ["run_helper"]


def run_helper(channel: ControlChannel) -> None:
    """Run a warm helper: import the modules that tasks need, report the result, and do tasks until the daemon closes
    the channel."""
    with contextlib.suppress(LaneLostError):
        message = cast(ControlMessage, channel.receive())
        spec = records_pb2.LoaderSpec.FromString(message.payload)
        title_process(f"penstock helper {spec.input_fn}")
        with forks.hosting(channel):
            unfit = _warm_up(spec, message.fields["modules"])
        gc.freeze()  # a collection would write to shared pages, which are then copied for each task
        channel.send("warm", unfit=unfit)
        if not unfit:
            _serve(channel)


def _warm_up(spec: records_pb2.LoaderSpec, modules: Sequence[str]) -> str:
    """Import the modules that the loader needs. Return a description of the first side effect of these imports, "" if
    they had none."""
    assignments.set_assignment(assignments.NEUTRAL)
    before = _surroundings()
    try:
        load_input_fn(spec)
        for name in modules:
            with contextlib.suppress(Exception):  # some names in sys.modules cannot be imported
                importlib.import_module(name)
    except BaseException as error:  # sys.exit() in a module, too
        return f"importing raised {type(error).__name__}"
    if assignments.looked_at():
        return "importing read the assignment"
    after = _surroundings()
    return next((f"importing changed the {what}" for what in before if before[what] != after[what]), "")


def _surroundings() -> dict[str, object]:
    """Return the parts of this process's state that importing modules should not change, by name."""
    return {
        "random generators": capture_rng(),
        "threads": len(os.listdir("/proc/self/task")),
        "processes": own_children(),
        "open files": sorted(os.listdir("/proc/self/fd")),
    }


def _serve(channel: ControlChannel) -> None:
    """Fork a child for each task that arrives. Return when the daemon closes the channel, when the child of a task
    fails, or when processes that user code started are left after a task.

    The daemon repeats a failed task in a fresh child of the fork server, which reports the error. The fork server kills
    processes that are left after a task.
    """
    while True:
        readable(channel.fileno())
        if channel.hung_up():
            return
        child = fork(partial(_do_task, channel))
        status = reap(child)
        forget_shared_memory([child])
        if status or own_children():
            return


def _do_task(channel: ControlChannel) -> None:
    channel.send("working", pid=os.getpid())
    run_task(channel)
