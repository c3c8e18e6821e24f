"""The processes that run a box's loaders again, seen from `penstock replay`, which waits with a deadline."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from penstock.deploy.forking_interpreter import ForkingInterpreter, kill_group, show_stack
from penstock.proto.errors import DeadlineError, LaneLostError, PenstockError, WorkerLostError, error_named
from penstock.runtime.process.exit_status import describe_exit
from penstock.worker.processes.child_processes import START_DEADLINE_S
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage

__all__ = ["ReplayForker", "ReplayProcesses", "ReplayTask", "digests_of"]

EXIT_S = 2.0
"""For a child whose socket is closed to be seen to have ended."""


@dataclass(frozen=True)
class ReplayTask:
    """What a child is asked: see slot_replay.py."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    payload: bytes = b""
    parts: Sequence[bytes] = ()


def digests_of(answer: ControlMessage) -> list[int]:
    """Of the batches since the child's last answer; the last is that of batch `total`."""
    return list(struct.unpack(f"<{len(answer.payload) // 8}Q", answer.payload))


class ReplayForker(ForkingInterpreter):
    """Forks children that have seen no user code, and keeps them."""

    def __init__(self, seed: int) -> None:
        super().__init__("penstock.deploy.replay.slot_replay", seed)

    def fork(self) -> tuple[ControlChannel, int]:
        """A new child: the socket to it, and its process id."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self.channel.send("fork", fds=[theirs.fileno()])
            return ControlChannel(ours), int(self._answer().fields["pid"])

    def reap(self, pid: int) -> int:
        """The exit status of a child that has ended, as Python has it."""
        self.channel.send("reap", pid=pid)
        return int(self._answer().fields["status"])

    def _answer(self) -> ControlMessage:
        message = self.hear(time.monotonic() + START_DEADLINE_S)
        if message is None:
            raise DeadlineError("the interpreter that runs the loaders does not answer")
        return message


class ReplayProcesses:
    """`count` children, one for each worker of the box.

    `until`: the monotonic time at which everything must be done. `told`: hears (slot, total) from time to time.
    """

    def __init__(self, forker: ReplayForker, count: int, until: float, told: Callable[[int, int], None]) -> None:
        self._forker, self._until, self._told = forker, until, told
        self._at = [0] * count
        self._channels: list[ControlChannel] = []
        self._pids: list[int] = []
        for _ in range(count):
            channel, pid = forker.fork()
            self._channels.append(channel)
            self._pids.append(pid)

    def __enter__(self) -> ReplayProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill them, and what they left behind."""
        for pid in self._pids:
            kill_group(pid)
        for channel in self._channels:
            channel.close()

    def ask(self, tasks: Mapping[int, ReplayTask]) -> dict[int, ControlMessage]:
        """Have children do their tasks, all at the same time; their answers by slot.

        Raises what one of them raised first; WorkerLostError if one died; DeadlineError, with the stacks on standard
        error.
        """
        for slot, task in tasks.items():
            try:
                self._channels[slot].send(task.kind, task.payload, parts=len(task.parts), **task.fields)
                for part in task.parts:
                    self._channels[slot].send("part", part)
            except LaneLostError as error:
                raise self._died(slot) from error
        answers: dict[int, ControlMessage] = {}
        while len(answers) < len(tasks):
            waited = {self._channels[slot].fileno(): slot for slot in tasks if slot not in answers}
            ready, _, _ = select.select(list(waited), [], [], max(0.0, self._until - time.monotonic()))
            if not ready:
                raise self._late(sorted(waited.values()))
            for fd in ready:
                self._hear(waited[fd], answers)
        return answers

    def _hear(self, slot: int, answers: dict[int, ControlMessage]) -> None:
        try:
            while slot not in answers and (message := self._channels[slot].receive(wait=False)) is not None:
                if message.kind == "at":
                    self._at[slot] = message.fields["total"]
                    self._told(slot, self._at[slot])
                elif message.kind == "failed":
                    raise error_named(**message.fields["error"])
                else:
                    answers[slot] = message
        except LaneLostError as error:
            raise self._died(slot) from error

    def _died(self, slot: int) -> PenstockError:
        name = f"the process that ran slot {slot} again"
        how = f"{name} closed its descriptors"
        fd = os.pidfd_open(self._pids[slot])
        try:
            if select.select([fd], [], [], EXIT_S)[0]:
                how = f"{name} {describe_exit(self._forker.reap(self._pids[slot]))}"
        finally:
            os.close(fd)
        return WorkerLostError(f"{how}, after batch {self._at[slot]} of the worker or later")

    def _late(self, slots: list[int]) -> DeadlineError:
        for slot in slots:
            show_stack(self._pids[slot])
        at = ", ".join(f"slot {slot} at batch {self._at[slot]}" for slot in slots)
        return DeadlineError(
            f"the replay did not get there in time: {at}; give it more with --timeout. Stacks are above"
        )
