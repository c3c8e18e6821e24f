"""Loop over the stream of a loader: number of steps, epochs, checkpoint steps.

An epoch that the loop leaves by `break` ends when the next loop takes its first batch; until then the state is that of
the last step. If the loop leaves after the epoch's last batch by len(), the epoch counts as complete, not as abandoned.
An epoch that a persistent loop leaves does not end."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from threading import get_ident
from typing import Any

from penstock.client.api.appliance import Appliance
from penstock.client.api.loader_stream import LoaderStream, Steps
from penstock.client.api.scopes import EnteredScope
from penstock.client.api.session import Session
from penstock.client.states.code_reference import forbid_in_runner
from penstock.client.stream.checkpoint_schedule import CheckpointSchedule
from penstock.client.stream.streams import EPOCH_ENDED
from penstock.proto.errors import EmptyInputError, PenstockError
from penstock.proto.state.position import EPOCHS_AHEAD


class Loop:
    def __init__(
        self,
        stream: LoaderStream,
        num_steps: int | None = None,
        schedule: CheckpointSchedule | None = None,
        appliance: Appliance | None = None,
        *,
        persistent: bool = False,
        rest_only: bool = False,
    ) -> None:
        self._stream, self._num_steps, self._appliance = stream, num_steps, appliance
        self._schedule = schedule or CheckpointSchedule()
        self._persistent, self._rest_only = persistent, rest_only
        self.session: Session | None = None
        self.first = 0
        self._last: int | None = None

    @property
    def on_final_iteration(self) -> bool:
        if self.session is None:
            return False
        last = self._last if self._num_steps is not None or self._last is not None else self.session.expected_last()
        return last is not None and self._stream.step >= last

    @property
    def on_checkpoint_step(self) -> bool:
        step = self._stream.step
        if step < 1 or self.session is None:
            return False
        return step in self._schedule or (self._schedule.and_last and step == self._last)

    def __iter__(self) -> Iterator[Any]:
        forbid_in_runner("iterating a DataExecutor")
        if self._num_steps == 0:
            return iter(())
        try:
            self._stream.open(self._appliance)
        except PenstockError as error:
            raise error.with_traceback(None) from error.__cause__  # the frames of the opening do not help the user
        return Steps(self._stream, self._appliance, self._batches)

    def _batches(self, session: Session, first: int) -> Generator[Any, None, None]:
        stream, schedule = self._stream, self._schedule
        reader, position = session.reader, session.reader.position
        self.session, self.first, first_epoch = session, first, position.epoch
        self._last = stop = None if self._num_steps is None else first + self._num_steps
        left_early = finished = False
        _iterating.enter(self)
        try:
            ahead = 0 if stop is None else EPOCHS_AHEAD
            reader.open_epochs(position.epoch + ahead, stream.asked_epoch)
            announced = reader.announce(schedule, stop)
            while stop is None or position.step < stop:
                try:
                    batch = reader.next()
                except EmptyInputError:
                    raise session.empty() from None
                if batch is EPOCH_ENDED:
                    session.epoch_ended()
                    if stop is None and (position.step > first or self._rest_only):
                        break
                    # One epoch was requested, but the position is the very end of an epoch: take the next epoch.
                    reader.open_epochs(position.epoch + ahead, stream.asked_epoch)
                    announced = reader.announce(schedule, self._last)
                    continue
                step = position.step
                if step == first + 1:
                    session.check_epoch(stream.asked_epoch)
                    stream.asked_epoch = None
                    if stop is None and schedule.and_last:
                        self._last = session.expected_last()
                        announced = step
                if announced is not None and step >= announced:
                    announced = reader.announce(schedule, self._last)
                if session.run.ended_boxes:
                    session.warn_of_ended(step)
                if session.run.box_apart is not None:
                    session.tell_apart(step)
                left_early = stop is None and not self._persistent
                yield batch
                left_early = False
                del batch  # do not keep it alive while the loop waits for the next one
                reader.thread = get_ident()  # a prefetching thread may go on with what another one began
            self._last, finished = position.step, True
        finally:
            _iterating.leave(self)
            epoch_ended = stop is None and position.epoch > first_epoch
            stream.finish(left_early=left_early, epoch_ended=epoch_ended, finished=finished)


_iterating: EnteredScope[Loop] = EnteredScope(
    "penstock-loops",
    "one DataExecutor must be iterating for this thread, got {count} in other threads: call a checkpoint_closure in "
    "the thread of its loop",
    # A reference cycle may keep an abandoned loop alive, which then never reaches its end.
    lambda loop: loop.session is not None and not loop.session.run.closed,
)


def iterating() -> Loop | None:
    """Return the innermost loop of this thread, else the only one of other threads. Raises AmbiguousContextError."""
    return _iterating.innermost()
