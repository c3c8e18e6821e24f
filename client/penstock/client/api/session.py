"""Session of an opened loader: its run on an appliance, and the reader of the run's batches. A run is the loader's
stream under the job's name."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from penstock.client.api.appliance import Appliance
from penstock.client.stream.stream_interfaces import Reader, StreamRun, StreamStats
from penstock.proto.errors import EmptyInputError
from penstock.proto.state.counts import by_key, by_source, imbalance_of
from penstock.proto.tracebacks import warn_user

__all__ = ["Session"]

_log = logging.getLogger("penstock.client")


@dataclass
class Session:
    """Session of an opened loader: its run on an appliance, the reader of the run's batches, and the step at which the
    present epoch began. It lasts until the loader is closed or a state is loaded."""

    appliance: Appliance
    run: StreamRun
    reader: Reader
    name: str
    began_at: int
    """Number of the last step before the session's first batch: 0, or the step of the loaded state."""
    epoch_began_at: int
    """Number of the last step before the first batch of the present epoch. If `epoch_start_known` is False, the last
    step before the session's first batch."""
    epoch_start_known: bool
    """False until the first epoch ends, if the session resumed a state on another topology: the epoch may have begun
    earlier."""
    warned_ended: set[tuple[int, int]] = field(default_factory=set)
    """Ends of other boxes' epochs of which the user was already warned, as (box, last step of the epoch)."""
    warned_of_abandoned: bool = False
    abandon_due: bool = False
    """True if the loop left the epoch before its end (by `break` or an exception), or the loaded state was saved after
    such an end, so that the next executor will abandon the epoch."""

    @property
    def progress(self) -> bool:
        return self.appliance.settings.progress

    def stats(self) -> StreamStats:
        reader = self.reader
        rows = reader.counts.rows()
        return replace(
            reader.stats,
            steps=reader.position.step - self.began_at,
            copies=reader.copies,
            waited_by_worker=dict(reader.stats.waited_by_worker),
            sources=by_source(rows),
            keys=by_key(rows),
            imbalance=imbalance_of(rows),
        )

    def epoch_ended(self) -> None:
        """Record that the reader has reached the end of an epoch, so that the next epoch begins. Raises EmptyInputError
        if the whole epoch had no batch."""
        step = self.reader.position.step
        if self.epoch_start_known and step == self.epoch_began_at:
            raise self.empty()
        self.epoch_began_at, self.epoch_start_known = step, True

    def abandon_epoch(self) -> None:
        """Abandon the epoch after the last delivered batch. Log once that the next loop begins the next epoch, because
        users of other systems may expect that the next loop continues the abandoned one."""
        if not self.warned_of_abandoned:
            self.warned_of_abandoned = True
            _log.warning(
                "%s: the loop left its epoch at step %d, so the next loop begins the next epoch: the rest of this "
                "epoch is not delivered, and an endless source starts again. To continue with the next batch in each "
                "loop, use DataExecutor(loader, persistent=True), or num_steps=",
                self.name,
                self.reader.position.step,
            )
        self.reader.abandon_epoch()
        self.abandon_due = False
        self.epoch_began_at, self.epoch_start_known = self.reader.position.step, True

    def warn_of_ended(self, step: int) -> None:
        """Warn of each other box whose epoch has ended although this box's epoch continues with `step`, once for each
        end of an epoch. A collective operation of all boxes would wait for such a box forever."""
        for box, last in self.run.ended_boxes.items():
            # If the other box's epoch ended at the step where this box's epoch began, both are between the same two
            # epochs.
            if self.epoch_began_at < last < step and (box, last) not in self.warned_ended:
                self.warned_ended.add((box, last))
                warn_user(
                    f"{self.name}: the epoch of box {box} ended at step {last}, but box {self.run.box} continues with "
                    f"step {step}: a collective operation of both boxes would hang. Give all boxes the same number of "
                    "batches, or pass num_steps",
                )

    def empty(self) -> EmptyInputError:
        """Return the error for an epoch without a batch."""
        position = self.reader.position
        which = "no batch at all" if position.step == 0 else f"no batch in epoch {max(position.epoch - 1, 0)}"
        return EmptyInputError(
            f"{self.name} yielded {which} on any worker of box {self.run.box}: check the data paths and the sharding "
            "in this function, and that its loader returns a new iterator for each epoch"
        )

    def expected_last(self) -> int | None:
        """Return the number of the last step of the present epoch, computed from len() of the workers' loaders; None if
        a loader has no len(), or is not known to have one yet."""
        position, last = self.reader.position, self.reader.position.step
        for slot in position.live:
            length = self.run.views[slot].capabilities.length
            if not self.run.views[slot].HasField("capabilities") or length < 0:
                return None
            last += max(0, length - position.delivered[slot])
        return last
