"""Control of the child processes in which `penstock replay` runs a box's loaders. All tasks share one deadline."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from penstock.deploy.loader_processes import LoaderForkServer, LoaderProcess, Task, wait_for_messages
from penstock.proto.errors import DeadlineError, LaneLostError, WorkerLostError, error_named
from penstock.worker.processes.control_channel import ControlMessage

__all__ = ["ReplayForker", "ReplayProcesses", "Task", "digests_of"]


def digests_of(answer: ControlMessage) -> list[int]:
    """Return the digests of a child's batches since its last answer, up to batch `total`."""
    return list(struct.unpack(f"<{len(answer.payload) // 8}Q", answer.payload))


class ReplayForker(LoaderForkServer):
    def __init__(self) -> None:
        super().__init__("penstock.deploy.replay.slot_replay")


class ReplayProcesses:
    """Child processes of a box's `count` workers. `until`: deadline of all tasks, in monotonic seconds;
    `report_progress`: called with (slot, number of batches)."""

    def __init__(
        self, forker: ReplayForker, count: int, until: float, report_progress: Callable[[int, int], None]
    ) -> None:
        self._until, self._report_progress = until, report_progress
        self._at = [0] * count
        self._children: list[LoaderProcess] = []
        for _ in range(count):
            self._children.append(forker.fork())

    def __enter__(self) -> ReplayProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for child in self._children:
            child.close()

    def ask(self, tasks: Mapping[int, Task]) -> dict[int, ControlMessage]:
        """Run tasks in these slots' children at the same time, and return the answers by slot. Raises the first error
        of a child; WorkerLostError if one died; DeadlineError, after their stacks were printed to standard error."""
        for slot, task in tasks.items():
            self._children[slot].ask(task)
        answers: dict[int, ControlMessage] = {}
        while len(answers) < len(tasks):
            waited = {self._children[slot]: slot for slot in tasks if slot not in answers}
            news = wait_for_messages(waited, self._until)
            if not news:
                raise self._late(sorted(waited.values()))
            for child in news:
                self._receive_reply(waited[child], answers)
        return answers

    def _receive_reply(self, slot: int, answers: dict[int, ControlMessage]) -> None:
        try:
            while slot not in answers and (message := self._children[slot].poll()) is not None:
                if message.kind == "at":
                    self._at[slot] = message.fields["total"]
                    self._report_progress(slot, self._at[slot])
                elif message.kind == "failed":
                    raise error_named(**message.fields["error"])
                else:
                    answers[slot] = message
        except LaneLostError as error:
            how = f"the process that replayed worker slot {slot} {self._children[slot].exit_description()}"
            raise WorkerLostError(
                f"{how}, after its batch {self._at[slot]} or a later one. See its output above"
            ) from error

    def _late(self, slots: list[int]) -> DeadlineError:
        for slot in slots:
            self._children[slot].show_stack()
        at = ", ".join(f"worker slot {slot} last reported batch {self._at[slot]}" for slot in slots)
        return DeadlineError(f"the replay did not finish in time ({at}; stacks are above). Raise --timeout")
