"""DataLoader, which a training script holds, and DataExecutor, the training loop's iterable over it: number of steps,
epochs, checkpoint steps.

Both classes are in one module because each uses the other: iterating a loader iterates an executor of the loader. The
loader's run is in opened_loader.py, its states are in resumable_loader.py.

`iter()` opens the run if it is not open, and raises the errors of the opening, but the iterator takes no part in the
stream before its first `next()`. So an iterator that took no batch blocks no other, and begins no epoch. (tqdm and
other wrappers call iter() more than once.) At its first `next()` an iterator gets the stream, and keeps it until its
loop ends: after the last batch, by `break`, by an exception, because the iterator is dropped, or because an iterator
that was made later takes a batch. In each of these cases the `finally` of the iterator's generator runs.

An epoch that the loop leaves by `break` ends when the next loop takes its first batch, not at the `break`. Until then
the state is that of the last step, in the middle of the epoch. If the loop leaves after the epoch's last batch, the
epoch counts as complete, not as abandoned. (len() of the loaders tells which batch is the last.) An epoch that a
persistent executor leaves does not end: the next executor continues with the next batch.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Generator, Iterator
from threading import get_ident
from typing import Any

from torch.utils.data import DataLoader as TorchLoader

from penstock.client.api.appliance import Appliance
from penstock.client.api.progress_line import ProgressLine
from penstock.client.api.resumable_loader import ResumableLoader
from penstock.client.api.scopes import EnteredScope
from penstock.client.api.session import Session
from penstock.client.states.batch_sizes import batch_size_of
from penstock.client.states.code_reference import forbid_in_runner
from penstock.client.stream.checkpoint_schedule import CheckpointSchedule, CheckpointSteps, checked_int
from penstock.client.stream.stream_interfaces import EPOCH_ENDED, StreamStats
from penstock.proto.errors import EmptyInputError, PenstockError
from penstock.proto.state.position import EPOCHS_AHEAD

__all__ = ["DataExecutor", "DataLoader", "iterating", "wrap"]


class DataLoader(ResumableLoader):
    """Data loader whose batches are made on the workers, by the loader that `input_fn(*args, **kwargs)` returns there.
    A dataset, with the arguments of torch's DataLoader, may be passed instead of input_fn.

    Example::

        def make_loader(path, batch_size):
            return torch.utils.data.DataLoader(MyDataset(path), batch_size=batch_size)

        loader = DataLoader(make_loader, "/data/train", 32)
        for batch in loader:                     # one epoch
            ...
        torch.save(loader.state_dict(), "loader.pt")

        loader = DataLoader(dataset, batch_size=32, shuffle=True)    # with torch's own arguments

    Batches have the structure, shapes and dtypes that input_fn's loader yields: nested dicts, lists, tuples and
    dataclasses of tensors, arrays and plain values.

    Args:
        input_fn: callable that returns a torch DataLoader or an iterable of nested tensors: a function or class at the
            top level of a module that workers can import. In embedded mode, where workers are children of this
            process, any callable works: a function of the main script, a lambda, a partial, a method. Or a dataset:
            see docs/from_torch.md for the arguments of torch that are taken over.
        args, kwargs: arguments of input_fn on every worker: plain values, tensors and arrays; in embedded mode also
            objects that can be pickled, and functions of any kind. The arguments are copied at once.

    Raises:
        TypeError: input_fn is not callable, or does not accept these arguments; or it is a class (or is annotated to
            return a class) that takes `strict` in only one of load_state_dict and deaggregate_state_dict.
        InvalidArgumentError, UnsupportedStateError: input_fn or an argument can be sent to workers neither by an
            importable name nor by value. Code that can be sent only by value is refused when a run is opened on an
            appliance that is not embedded.
    """

    def __iter__(self) -> Iterator[Any]:
        """Iterate one epoch, or the rest of an epoch from which batches were taken before. Equal to
        iter(DataExecutor(self))."""
        return iter(DataExecutor(self))

    # ---- description

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name}, step {self.step}>"

    @property
    def input_fn(self) -> Callable[..., Any]:
        """Function that each worker calls to make its loader."""
        return self._local.input_fn

    @property
    def input_fn_params(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy of (args, kwargs), the arguments of input_fn."""
        return copy.deepcopy(self._local.arguments)

    @property
    def dataloader(self) -> Any:
        """Loader that input_fn returns when this process calls it, as if this process were the only worker. It serves
        to inspect the loader, for example its dataset. A torch DataLoader gets num_workers=0.

        The loader is built at the first access and kept. Its batches are not part of the run's stream. Raises
        InputFnError if input_fn fails in this process, for example because its data are missing.
        """
        return self._local.instance("DataLoader.dataloader")

    @property
    def batch_size(self) -> int | None:
        """Number of rows of the last delivered batch: the first dimension of its tensors. None before the first batch,
        and if the batch has no tensors, or tensors with different numbers of rows."""
        layout = self._session.reader.layout if self._session is not None else None
        return None if layout is None else batch_size_of(*layout)

    def config(self) -> dict[str, Any]:
        """Return the settings that decide the samples and their order: a dict with `input_fn` (name) and `loader`
        (result of the loader's own config()). Loaders of penstock.data with equal configs accept each other's states.
        `loader` is None for a loader without config(); the dict then says nothing of the arguments of input_fn."""
        return self._local.config(self._seed_of_keys)

    def can_restore_sample(self) -> bool:
        """Return True if restore_sample() works: input_fn's loader has a method restore_sample, and its method
        can_restore_sample(), if it has one, does not return False."""
        return self._local.can_restore_sample(self._seed_of_keys)

    def restore_sample(self, key: Any) -> Any:
        """Read a sample again, in this process, and return it. `key`: the sample's restore key, a text that the loader
        adds to each batch if it has keys=. The stream's position does not change.

        The sample is made with the seed of the run, of the loaded state, or of Appliance(seed=). A key from a run with
        another seed is refused.

        Raises NotRestartableError for a loader without restore_sample, InputFnError if input_fn fails in this process,
        and any error of the loader's own method.
        """
        return self._local.restore_sample(self._seed_of_keys, key)

    @property
    def _seed_of_keys(self) -> int:
        loaded = self._loaded.seed if self._loaded is not None else None
        given = [
            self._session.run.seed if self._session is not None else None,
            loaded,
            self._settings.seed,
            self._drawn,
        ]
        return next((seed for seed in given if seed is not None), 0)


