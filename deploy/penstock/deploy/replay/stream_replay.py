"""Replay of a box's stream: takes batches from the slots in turn.

Lengths of epochs are not recorded. So the position at a step is computed as if no epoch ended on the way, and each
worker is advanced to its number of batches there. If one's epoch ends earlier, the position is computed again with this
end. Once all have reached their numbers, it is right: no unknown end lies before it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from penstock.deploy.loader_processes import Task
from penstock.proto.errors import StateUnavailableError
from penstock.proto.state.position import Position, advance, chain_at
from penstock.worker.processes.control_channel import ControlMessage

Ask = Callable[[Mapping[int, Task]], Mapping[int, ControlMessage]]


class StreamReplay:
    """Replay of a box's batches. `ask`: runs tasks by slot (slot_replay.py); `start`: where the workers are;
    `abandoned`: epoch that the loop abandoned -> its last step."""

    def __init__(self, ask: Ask, start: Position, abandoned: dict[int, int]) -> None:
        self.at = start.copy()
        self._start, self._ask, self._abandoned = start, ask, abandoned
        self._made = list(start.total)
        """By slot: batches made since the run's beginning."""
        self._ends: dict[tuple[int, int], int] = {}
        self._digests: dict[tuple[int, int], int] = {}

    @property
    def slot(self) -> int:
        """Slot whose batch was delivered at the last step."""
        return self.at.live[(self.at.cursor - 1) % len(self.at.live)]

    def to(self, step: int) -> None:
        """Advance all workers until the box's position is directly after this step."""
        while self.at.step < step:
            abandon_epoch = min((epoch for epoch in self._abandoned if epoch >= self.at.epoch), default=None)
            until = step if abandon_epoch is None else min(step, self._abandoned[abandon_epoch])
            if abandon_epoch is not None and until == self.at.step:
                self._leave(abandon_epoch)
            else:
                self._go(until)

    def _leave(self, epoch: int) -> None:
        if epoch > self.at.epoch:
            raise StateUnavailableError(
                f"later steps cannot be replayed from here, because the loop abandoned epoch {epoch} by `break` after "
                f"step {self.at.step}, before the epoch's first batch. Start from a checkpoint of a later step "
                "(--checkpoint)"
            )
        totals = enumerate(self.at.total)
        self._ask({slot: Task("leave", {"epoch": epoch, "total": total}) for slot, total in totals})
        self._made = list(self.at.total)
        self.at.abandon_epoch()

    def _go(self, step: int) -> None:
        while True:
            plan = advance(self.at, step, self._ends)
            tasks = {
                slot: Task("go", {"epoch": plan.epoch, "total": total})
                for slot, total in enumerate(plan.total)
                if total > self._made[slot]
            }
            if not tasks:
                self.at = plan
                return
            for slot, answer in self._ask(tasks).items():
                total = answer.fields["total"]
                for count, (digest,) in enumerate(struct.iter_unpack("<Q", answer.payload), self._made[slot] + 1):
                    self._digests[slot, count] = digest
                self._made[slot] = total
                if answer.fields["ended"]:
                    self._ends[slot, plan.epoch] = total

    def chain(self) -> int | None:
        """Return the stream digest here; None if that at the start is not known."""
        return chain_at(self._start, self.at.step, self._ends, self._abandoned, self._digests)
