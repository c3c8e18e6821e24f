"""Loader for frameworks that prefetch: they take batches before the training loop gets them, so that a resume from
`DataLoader.state_dict()`, which counts taken batches, would leave some out.

How far a wrapper is ahead depends on framework, version, position and length, so the loop counts each batch that it
gets by `took()`. Two mistakes would save a wrong position, so both are errors: the loop forgets to count, or a wrapper
yields other batches than it took (because it shares, joins or repeats batches)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from penstock.client.api.appliance import Appliance
from penstock.client.api.data_loader import DataLoader
from penstock.client.api.executor import DataExecutor
from penstock.client.states.saved_state import Layers
from penstock.client.stream.checkpoint_schedule import CheckpointSteps, checked_int

T = TypeVar("T")

_ACCELERATE = (
    "With Accelerate use prepare_data_loader(..., num_processes=1, process_index=0, dispatch_batches=False): prepare() "
    "shares one process's batches among all"
)


class Lookahead(IterableDataset[Any]):
    """Wrapper of a loader for frameworks that take batches ahead of the training loop. Its state counts only batches
    that the loop has got. Give the wrapper to the framework, and save its state, in place of the loader.

    Example::

        ahead = Lookahead(loader)
        prepared = ...                            # the framework's wrapper of `ahead`
        for batch in ahead.handed_out(prepared):
            ...
            ahead.state_dict()                    # counts the batches up to this one

    If the framework owns the loop, its hook for the start of a batch calls `took()` instead, as the callbacks in
    penstock.client.integrations do. An epoch that the framework leaves early ends when it begins the next one. A
    Lookahead is also an iterable dataset, for frameworks that accept only torch.utils.data.DataLoader(ahead,
    batch_size=None), which needs no worker processes of its own.

    Args:
        loader: Penstock DataLoader.
        depth: largest number of batches by which the framework may be ahead when a state is requested (1).
        checkpoint_steps, appliance: as for DataExecutor.

    Raises TypeError, InvalidArgumentError."""

    def __init__(
        self,
        loader: DataLoader,
        *,
        depth: int = 1,
        checkpoint_steps: CheckpointSteps = None,
        appliance: Appliance | None = None,
    ) -> None:
        self._loader = loader
        self._depth = checked_int("depth", depth)
        self._executor = DataExecutor(loader, checkpoint_steps=checkpoint_steps, appliance=appliance)
        self._steps: weakref.ref[Any] | None = None
        """The executor's iterator over the present epoch. The iterator that the framework has holds it."""
        self._begun: Iterator[Any] | None = None
        """The executor's iterator, until the loop gets the epoch's first batch."""
        self._handing_out: object = None
        """Identifies the iterator of this object that has taken the last batch."""
        self._waiting: list[Any] = []
        """Batches taken from `_begun`, to be yielded again if the framework begins the epoch a second time."""
        self._step: int | None = None
        """Last step whose batch the loop has got; None before the first epoch, and after a load."""
        self._loads = 0
        self._over_at: tuple[int, bool] | None = None
        """Step of a loaded state that was saved after its epoch, and whether this was the last batch by len()."""

    # ---- methods that the framework calls

    def __iter__(self) -> Iterator[Any]:
        """Iterate one epoch, or the rest of a begun one. Some frameworks begin an epoch twice: an iterator whose first
        batch is taken before the loop has got a batch of the epoch yields the same batches again."""
        if get_worker_info() is not None:
            raise RuntimeError(
                f"{self._loader.name}: a Lookahead must be iterated in the training process, got a worker process of "
                "torch's DataLoader: give it num_workers=0"
            )
        return self._hand_out(iter(self._executor))

    def _hand_out(self, steps: Iterator[Any]) -> Iterator[Any]:
        if self._begun is not None and self._waiting:
            steps = self._begun
        else:
            self._got()
            self._begun, self._steps, self._step = steps, weakref.ref(steps), self._loader.step
        self._handing_out = turn = object()
        again = deque(self._waiting)
        while again:
            yield again.popleft()
            self._check_present(turn)
        for batch in steps:
            if self._begun is steps:
                self._waiting.append(batch)
                if len(self._waiting) > self._depth:
                    # state_dict() raises an error: the loop does not count, or the framework is too far ahead
                    self._got()
            yield batch
            del batch  # do not keep it alive while the loop waits for the next one
            self._check_present(turn)

    def _check_present(self, iterator: object) -> None:
        if self._handing_out is not iterator:
            raise RuntimeError(
                f"{self._loader.name}: this iterator has ended, because another loop over this Lookahead has taken "
                "batches: finish one loop before the next, or make a second Lookahead of a second DataLoader"
            )

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch. Raises TypeError if the loader has no length."""
        return len(self._loader)

    def _got(self) -> None:
        """Forget the batches kept for a second start: the epoch now ends when the framework drops its iterator."""
        self._begun = None
        self._waiting.clear()

    # ---- methods that the loop calls

    @property
    def step(self) -> int:
        """Last step whose batch the loop has got; before the first epoch that of the loaded state, or 0."""
        return self._loader.step if self._step is None else self._step

    def took(self) -> None:
        """Count a batch that the loop has got. Raises RuntimeError if all that the framework took are counted."""
        if self._step is None or self._step >= self._loader.step:
            raise RuntimeError(
                f"{self._loader.name}: took() was called after step {self.step}, but the framework has taken no "
                f"further batch: call it once for each batch. {_ACCELERATE}"
            )
        self._step += 1
        self._over_at = None
        if self._begun is not None:
            self._got()

    def handed_out(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches of `batches`, the framework's wrapper of this loader, for one epoch, and count each.

        Raises RuntimeError if the wrapper yields more or fewer batches than it took, because it shares, joins or
        repeats batches; or if a state is loaded in the loop."""
        loads = self._loads
        for batch in batches:
            self.took()
            yield batch
            del batch  # do not keep it alive while the loop waits for the next one
            if self._loads != loads:
                raise RuntimeError(f"{self._loader.name}: load_state_dict was called in a loop over handed_out(...)")
        if self.step != self._loader.step:
            raise RuntimeError(
                f"{self._loader.name}: the framework took the batches up to step {self._loader.step}, but the loop got "
                f"only those up to step {self.step}: turn off that it shares, joins or drops batches. {_ACCELERATE}"
            )

    # ---- state

    @property
    def box_and_num_boxes(self) -> tuple[int, int]:
        """Number of this process's box, and number of boxes, in the loader's run."""
        return self._loader.box_and_num_boxes

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that the loop has got.

        Raises:
            RuntimeError: the framework is further ahead than `depth`, or took() was not called for each batch.
            NotRestartableError, StateUnavailableError: as for DataLoader.state_dict().
        """
        ahead = self._loader.step - self.step
        if ahead > self._depth:
            raise RuntimeError(
                f"{self._loader.name}: the framework must be at most depth={self._depth} batches ahead of the loop, "
                f"got {ahead}: iterate handed_out(...), or call took() for each batch, or raise depth"
            )
        return self._loader.state_at(self.step)

    def load_state_dict(self, sd: dict[str, Any], strict: bool = True, layers: Layers = "keep") -> None:
        """Load a state, from which the next iteration resumes. Raises the errors of DataLoader.load_state_dict()."""
        steps = self._steps() if self._steps is not None else None
        if steps is not None:
            steps.close()  # the framework may hold its iterator; a loop that goes on has an error
        self._got()
        self._loader.load_state_dict(sd, strict, layers)
        self._loads += 1
        self._step = None
        if self._over_at is not None and self._over_at[0] == self._loader.step:
            self._loader.leave_epoch(at_its_end=self._over_at[1])
        else:
            self._over_at = None

    # ---- epochs of the framework that are shorter than Penstock's

    @property
    def mid_epoch(self) -> bool:
        """True if the present epoch has, or without len() may have, batches that the framework has not taken yet."""
        return self._loader.mid_epoch

    def leave_epoch(self, *, at_its_end: bool = False) -> None:
        """Leave the epoch of the loaded state, if the framework limits the batches of an epoch, and the loop that saved
        the state had reached this limit. `at_its_end`, errors: as for DataLoader.leave_epoch(). The call keeps its
        effect if the same state is loaded once more, as Lightning does."""
        self._over_at = self._loader.step, at_its_end
        self._loader.leave_epoch(at_its_end=at_its_end)