def wrap(loader: TorchLoader[Any]) -> DataLoader:
    """Return a loader that makes the batches of a torch DataLoader on the workers, with an exact position.

    Example::

        for batch in wrap(torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)):
            ...

    A map-style dataset is read by a penstock.data.MapLoader: without shuffle the batches are those of torch. With
    shuffle their order follows from the run's seed, or from the seed of the DataLoader's `generator`. The state resumes
    on any number of workers and boxes. An IterableDataset must shard itself by torch's get_worker_info(); its state is
    restored by replay from the start of the epoch, on the same number of workers. The dataset is pickled for the
    workers, so the appliance must be embedded; for workers on other machines write an input_fn.

    Raises:
        InvalidArgumentError: Penstock cannot reproduce the order of the loader's sampler or batch_sampler.
        TypeError: `loader` is not a torch DataLoader.
    """
    if not isinstance(loader, TorchLoader):
        raise TypeError(
            f"the argument of wrap() must be a torch DataLoader, got a {type(loader).__qualname__}: pass an input_fn "
            "or a dataset to penstock.client.DataLoader instead"
        )
    return DataLoader(loader)


def iterating() -> DataExecutor | None:
    """Return the executor whose loop is running in this thread, the innermost if loops are nested. In a thread without
    a loop, return the only executor that is iterated in other threads. Return None if no loop is running in this
    process.

    Raises AmbiguousContextError in a thread without a loop, if loops over several executors run in other threads.
    """
    return _iterating.innermost()


