"""Loaders that kill their own runner at an exact point, once. Workers of the system tests import this module by name.

A point is a place in the runner's own code, for the moments that matter lie between two calls of user code: after a
snapshot was taken and before the batch was sent, say. So input_fn, which runs in the runner, puts a trap around one of
its methods. The file that a trap leaves behind says that it has snapped; a runner that finds it goes on.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import streams

from penstock.proto.lane.producer import Producer
from penstock.worker import current_assignment
from penstock.worker.loader.slot_loader import SlotLoader
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.runner.slot_stream import SlotStream


class Point(NamedTuple):
    """Point at which a trap is set: a method of a class, and the condition under which the trap acts."""

    owner: Any
    method: str
    when: Callable[[Any, tuple[Any, ...]], bool] = lambda self, args: True
    after: bool = False


def _total(number: int) -> Callable[[Any, tuple[Any, ...]], bool]:
    """Return the condition that the slot is at the batch of this number."""
    return lambda self, args: bool(self.position.total == number)


def _recorded(number: int) -> Callable[[Any, tuple[Any, ...]], bool]:
    return lambda self, args: bool(args[0] == number)


PASS = 12
"""Batches of an epoch of one worker."""
CHECKPOINT = 7
"""Number of the batch of worker 0 that is step 13 with two workers: a checkpoint step, after which a snapshot is
taken."""

POINTS = {
    "iter": Point(SlotLoader, "_iterate"),
    "epoch_start": Point(SlotStream, "keep"),
    "first next": Point(SlotLoader, "next", _total(0)),
    "next": Point(SlotLoader, "next", _total(3), after=True),
    # The first two batches of a runner are followed by snapshots, whatever they cost; which these are depends on how
    # far the loop was when the runner before died.
    "state_dict": Point(SlotLoader, "state", lambda self, args: bool(self.position.total >= 4), after=True),
    "after the snapshot": Point(ProgressPage, "record", _recorded(CHECKPOINT)),
    "before the send": Point(Producer, "publish", lambda self, args: bool(args[1] == 8)),
    "after the send": Point(Producer, "publish", lambda self, args: bool(args[1] == 9), after=True),
    "last batch": Point(ProgressPage, "record", _recorded(PASS)),
    "end of the epoch": Point(Producer, "end", lambda self, args: bool(args[1] == PASS)),
    "next epoch": Point(SlotLoader, "_iterate", _total(PASS)),
    "second epoch": Point(SlotLoader, "next", _total(PASS + 4)),
}


def set_trap(point: str, marker: str) -> None:
    """Kill this process at the point, unless the marker is there."""
    owner, name, when, after = POINTS[point]
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def trap(self: Any, *args: Any, **kwargs: Any) -> Any:
        snaps = when(self, args)
        if snaps and not after:
            snap(marker)
        result = inner(self, *args, **kwargs)
        if snaps and after:
            snap(marker)
        return result

    setattr(owner, name, trap)


def snap(marker: str) -> None:
    """Be killed, unless that has happened."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _loader(kind: str) -> Any:
    if kind == "generator":
        return streams.generator(PASS)
    if kind == "shared":
        return streams.Shared(PASS * current_assignment().total_num_workers)
    if kind == "fresh":
        return streams.fresh(PASS)
    made = streams.shuffled if kind.startswith("shuffled") else streams.stateful
    return made(4 * PASS, int(kind[-1]))


KINDS = ["generator", "shared", "fresh", "shuffled 0", "shuffled 2", "stateful 0", "stateful 2"]


def trapped(kind: str, points: list[str], folder: str) -> Any:
    """A loader of a kind. Worker 0 dies once at each of the points; markers in `folder` remember."""
    if current_assignment().global_worker_id == 0:
        for point in points:
            marker = os.path.join(folder, point)
            if point == "input_fn":
                snap(marker)
            elif not os.path.exists(marker):
                set_trap(point, marker)
    return _loader(kind)


# ---- loaders that wait, for whoever wants to do something at that moment


def wait_for(folder: str, name: str) -> None:
    """Say that we are there, and wait until we may go on."""
    Path(folder, f"{name} reached").touch()
    while not Path(folder, f"{name} released").exists():
        time.sleep(0.01)


def waits_in_input_fn(folder: str) -> Any:
    """Worker 0 waits before it is ready."""
    if current_assignment().global_worker_id == 0:
        wait_for(folder, "input_fn")
    return _loader("stateful 0")


class Heavy(streams.Counter):
    """A state of some size."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"ballast": bytes(6 << 20)}


def heavy(batches: int) -> Heavy:
    return Heavy(batches, first=1000 * current_assignment().global_worker_id)


class Parent(streams.Counter):
    """Starts a process that has nothing to end for."""

    def __iter__(self) -> Any:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        return super().__iter__()


def parent(batches: int) -> Parent:
    return Parent(batches, first=1000 * current_assignment().global_worker_id)
