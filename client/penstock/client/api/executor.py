"""DataExecutor, the training loop's iterable over a DataLoader: number of steps, epochs, checkpoint steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from penstock.client.api.appliance import Appliance
from penstock.client.api.data_loader import DataLoader
from penstock.client.api.loop import Loop, iterating
from penstock.client.api.session import Session
from penstock.client.stream.checkpoint_schedule import CheckpointSchedule, CheckpointSteps, checked_int
from penstock.client.stream.streams import StreamStats
from penstock.proto.errors import InvalidArgumentError
from penstock.runtime.moved_names import says_where

P = ParamSpec("P")
R = TypeVar("R")


@says_where
class DataExecutor:
    """Iterable over the batches of a loader, one for each training step.

    Example::

        for batch in DataExecutor(loader, num_steps=1000, checkpoint_steps=100):
            train(batch)
            save()                                 # a checkpoint_closure

    Args:
        loader: loader whose batches the executor yields.
        num_steps: number of batches to take, over all epochs that this requires. 0: none, and no run is opened, so that
            a finished job that is started again ends quietly. None: one epoch, or the rest of a begun epoch. After a
            `break`, the next executor takes the next batch if num_steps was given, and else begins the next epoch.
        checkpoint_steps: steps at which the job saves. None or 0: none. N: each step that N divides, and the last step
            of this executor. Or absolute steps: an iterable of ints and ranges, or a callable from a step to a bool.
            Workers prepare states for these; a state is available at any other step too.
        appliance: Appliance to run on. None: the one that the loader runs on already, else the innermost that is open
            in a `with`, else a default one.
        persistent: continue the epoch after a `break` even without num_steps (False), as with Megatron Energon.
        rest_only: with num_steps=None, take no batch if the loaded state was saved after the last batch of an epoch
            (False: take the next epoch). For code that reads one epoch in all, after any number of restarts. After a
            change of the number of boxes or workers, the loaders of penstock.data cannot distinguish an epoch's end
            from the next epoch's beginning, so the next epoch is taken.

    Raises TypeError, InvalidArgumentError. Iterating raises the stream's errors: DeadlineError, InputFnError,
    EmptyInputError, WorkerLostError and others of
    docs/errors.md."""

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
                f"{type(loader).__qualname__}: pass the function that makes it to DataLoader"
            )
        self._loader = loader
        self._num_steps = None if num_steps is None else checked_int("num_steps", num_steps, least=0)
        schedule = CheckpointSchedule.of(checkpoint_steps)
        if appliance is not None:
            loader.expect(appliance)
        self._loop = Loop(
            loader.stream, self._num_steps, schedule, appliance, persistent=persistent, rest_only=rest_only
        )

    def __repr__(self) -> str:
        steps = "one epoch" if self._num_steps is None else f"{self._num_steps} steps"
        return f"<{type(self).__name__} of {self._loader!r}: {steps}, {self.user_iteration} done>"

    @property
    def _session(self) -> Session | None:
        return self._loop.session

    # ---- position and figures, for the loop

    @property
    def step(self) -> int:
        """Number of the last step, counted over the whole life of the run; 0 before the first batch."""
        return self._loader.step

    @property
    def dataloader(self) -> DataLoader:
        """Loader whose batches this executor yields."""
        return self._loader

    def __len__(self) -> int:
        """Return num_steps, else the number of batches in an epoch. Raises TypeError if a loader has no len()."""
        return len(self._loader) if self._num_steps is None else self._num_steps

    def __bool__(self) -> bool:
        return True  # without this method bool() would call len(), which may wait for workers

    @property
    def user_iteration(self) -> int:
        """Number of batches that this executor has delivered in its present or last loop; 0 before the first."""
        return self.step - self._loop.first if self._session is not None else 0

    @property
    def iteration(self) -> int:
        """Number of the current batch in the executor's present or last loop, from 0; -1 before the first."""
        return self.user_iteration - 1

    @property
    def is_initial_step(self) -> bool:
        """True while the loop has its first batch."""
        return self.iteration == 0

    @property
    def on_final_iteration(self) -> bool:
        """True from the last batch of the loop on. With one epoch, the last batch is known from len() of the workers'
        loaders; without one the value becomes True when the loop has ended."""
        return self._loop.on_final_iteration

    @property
    def on_checkpoint_step(self) -> bool:
        """True if the current step (after the loop, the last one) is a checkpoint step."""
        return self._loop.on_checkpoint_step

    @property
    def last_wait_seconds(self) -> float:
        """Seconds for which the loop waited for the current batch; `stats.waited_s` is the sum."""
        return self._session.reader.wait_s if self._session is not None else 0.0

    @property
    def stats(self) -> StreamStats:
        """Waiting times and counts of the stream since its first loop began or a state was loaded."""
        return StreamStats() if self._session is None else self._session.stats()

    @property
    def digest(self) -> int | None:
        """Stream digest: a fingerprint of all batches of this box in order, over the whole life of the run.

        chain(0) = 0, chain(n) = xxh3_64(little-endian u64 chain(n - 1), u64 digest of batch n). A loaded state
        continues it, on any number of workers. None if unknown: before the loop begins, after a state was loaded onto
        another number of boxes (unless digest="rows"), and after a state without a digest.

        With Appliance(digest="rows") the parts of all boxes, summed modulo 2^64, are equal for two streams whose steps
        deliver the same rows, also if the number of boxes differs or changed at a resume. The loaders of penstock.data
        deliver the same rows on any number of boxes if the global batch size is the same. Neither the order of rows
        within a step nor values outside rows are covered: see penstock.proto.batch.digest."""
        return self._session.reader.position.chain if self._session is not None else None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loop)