class DataExecutor:
    """Iterable over the batches of a loader, one for each training step.

    Example::

        for batch in DataExecutor(loader, num_steps=1000, checkpoint_steps=100):
            train(batch)
            save()                                 # a checkpoint_closure

    Args:
        loader: penstock DataLoader.
        num_steps: number of batches to take, over all epochs that this requires. 0: no batch, and no run is opened, so
            that a finished job that is started again ends quietly. None: one epoch, or the rest of a begun epoch. After
            a `break`, the next executor continues with the next batch if num_steps was given, and begins the next epoch
            if it was not (see `persistent`).
        checkpoint_steps: steps at which the job saves. None or 0: none. N: each step that N divides, and the last step
            of this executor. Or absolute steps: an iterable of ints and ranges, or a callable from a step to a bool.
            Workers prepare states for steps that are known ahead; a state is available at any other step too.
        appliance: Appliance to run on. None: the appliance that the loader runs on already, else the innermost that is
            open in a `with`, else a default one.
        persistent: continue the epoch after a `break` (False): the next executor takes the next batch, as an executor
            with num_steps always does. For code in which each loop over a loader continues the stream, as with Megatron
            Energon.
        rest_only: with num_steps=None, take no batch if the loaded state was saved after the last batch of an epoch
            (False: take the next epoch). For code that reads one epoch in all, after any number of restarts. After a
            change of the number of boxes or workers, the loaders of penstock.data cannot distinguish an epoch's end
            from the next epoch's beginning, so the next epoch is taken.

    Raises:
        TypeError: the loader is not a penstock.client.DataLoader, or a number of steps is not an int.
        InvalidArgumentError: num_steps or checkpoint_steps is below 0, or a step in checkpoint_steps is below 1.

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
        rest_only: bool = False,
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"the loader of a DataExecutor must be a penstock.client.DataLoader, got a {type(loader).__module__}."
                f"{type(loader).__qualname__}: pass the function that makes this loader to DataLoader(input_fn)"
            )
        self._loader = loader
        self._num_steps = None if num_steps is None else checked_int("num_steps", num_steps, least=0)
        self._schedule = CheckpointSchedule.of(checkpoint_steps)
        self._appliance, self._persistent, self._rest_only = appliance, persistent, rest_only
        if appliance is not None:
            loader.expect(appliance)
        self._session: Session | None = None
        self._first = 0
        """Number of the last step before the first step of this executor's present or last loop."""
        self._last: int | None = None

    def __repr__(self) -> str:
        steps = "one epoch" if self._num_steps is None else f"{self._num_steps} steps"
        return f"<{type(self).__name__} of {self._loader!r}: {steps}, {self.user_iteration} done>"

    # ---- position and figures, for the loop

    @property
    def step(self) -> int:
        """Number of the last step, counted over the whole life of the run: the batches delivered to this box. 0 before
        the first batch."""
        return self._loader.step

    @property
    def dataloader(self) -> DataLoader:
        """Loader whose batches this executor yields."""
        return self._loader

    def __len__(self) -> int:
        """Return the number of steps of this executor: num_steps if it was given, else the number of batches in an
        epoch. Raises TypeError if num_steps was not given and the workers' loaders have no len()."""
        return len(self._loader) if self._num_steps is None else self._num_steps

    def __bool__(self) -> bool:
        return True  # without this method bool() would call len(), which may wait for workers

    @property
    def user_iteration(self) -> int:
        """Number of batches that this executor has delivered in its present or last loop, including the current one; 0
        before the first."""
        return self.step - self._first if self._session is not None else 0

    @property
    def iteration(self) -> int:
        """Number of the current batch in the executor's present or last loop, from 0; -1 before the first."""
        return self.user_iteration - 1

    @property
    def is_initial_step(self) -> bool:
        """True while the loop has its first batch. Each loop over the executor has a first batch."""
        return self.iteration == 0

    @property
    def on_final_iteration(self) -> bool:
        """True from the last batch of the executor's loop on. If the executor takes one epoch, its last batch is known
        from len() of the workers' loaders. Without len() the value becomes True only when the loop has ended."""
        if self._session is None:
            return False
        last = self._last if self._num_steps is not None or self._last is not None else self._session.expected_last()
        return last is not None and self.step >= last

    @property
    def on_checkpoint_step(self) -> bool:
        """True if the current step (after the loop, the last one) is a checkpoint step."""
        step = self.step
        if step < 1 or self._session is None:
            return False
        return step in self._schedule or (self._schedule.and_last and step == self._last)

    @property
    def last_wait_seconds(self) -> float:
        """Seconds for which the loop waited for the batch of the current step. `stats.waited_s` is the sum over all
        steps."""
        return self._session.reader.wait_s if self._session is not None else 0.0

    @property
    def stats(self) -> StreamStats:
        """Waiting times and counts of the stream, since its first loop began or since a state was loaded."""
        if self._session is None:
            return StreamStats()
        return self._session.stats()

    @property
    def digest(self) -> int | None:
        """Stream digest: a fingerprint of all batches of this box in order, over the whole life of the run.

        Equal streams have equal digests. A loaded state continues its digest, on any number of workers. chain(0) = 0,
        chain(n) = xxh3_64(little-endian u64 chain(n - 1), u64 digest of batch n). None if unknown: before the loop
        begins, after a state was loaded onto another number of boxes (unless digest="rows"), and after a state without
        a digest was loaded.

        With Appliance(digest="rows") the value is this box's part of a digest of all boxes. Add the parts of all boxes
        modulo 2^64: the sum is equal for two streams whose steps deliver the same rows, also if the number of boxes
        differs or changed at a resume. The loaders of penstock.data deliver the same rows on any number of boxes if the
        global batch size is the same. The order of rows within a step is not covered, nor are values outside rows: see
        penstock.proto.batch.digest.
        """
        return self._session.reader.position.chain if self._session is not None else None

    # ---- iterating

    def __iter__(self) -> Iterator[Any]:
        forbid_in_runner("iterating a DataExecutor")
        if self._num_steps == 0:
            return iter(())
        try:
            self._loader.open(self._appliance)
        except PenstockError as error:
            raise error.with_traceback(None) from error.__cause__  # the frames of the opening do not help the user
        return _Steps(self)

    def _steps(self, session: Session, first: int) -> Generator[Any, None, None]:
        """Yield the batches of the loop whose first step is `first + 1`, from the next one on."""
        loader, schedule = self._loader, self._schedule
        reader, position = session.reader, session.reader.position
        self._session, self._first, first_epoch = session, first, position.epoch
        self._last = stop = None if self._num_steps is None else first + self._num_steps
        line: ProgressLine | None = None
        left_early = False
        _iterating.enter(self)
        try:
            if session.progress:
                line = ProgressLine(loader.name, reader.stats, position.step)
            ahead = 0 if stop is None else EPOCHS_AHEAD
            reader.open_epochs(position.epoch + ahead, loader.asked_epoch)
            announced = reader.announce(schedule, stop)
            while stop is None or position.step < stop:
                try:
                    batch = reader.next()
                except EmptyInputError:
                    raise session.empty() from None
                except PenstockError as error:
                    raise error.with_traceback(None) from error.__cause__  # nor does that of the reader
                if batch is EPOCH_ENDED:
                    session.epoch_ended()
                    if stop is None and (position.step > first or self._rest_only):
                        break
                    # One epoch was requested, but the position is the very end of an epoch: take the next epoch.
                    reader.open_epochs(position.epoch + ahead, loader.asked_epoch)
                    announced = reader.announce(schedule, self._last)
                    continue
                step = position.step
                if step == first + 1:
                    session.check_epoch(loader.asked_epoch)
                    loader.asked_epoch = None
                if stop is None and schedule.and_last and step == first + 1:
                    self._last = session.expected_last()
                    announced = step
                if announced is not None and step >= announced:
                    announced = reader.announce(schedule, self._last)
                if line is not None:
                    line.update(step)
                if session.run.ended_boxes:
                    session.warn_of_ended(step)
                if session.run.box_apart is not None:
                    session.tell_apart(step)
                left_early = stop is None and not self._persistent
                yield batch
                left_early = False
                del batch  # do not keep it alive while the loop waits for the next one
                reader.thread = get_ident()  # a prefetching thread may go on with what another one began
            self._last = position.step
        finally:
            _iterating.leave(self)
            if line is not None:
                line.finish()
            loader.finish(left_early=left_early, epoch_ended=stop is None and position.epoch > first_epoch)


