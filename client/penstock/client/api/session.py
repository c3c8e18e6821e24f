"""Session of an opened loader: its run, the reader of its batches, and what is known of the present epoch."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace

from penstock.client.api.appliance import Appliance
from penstock.client.stream.streams import NO_WORKER, Reader, StreamRun, StreamStats
from penstock.proto.errors import EmptyInputError, PenstockError
from penstock.proto.rpc.wire_errors import detail_of
from penstock.proto.state.counts import by_key, by_source, imbalance_of
from penstock.proto.state.restartable import is_pure
from penstock.proto.tracebacks import warn_user
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

_log = logging.getLogger("penstock.client")

_VOUCH = (
    ". A loader whose next epoch continues where the loop left this one sets exact_states = True, and Penstock then "
    "keeps one object for all epochs"
)


@dataclass
class Session:
    """Session of an opened loader, until the loader is closed or a state is loaded."""

    appliance: Appliance
    run: StreamRun
    reader: Reader
    name: str
    began_at: int
    """Number of the last step before the session's first batch."""
    epoch_began_at: int
    """Number of the last step before the present epoch, or, unless `epoch_start_known`, before the session."""
    epoch_start_known: bool
    """False in the first epoch after a resume on another topology: it may have begun earlier."""
    leave_due: bool = False
    """The loop left its epoch, or the loaded state was saved after such an end: the next loop begins the next epoch."""
    holder: int = 0
    beginning: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held while an iterator takes the stream, which may wait for workers."""

    def capabilities(self) -> list[records_pb2.LoaderCapabilities]:
        """Wait until all workers of this box have made their loaders; return for each slot what its loader can do."""
        run, timeout_s = self.run, self.appliance.settings.timeout_s
        try:
            if not run.wait_for(lambda run: all(map(_known, run.views)), timeout_s):
                late = [view for view in run.views if not _known(view)]  # one without a worker says most
                raise self.reader.late(min(late, key=lambda view: view.phase not in NO_WORKER), timeout_s, "a loader")
            for view in run.views:
                if view.phase == pb.FAILED and not view.HasField("capabilities"):
                    self.reader.raise_failed(view)
        except PenstockError as error:
            self.failed(error)
            raise
        return [view.capabilities for view in run.views]

    def failed(self, error: PenstockError) -> None:
        """Record that the job got an error instead of what it waited for. If it takes no further batch, this is how the
        run ends."""
        progress = self.run.progress
        progress.error, progress.failed_at = detail_of(error), self.reader.position.step

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
        step = self.reader.position.step
        if self.epoch_start_known and step == self.epoch_began_at:
            raise self.empty()
        self.epoch_began_at, self.epoch_start_known = step, True

    def leave_epoch(self, *, ends_epoch: bool) -> None:
        """Go to the next epoch. After the last batch by len(), batches beyond len() are dropped, as torch drops them;
        otherwise the epoch is abandoned. ends_epoch: the loaded state was that of the last batch by len(), which may
        have changed since."""
        step = self.reader.position.step
        if step == self.began_at:  # it is the epoch of the loaded state that is left
            self.capabilities()  # waits until the epoch's length is known
            if ends_epoch and self.expected_last() != step:
                self.leave_due = False
                return
        if self.expected_last() != step:
            self._log_abandoned()
            self.reader.abandon_epoch()
        elif not self.reader.end_epoch():
            self._log_too_short()
        self.leave_due = False
        self.epoch_began_at, self.epoch_start_known = self.reader.position.step, True

    def _log_abandoned(self) -> None:
        # Users of other systems may expect that the next loop continues the abandoned epoch.
        if self.reader.once("abandoned"):
            _log.warning(
                "%s: the loop left its epoch at step %d, so the next loop begins the next epoch: the rest of this "
                "epoch is not delivered, and an endless source starts again. To continue with the next batch in each "
                "loop, use DataExecutor(loader, persistent=True), or num_steps=%s",
                self.name,
                self.reader.position.step,
                _VOUCH if any(view.capabilities.keeps_place for view in self.run.views) else "",
            )

    def check_epoch(self, asked: int | None) -> None:
        position, pure = self.reader.position, self._is_pure
        epoch = position.label if pure else position.epoch
        if asked is not None and asked != epoch and self.reader.once("epoch"):
            _log.warning(
                "%s: set_epoch(%d) has no effect: the loop is in epoch %d, %s",
                *(self.name, asked, epoch),
                "which had been opened before"
                if pure
                else "which is counted from the run's beginning, over restarts too: its loader is kept over epochs",
            )

    @property
    def _is_pure(self) -> bool:
        return all(is_pure(view.capabilities) for view in self.run.views if view.HasField("capabilities"))

    def _log_too_short(self) -> None:
        if self.reader.once("length"):
            _log.warning(
                "%s: the loop left its epoch at step %d, after as many batches as len() says, but the epoch has more: "
                "they are not delivered. Correct the len() of the loader, or iterate it to its end",
                self.name,
                self.reader.position.step,
            )

    def warn_of_ended(self, step: int) -> None:
        """Warn once of each box whose epoch ended before `step`: a collective operation of all boxes would hang."""
        for box, last in self.run.ended_boxes.items():
            # If the other box's epoch ended at the step where this box's epoch began, both are between the same two
            # epochs.
            if self.epoch_began_at < last < step and self.reader.once((box, last)):
                warn_user(
                    f"{self.name}: the epoch of box {box} ended at step {last}, but box {self.run.box} continues with "
                    f"step {step}, where a collective of both would hang: pass num_steps, or give all boxes as many "
                    "batches",
                )

    def tell_apart(self, step: int) -> None:
        other, position = self.run.box_apart, self.reader.position
        if other is None:
            return
        if other.HasField("label"):
            if other.label == position.label or not self._is_pure:  # it is of an earlier epoch, or has no effect
                return
            what = f"box {other.box} is in epoch {other.label} and box {self.run.box} in epoch {position.label}. Call "
            what += "set_epoch() with the same number on all boxes"
        elif self.epoch_began_at < other.step < step:
            what = f"box {other.box} left epoch {position.epoch} after step {other.step}, and box {self.run.box} "
            what += f"continues it with step {step}. End the loops of all boxes after the same step"
        else:
            return
        if self.reader.once("apart"):
            _log.warning("%s: boxes are in different epochs at one step: %s", self.name, what)

    def empty(self) -> EmptyInputError:
        position = self.reader.position
        which = "no batch at all" if position.step == 0 else f"no batch in epoch {max(position.epoch - 1, 0)}"
        return EmptyInputError(
            f"{self.name} yielded {which} on any worker of box {self.run.box}: check its data paths and sharding, and "
            "that its loader returns a new iterator for each epoch"
        )

    def expected_last(self) -> int | None:
        """Return the last step of the present epoch by len() of the workers' loaders; None if unknown."""
        position, last = self.reader.position, self.reader.position.step
        for slot in position.live:
            length = self.run.views[slot].capabilities.length
            if not self.run.views[slot].HasField("capabilities") or length < 0:
                return None
            last += max(0, length - position.delivered[slot])
        return last


def _known(view: pb.SlotView) -> bool:
    return view.phase in (pb.READY, pb.FAILED)