def checkpoint_closure(function: Callable[P, R]) -> Callable[P, R | None]:
    """Return a function that calls `function` if the loop around the call is at a checkpoint step, and otherwise
    returns None.

    Example::

        @checkpoint_closure
        def save() -> None:
            torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, path)

        for batch in DataExecutor(loader, num_steps=1000, checkpoint_steps=100):
            ...
            save()

    Raises:
        RuntimeError: the function is called while no DataExecutor is iterating.
        AmbiguousContextError: it is called in a thread without a loop, while loops run in several other threads.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        loop = iterating()
        if loop is None:
            name = getattr(function, "__qualname__", function)
            raise RuntimeError(f"{name} is a checkpoint_closure: call it inside the loop over a DataExecutor")
        return function(*args, **kwargs) if loop.on_checkpoint_step else None

    return run


def compute_num_steps(
    dataloader: Any,
    initial_step: int = 0,
    num_steps: int | None = None,
    max_steps: int | None = None,
    num_epochs: int | None = None,
    steps_per_epoch: int | None = None,
    grad_accum_steps: int = 1,
) -> int:
    """Return the number of steps that training still has to take: the smallest number that num_steps, max_steps and
    num_epochs allow.

    Args:
        dataloader: loader; its len(), if it has one, is the number of batches of an epoch.
        initial_step: number of steps already taken, from which training resumes.
        num_steps: number of steps to take after initial_step; None: no limit. Not allowed together with num_epochs.
        max_steps: total number of steps, including those before initial_step; None: no limit.
        num_epochs: number of epochs to take after initial_step; None: no limit. Needs the dataloader's len().
        steps_per_epoch: number of batches (not steps) to use of an epoch, at most len(); None: len(). Ignored if the
            dataloader has no len().
        grad_accum_steps: number of batches in one step, whose gradients are accumulated. An epoch has
            steps_per_epoch // grad_accum_steps steps. num_steps and max_steps count steps, not batches.

    Raises:
        InvalidArgumentError: num_steps, max_steps and num_epochs are all None; a value is too small; max_steps are
            taken already; or values contradict each other or the dataloader's len().
        TypeError: a value is not an int.
    """
    if num_epochs is not None and num_steps is not None:
        raise InvalidArgumentError(f"pass num_steps or num_epochs, not both, got {num_steps} and {num_epochs}")
    if num_steps is None and num_epochs is None and max_steps is None:
        raise InvalidArgumentError("num_steps, max_steps or num_epochs must be given, got none: pass one of them")
    start = checked_int("initial_step", initial_step, least=0)
    accumulated = checked_int("grad_accum_steps", grad_accum_steps)
    bounds = [] if num_steps is None else [checked_int("num_steps", num_steps)]
    if max_steps is not None:
        bounds.append(checked_int("max_steps", max_steps) - start)
        if bounds[-1] < 1:
            raise InvalidArgumentError(
                f"initial_step must be below max_steps={max_steps}, got {start}: the training is complete"
            )
    epochs = None if num_epochs is None else checked_int("num_epochs", num_epochs)
    wanted = None if steps_per_epoch is None else checked_int("steps_per_epoch", steps_per_epoch)
    length = _length(dataloader)
    if length is None and epochs is not None:
        raise InvalidArgumentError(
            f"num_epochs needs a dataloader with a len(), got a {type(dataloader).__qualname__} without: pass num_steps"
        )
    if length is not None:
        per_epoch = _per_epoch(length, wanted, accumulated)
        if epochs is not None:
            bounds.append(epochs * per_epoch)
    return min(bounds)


def _per_epoch(length: int, wanted: int | None, accumulated: int) -> int:
    if length < 1:
        raise InvalidArgumentError(f"len() of the dataloader must be >= 1, got {length}: check the dataset's path")
    if wanted is not None and wanted > length:
        raise InvalidArgumentError(f"steps_per_epoch must be at most the {length} batches of an epoch, got {wanted}")
    batches = length if wanted is None else wanted
    if accumulated > batches:
        raise InvalidArgumentError(
            f"grad_accum_steps must be at most the {batches} batches used of an epoch, got {accumulated}"
        )
    return batches // accumulated


def _length(dataloader: Any) -> int | None:
    try:
        return len(dataloader)
    except TypeError:
        return None
