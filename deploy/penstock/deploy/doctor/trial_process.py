"""Control of the child processes in which `penstock doctor` runs loaders. Each task that a child gets has a
deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock.deploy.loader_processes import LoaderForkServer, Task
from penstock.proto.errors import DeadlineError, LaneLostError, WorkerLostError, error_named
from penstock.worker.processes.control_channel import ControlMessage

__all__ = ["TrialAnswer", "TrialProcesses"]


class TrialAnswer(list[ControlMessage]):
    """Messages that a child sent for one task, in order. The last one has the kind `done` and the task's result."""

    @property
    def done(self) -> ControlMessage:
        return self[-1]


class TrialProcesses(LoaderForkServer):
    """Fork server that forks a fresh child process for each task. `deadline_s`: longest time of a task, in seconds."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__("penstock.deploy.doctor.loader_trials")
        self._deadline_s = deadline_s

    def ask(self, what: str, kind: str, parts: Sequence[bytes] = (), **fields: Any) -> TrialAnswer:
        """Run a task in a fresh child process and return the child's messages.

        Args:
            what: name of the task, for errors.
            kind: kind of the task, such as "stream" (loader_trials.py).
            parts: data for the task, such as saved states.
            fields: other fields of the task.

        Raises the error that the task raised; WorkerLostError if the process died; DeadlineError, after the process's
        stack was printed to standard error.
        """
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
