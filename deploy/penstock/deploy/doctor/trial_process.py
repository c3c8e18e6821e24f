"""Where the doctor's patients are: the process that runs loaders, seen from the doctor, who waits with a deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock.deploy.forking_interpreter import ForkingInterpreter, kill_group, show_stack
from penstock.proto.errors import DeadlineError, WorkerLostError, error_named
from penstock.runtime.process.exit_status import describe_exit
from penstock.worker.processes.control_channel import ControlMessage

__all__ = ["TrialAnswer", "TrialProcesses"]


class TrialAnswer(list[ControlMessage]):
    """What a task said, in order; the last message is its `done`."""

    @property
    def done(self) -> ControlMessage:
        return self[-1]


class TrialProcesses(ForkingInterpreter):
    """Forks a fresh process for each task.

    `deadline_s`: of each task, seconds.
    """

    def __init__(self, seed: int, deadline_s: float) -> None:
        super().__init__("penstock.deploy.doctor.loader_trials", seed)
        self._deadline_s = deadline_s

    def ask(self, what: str, kind: str, parts: Sequence[bytes] = (), **fields: Any) -> TrialAnswer:
        """Have a fresh process do a task. `what` names it in errors.

        Raises what the task raised; WorkerLostError if its process died; DeadlineError, with the stack on standard
        error.
        """
        self.channel.send(kind, parts=len(parts), **fields)
        for part in parts:
            self.channel.send("part", part)
        until = time.monotonic() + self._deadline_s
        said = TrialAnswer()
        pid = status = 0
        try:
            while True:
                message = self.hear(until)
                if message is None:
                    if pid:
                        show_stack(pid)
                    raise DeadlineError(
                        f"{what} took more than {self._deadline_s:g} s" + ("; its stack is above" if pid else "")
                    )
                if message.kind == "forked":
                    pid = message.fields["pid"]
                elif message.kind == "exited":
                    status = message.fields["status"]
                    break
                else:
                    said.append(message)
        finally:
            if pid:
                kill_group(pid)  # what it left behind too
        if said and said.done.kind == "failed":
            raise error_named(**said.done.fields["error"])
        if not said or said.done.kind != "done":
            raise WorkerLostError(f"{what}: the process that ran it {describe_exit(status)}")
        return said
