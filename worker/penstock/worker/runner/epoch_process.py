"""Epoch process: a child of a slot's process, which makes one epoch of a pure loader and ends.

The slot's process calls input_fn once and never iterates, so each child begins with what input_fn left. It hands over
what belongs to the slot: plain values and descriptors. Lane, ring and generation stay with the slot. If a child dies
without a record, the slot's process ends likewise, so that the daemon sees how; but if the loop has abandoned its
epoch, the slot's process kills a child that stays in user code, and the training job connects again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

from penstock.proto.errors import LaneLostError
from penstock.proto.lane.producer import Producer
from penstock.proto.state.codec import decode_state, encode_state
from penstock.runtime.process.end import reap
from penstock.runtime.process.lifetime import become_subreaper
from penstock.runtime.process.spawn import fork
from penstock.runtime.process.titles import name_process, title_process
from penstock.runtime.process.watch import Process, wait_for_any
from penstock.worker.processes.control_channel import (
    DESCRIPTORS_CLOSED,
    MAX_FDS,
    ControlChannel,
    DescriptorsClosedError,
)
from penstock.worker.processes.orphans import Orphans, forget_shared_memory

LEAVE_S = 0.5
"""Seconds to leave the user's next() in an abandoned epoch, and, after the record, to close the iterator and end."""
_ORPHANS_S = 0.01
_LOOK_S = 0.25
"""Seconds between two looks whether a child has read that the loop has abandoned its epoch."""


@dataclass(frozen=True)
class Outcome:
    record: dict[str, Any]
    fds: list[int]


def run_epoch(
    title: str,
    work: Callable[[Callable[[int], None]], Outcome],
    leave: Callable[[], None],
    started: Callable[[int], None],
    lane: Producer,
    unread: Callable[[], bool],
) -> Outcome | None:
    """Fork a child that calls `work`, hands over its outcome, and calls `leave`; None if it was killed because it
    stayed in user code of an abandoned epoch. If it hands over nothing for another reason, end as it did. title: for
    `ps`. work: gets a function for the descriptor of each new connection of the lane. started: called with the child's
    id. unread: True if the child has not read that the loop has abandoned an epoch."""
    ours, theirs = map(ControlChannel, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    pid = fork(partial(_child, ours, theirs, title, work, leave))
    theirs.close()
    with contextlib.closing(ours), Process(pid) as child:
        started(pid)
        outcome = _received(ours, child, lane, unread)
        left = outcome is None and unread()
        if left:
            child.kill()
        elif outcome is None:
            child.wait()
        elif not child.wait(LEAVE_S):
            child.kill()
    status = reap(pid)
    forget_shared_memory([pid])
    _end_orphans()
    if outcome is None and not left:
        die_like(status)
    return outcome


def _child(
    ours: ControlChannel,
    theirs: ControlChannel,
    title: str,
    work: Callable[[Callable[[int], None]], Outcome],
    leave: Callable[[], None],
) -> int:
    ours.close()
    become_subreaper()
    name_process("penstock-epoch")
    title_process(title)
    try:
        outcome = work(lambda fd: theirs.send("lane", fds=[fd]))
        _hand_over(outcome, theirs)
    except DescriptorsClosedError:
        return DESCRIPTORS_CLOSED
    leave()
    return 0


def _hand_over(outcome: Outcome, theirs: ControlChannel) -> None:
    """Send descriptors before the record: when that has arrived, all has."""
    for start in range(0, len(outcome.fds), MAX_FDS):
        theirs.send("descriptors", fds=outcome.fds[start : start + MAX_FDS])
    theirs.send("record", encode_state(outcome.record))


def _received(ours: ControlChannel, child: Process, lane: Producer, unread: Callable[[], bool]) -> Outcome | None:
    """Wait for what the child hands over; None if it ends before, or has not read of an abandoned epoch for LEAVE_S:
    then it is in user code."""
    fds: list[int] = []
    until = 0.0
    """Time by which a break must have been read; 0 if none was seen."""
    while True:
        if not wait_for_any([ours.fileno(), child.fileno()], _LOOK_S):
            if not unread():
                until = 0.0
            elif not until:
                until = time.monotonic() + LEAVE_S
            elif time.monotonic() > until:
                return None
            continue
        has_ended = child.ended  # read first: what it sent before can still be received
        try:
            message = ours.receive(wait=False)
        except LaneLostError:
            message, has_ended = None, True
        if message is None:
            if has_ended:
                for fd in fds:
                    os.close(fd)
                return None
        elif message.kind == "lane":
            lane.keep_watching(socket.socket(fileno=message.fds[0]))
        elif message.kind == "record":
            return Outcome(cast(dict[str, Any], decode_state(message.payload)), fds)
        else:
            fds += message.fds


def _end_orphans() -> None:
    orphans, until = Orphans(), time.monotonic() + LEAVE_S
    while orphans.end(()) and time.monotonic() < until:
        time.sleep(_ORPHANS_S)


def die_like(status: int) -> NoReturn:
    """End as a child with this status; a negative one is minus a signal."""
    if status < 0:
        faulthandler.disable()  # the child has written its stack
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-status, signal.SIG_DFL)
        signal.raise_signal(-status)
        time.sleep(LEAVE_S)
    os._exit(max(status, 0))
