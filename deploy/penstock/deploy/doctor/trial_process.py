"""Control of the child processes in which `penstock doctor` runs loaders. Each task has a deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock.deploy.loader_processes import LoaderForkServer, Task
from penstock.proto.errors import DeadlineError, LaneLostError, WorkerLostError, error_named
from penstock.worker.processes.control_channel import ControlMessage

__all__ = ["TrialAnswer", "TrialProcesses"]


class TrialAnswer(list[ControlMessage]):
    """Messages of a child for one task; the last one is `done`, with the result."""

    @property
    def done(self) -> ControlMessage:
        return self[-1]


class TrialProcesses(LoaderForkServer):
    """Fork server that forks a fresh child process for each task of at most `deadline_s` seconds."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__("penstock.deploy.doctor.loader_trials")
        self._deadline_s = deadline_s

    def ask(self, what: str, kind: str, parts: Sequence[bytes] = (), **fields: Any) -> TrialAnswer:
        """Run a task `kind` (loader_trials.py) in a fresh child process and return its messages. `what`: its name, for
        errors. Raises the task's error; WorkerLostError if the process died; DeadlineError, after its stack was
        printed."""
        answer = TrialAnswer()
        with self.fork() as child:
            child.ask(Task(kind, fields, parts=parts))
            until = time.monotonic() + self._deadline_s
            try:
                while (message := child.receive(until)) is not None:
                    answer.append(message)
                child.show_stack()
                raise DeadlineError(
                    f"{what} took more than {self._deadline_s:g} s (its stack is above). Raise --deadline if the "
                    "loader needs longer"
                )
            except LaneLostError:
                how = child.exit_description()
        if answer and answer.done.kind == "failed":
            raise error_named(**answer.done.fields["error"])
        if not answer or answer.done.kind != "done":
            raise WorkerLostError(f"{what}: the process that ran it {how}. See its output above")
        return answer
