"""Runner of a loader that is one object over all epochs: a vouched one, restored from any of its states, or one with
four methods, restored at the start of its launch and replayed from there."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from penstock.proto.errors import LaneLostError, ReplayMismatchError, StateMismatchError
from penstock.proto.state.codec import decode_state
from penstock.proto.state.position import EPOCHS_AHEAD
from penstock.worker.loader.restart_plan import Target, first_fit, plan_recovery
from penstock.worker.loader.restart_points import UNFIT, RestartPoint, StreamPosition
from penstock.worker.loader.start import start
from penstock.worker.loader.travel import catch_up, recover, restore
from penstock.worker.processes.control_channel import ControlMessage, DescriptorsClosedError, payload_of
from penstock.worker.runner.slot_stream import SlotStream, StartData, StopError

KEPT_ABANDONED = 64
KEPT_POINTS = 16
"""Newest snapshots kept, to return to where the loop abandons an epoch."""


class KeptRunner:
    def __init__(self, stream: SlotStream) -> None:
        self._stream = stream
        self._abandoned: dict[int, int] = {}
        self._points: deque[tuple[StreamPosition, bytes]] = deque(maxlen=KEPT_POINTS)
        self._epoch_starts: deque[tuple[StreamPosition, bytes]] = deque(maxlen=KEPT_POINTS + EPOCHS_AHEAD)
        stream.on_point = self._keep_own

    def _keep_own(self, position: StreamPosition, data: bytes) -> None:
        (self._points if position.delivered else self._epoch_starts).append((position, data))

    # ---- starting

    def prepare(self, sent: StartData) -> None:
        """Go to the start position. A failure is reported and ends the slot."""
        stream = self._stream
        source, assignment = stream.source, stream.assignment
        source.learn_firsts(sent.firsts)
        points, begins = sent.points, sent.begins or not assignment.recovery
        if source.by_own_methods:  # all slots of the run may have been restarted from another state since
            points = [point for point in points if point.history.launch.step == assignment.start.step]
            begins = begins or not points
        resume = sent.resume
        if resume is None and assignment.resume.blob and source.by_own_methods and begins:
            resume = self._await_resume()
        if begins:
            start(source, resume, self._keep_start, stream.seek)
        stream.channel.send("ready", source.capabilities.SerializeToString())
        if assignment.recovery:
            if assignment.resume.blob and source.by_own_methods and not begins:
                source.learn_resume(self._await_resume())
            made = (*self._epoch_starts, *self._points) if begins else ()
            own_points = [RestartPoint.decode(data) for _, data in made]
            self._recover(own_points + points)

    def _keep_start(self, point: RestartPoint, start: bool) -> None:
        self._stream.keep(point, start, epoch_start=point.is_epoch_start, begins=True)

    def _recover(self, points: list[RestartPoint]) -> None:
        stream = self._stream
        stream.doing("waiting")
        while stream.hello is None:
            stream.serve(None)
        hello, source = stream.hello, stream.source
        self._abandoned = {abandoned_epoch.epoch: abandoned_epoch.total for abandoned_epoch in hello.abandoned}
        target = Target(hello.epoch, hello.next_total - 1, self._abandoned, hello.last_digest)
        plan = plan_recovery(points + stream.points, target)
        if not plan:
            why = f"cannot continue with batch {hello.next_total}, because no earlier state of the loader is kept"
            raise ReplayMismatchError(f"{source.name}: {why}. Start the job again from a saved state")
        point = recover(source, plan, target, stream.seek)
        stream.keep(point, epoch_start=point.rng_before is not None, start=True)
        catch_up(source, hello.epoch)
        if source.is_open:
            source.compare_first()

    def _await_resume(self) -> dict[str, Any]:
        """Request the state to resume from, which a recovering runner gets only on request."""
        stream = self._stream
        stream.channel.send("wants_resume")
        while (message := cast(ControlMessage, stream.channel.receive())).kind != "resume":
            stream.handle(message)
        return cast(dict[str, Any], decode_state(payload_of(message)))

    # ---- streaming

    def run(self) -> None:
        stream = self._stream
        source, producer = stream.source, stream.producer
        try:
            while True:
                if producer.abandoned:
                    self._go_back()
                if not source.is_open:
                    self._await_epoch()
                    stream.open_epoch()
                stream.stream_epoch()
        except (StopError, LaneLostError, DescriptorsClosedError):
            raise
        except Exception as error:
            stream.fail(error)

    def _await_epoch(self) -> None:
        stream = self._stream
        while stream.producer.abandoned:  # epochs that had already ended here
            self._go_back()
        while stream.producer.open_epochs < stream.source.position.epoch:
            stream.doing("waiting")
            stream.serve(None)
            while stream.producer.abandoned:
                self._go_back()

    # ---- abandoned epochs

    def _go_back(self) -> None:
        """Return to the batch after which the loop abandoned an epoch, and close it there: later batches must not
        depend on how far the loader has run ahead by chance."""
        stream = self._stream
        source, producer = stream.source, stream.producer
        epoch, delivered = producer.abandoned.popleft(), producer.delivered
        position = source.position
        if epoch > position.epoch:
            return
        if (position.epoch, position.total) != (epoch, delivered) or source.is_ahead:
            self._return_to(epoch, delivered)
        catch_up(source, epoch)
        if not source.is_open:  # the loop abandoned this epoch before this runner opened it
            stream.open_epoch()
        source.abandon_epoch(delivered)
        self._abandoned[epoch] = delivered
        if len(self._abandoned) > KEPT_ABANDONED:
            del self._abandoned[min(self._abandoned)]
        for points in (self._points, self._epoch_starts):
            while points and points[-1][0].epoch > epoch:
                points.pop()
        stream.left(epoch, delivered, source.position.samples)

    def _return_to(self, epoch: int, total: int) -> None:
        stream = self._stream
        source = stream.source
        delivered = stream.page.entry(total)
        target = Target(epoch, total, self._abandoned, delivered.digest if delivered is not None else 0)
        kept_points = (*self._epoch_starts, *self._points)
        near = [
            (position, data) for position, data in kept_points if position.epoch == epoch and position.total <= total
        ]
        ways = [data for _, data in sorted(near, key=lambda kept: -kept[0].total)]
        if not ways:
            raise StateMismatchError(
                f"{source.name}: no state is kept to return to the `break` of epoch {epoch}. Start from a saved state"
            )

        def try_point(data: bytes) -> None:
            restore(source, RestartPoint.decode(data), target, stream.seek)

        first_fit(ways, try_point, UNFIT, lambda mismatch: None)