class _Steps(Iterator[Any]):
    """Iterator that a loop over a DataExecutor holds. See the module's docstring.

    After an error of `next`, such as a DeadlineError or Ctrl-C, no batch is lost, and the loader is free for other
    loops. If there was none, `next` may be called again, and tries again to get the same batch.
    """

    def __init__(self, executor: DataExecutor) -> None:
        self.number = next(_numbers)
        self._executor = executor
        self._batches: Generator[Any, None, None] | None = None
        self._session: Session | None = None
        """Session in which the iterator took the stream; None before its first `next`."""
        self._first = 0
        """Number of the last step before the loop's first one."""

    def __next__(self) -> Any:
        batches = self._batches
        if batches is None:
            batches = self._batches = self._begin()
        try:
            return next(batches)
        except StopIteration:
            raise
        except PenstockError as error:
            self._batches = None  # finished by the error
            raise error.with_traceback(None) from error.__cause__  # the generator's frame says nothing to users
        except BaseException as error:
            if _runs(batches):
                raise RuntimeError(
                    f"{self._executor.dataloader.name}: next() of an iterator was called while another thread was in "
                    "its next(): let one thread iterate, or guard next() by a lock"
                ) from error
            self._batches = None  # finished by the error
            raise

    def _begin(self) -> Generator[Any, None, None]:
        executor, loader = self._executor, self._executor.dataloader
        if self._session is not None:
            loader.check_continues(self.number, self._session)
        try:
            session = loader.begin(self, executor._appliance)
        except PenstockError as error:
            raise error.with_traceback(None) from error.__cause__
        if self._session is None:
            self._session, self._first = session, session.reader.position.step
        return executor._steps(session, self._first)

    def give_up(self) -> bool:
        batches = self._batches
        if batches is not None:
            if _runs(batches):
                return False
            batches.close()
            self._batches = None
        return True

    def close(self) -> None:
        """End the loop, as `break` does."""
        if self._batches is None:
            self._batches = (batch for batch in list[Any]())
        self._batches.close()


def _runs(generator: Generator[Any, None, None]) -> bool:
    return inspect.getgeneratorstate(generator) == inspect.GEN_RUNNING


_numbers = itertools.count(1)
_iterating: EnteredScope[DataExecutor] = EnteredScope(
    "penstock-loops",
    "one DataExecutor must be iterating for this thread, got {count} in other threads: call a checkpoint_closure in "
    "the thread of its loop",
    # A reference cycle may keep an abandoned loop alive, which then never reaches its end.
    lambda executor: executor._session is not None and not executor._session.run.closed,
)
