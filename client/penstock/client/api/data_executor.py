"""The training loop's iterator: the number of steps, their epochs, and which of them are checkpoints.

The iterator is a generator that has already run up to its first `yield` when the loop gets it: the run opens in
`iter()`, where its errors belong, and from then on ending the loop in any way (at the end, by `break`, by an exception,
or by dropping the iterator) runs its `finally`.

An epoch that the loop leaves by `break` is abandoned when the next executor starts, not at the `break`: until then the
state is that of the last step, in the middle of the epoch. An epoch left at its last batch, by its length, is over and
not abandoned. The same holds for one that a persistent executor left: the next executor continues it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from penstock.client.api.appliance import Appliance
from penstock.client.api.data_loader import DataLoader
from penstock.client.api.progress_line import ProgressLine
from penstock.client.api.scopes import ApplianceScope
from penstock.client.api.session import Session
from penstock.client.states.code_reference import forbid_in_runner
from penstock.client.stream.checkpoint_schedule import CheckpointSchedule, CheckpointSteps, positive
from penstock.client.stream.ordered_reader import EPOCH_ENDED, StreamStats
from penstock.proto.errors import EmptyInputError
from penstock.proto.state.position import EPOCHS_AHEAD

__all__ = ["DataExecutor", "iterating"]


def iterating() -> DataExecutor | None:
    """Return the executor whose loop is running here; of nested loops, the innermost.

    Raises AmbiguousContextError in a thread without a loop, if several run in other threads.
    """
    return _iterating.innermost()


class DataExecutor:
    """A sequence of training steps: iterate it to get one batch for each.

    Example::

        for batch in DataExecutor(loader, num_steps=1000, checkpoint_steps=100):
            train(batch)
            save()                                 # a checkpoint_closure

    Args:
        loader: a penstock DataLoader.
        num_steps: number of batches to take, over as many epochs as needed. 0: none, and no run is opened, so that a
            finished job that is started again ends quietly. None: one epoch, or the rest of it. The next executor
            continues with the next batch; after an epoch left by `break`, with the next epoch.
        checkpoint_steps: None or 0: none. N: each step that N divides, and the last of this executor. Or absolute
            steps: an iterable of ints and ranges, or a callable from a step to a bool. Workers prepare states for
            steps that are known ahead; a state is available at any other step too.
        appliance: the Appliance to run on. None: the one that the loader runs on already, else the innermost that is
            open in a `with`, else a default one.
        persistent: continue the epoch after a `break`: the next executor takes the next batch, as one with num_steps
            always does. For code in which each loop over a loader continues the stream, as with Megatron Energon.

    Raises:
        TypeError: the loader is not a penstock.client.DataLoader.
        InvalidArgumentError: num_steps is below 0, or checkpoint_steps below 1.

    Iterating raises the stream's errors: DeadlineError, InputFnError, EmptyInputError, WorkerLostError and others of
    docs/errors.md.
    """

    def __init__(
        self,
        loader: DataLoader,
        num_steps: int | None = None,
        checkpoint_steps: CheckpointSteps = None,
        *,
        appliance: Appliance | None = None,
        persistent: bool = False,
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"DataExecutor takes a penstock.client.DataLoader, not a {type(loader).__module__}."
                f"{type(loader).__qualname__}: wrap the function that makes it, DataLoader(input_fn)"
            )
        self._loader = loader
        self._num_steps = None if num_steps is None else positive("num_steps", num_steps, least=0)
        self._schedule = CheckpointSchedule.of(checkpoint_steps)
        self._appliance, self._persistent = appliance, persistent
        if appliance is not None:
            loader.expect(appliance)
        self._session: Session | None = None
        self._first = 0
        """Step before this executor's first."""
        self._last: int | None = None

    # ---- position and figures, for the loop

    @property
    def step(self) -> int:
        """Last step: batches delivered to this box over the whole life of the run; 0 before the first."""
        return self._loader.step

    @property
    def dataloader(self) -> DataLoader:
        """Loader of this executor."""
        return self._loader

    def __len__(self) -> int:
        """Return the steps of this executor: num_steps, or the batches of an epoch. TypeError if that is unknown."""
        return len(self._loader) if self._num_steps is None else self._num_steps

    def __bool__(self) -> bool:
        return True  # otherwise bool() would call len(), which may wait for workers

    @property
    def user_iteration(self) -> int:
        """Batches that this executor has delivered, the current one included; 0 before the first."""
        return self.step - self._first if self._session is not None else 0

    @property
    def iteration(self) -> int:
        """Number of the current batch, from 0; -1 before the first."""
        return self.user_iteration - 1

    @property
    def is_initial_step(self) -> bool:
        """True at this executor's first batch."""
        return self.iteration == 0

    @property
    def on_final_iteration(self) -> bool:
        """True at this executor's last batch, and after it. For an epoch that depends on the loaders' len(); without
        it, True only after the last batch."""
        if self._session is None:
            return False
        last = self._last if self._num_steps is not None or self._last is not None else self._session.expected_last()
        return last is not None and self.step >= last

    @property
    def on_checkpoint_step(self) -> bool:
        """True if the current or last step is a checkpoint step."""
        step = self.step
        if step < 1 or self._session is None:
            return False
        return step in self._schedule or (self._schedule.and_last and step == self._last)

    @property
    def wait_seconds(self) -> float:
        """Seconds that the loop waited for the batch of this step."""
        return self._session.reader.wait_s if self._session is not None else 0.0

    @property
    def stats(self) -> StreamStats:
        """Waiting and other figures since the loader was opened or loaded."""
        if self._session is None:
            return StreamStats()
        return self._session.stats()

    @property
    def digest(self) -> int | None:
        """Stream digest: a fingerprint of all batches of this box in order, over the whole life of the run.

        Equal streams have equal digests. A loaded state continues its digest, on any number of workers. chain(0) = 0,
        chain(n) = xxh3_64(little-endian u64 chain(n - 1), u64 digest of batch n). It is None if unknown: before the
        loop begins, after a state was loaded onto another number of boxes, or after a state without a digest.

        With Appliance(digest="rows") it is this box's part of the stream digest: the sum of all boxes' parts modulo
        2^64 is equal for streams whose steps deliver equal rows, however many boxes share them and wherever a state was
        resumed on other boxes. A built-in loader delivers equal rows for one global batch size. The order of rows
        within a step is not covered, nor are values outside rows: see penstock.proto.batch.digest.
        """
        return self._session.reader.position.chain if self._session is not None else None

    # ---- iterating

    def __iter__(self) -> Iterator[Any]:
        forbid_in_runner("iterating a DataExecutor")
        if self._num_steps == 0:
            return iter(())
        steps = self._steps()
        next(steps)
        return steps

    def _steps(self) -> Generator[Any, None, None]:
        loader, schedule = self._loader, self._schedule
        self._session = session = loader.begin(self, self._appliance)
        reader, position = session.reader, session.reader.position
        first, first_epoch = self._first, _ = position.step, position.epoch
        self._last = stop = None if self._num_steps is None else first + self._num_steps
        line: ProgressLine | None = None
        left_early = False
        _iterating.enter(self)
        try:
            if session.progress:
                line = ProgressLine(loader.name, reader.stats, first)
            ahead = 0 if stop is None else EPOCHS_AHEAD
            reader.open_epochs(position.epoch + ahead)
            announced = reader.announce(schedule, stop)
            yield None
            while stop is None or position.step < stop:
                try:
                    batch = reader.next()
                except EmptyInputError:
                    raise session.empty() from None
                if batch is EPOCH_ENDED:
                    session.epoch_ended()
                    if stop is None and position.step > first:
                        break
                    # One epoch was requested, and the stream stood at the very end of this one: take the next.
                    reader.open_epochs(position.epoch + ahead)
                    announced = reader.announce(schedule, self._last)
                    continue
                step = position.step
                if stop is None and schedule.and_last and step == first + 1:
                    self._last = session.expected_last()
                    announced = step
                if announced is not None and step >= announced:
                    announced = reader.announce(schedule, self._last)
                if line is not None:
                    line.update(step)
                if session.run.ended_boxes:
                    session.warn_of_ended(step)
                left_early = stop is None and not self._persistent
                yield batch
                left_early = False
                del batch  # otherwise it would stay alive while the loop waits for the next one
            self._last = position.step
        finally:
            _iterating.leave(self)
            if line is not None:
                line.finish()
            if left_early and session.expected_last() == position.step:
                left_early = False  # the loop counts batches: all are taken, and the end is read next
            loader.finish(self, left_early=left_early, epoch_ended=stop is None and position.epoch > first_epoch)


_iterating: ApplianceScope[DataExecutor] = ApplianceScope(
    "penstock-loops",
    "{count} executors are being iterated in other threads, and none in this one: call a checkpoint_closure in the "
    "thread whose loop it belongs to",
)
