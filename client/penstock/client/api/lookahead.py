"""A loader for frameworks that take batches before the training loop gets them.

To know which batch is the last one of an epoch, Accelerate's loaders and Lightning's fetcher for loaders without a
length take the next batch before they hand out this one. `DataLoader.state_dict()`, which counts what was taken, is
then one batch ahead of the loop, and a resume would leave that batch out.

How far such a wrapper is ahead depends on the framework, its version, the place in the epoch and whether the loader has
a length; so nothing is subtracted here. The loop's own side counts: it says `took()` for each batch that reaches it,
and the state is asked for at that step, which workers can tell as long as they keep it (Appliance(retention_steps=)).
That costs nothing until a state is asked for.

Counting can be forgotten, and a wrapper can hand out other batches than it took: share them among ranks, join them,
repeat some to fill up. Either would save a wrong position, so both are errors.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar, cast

from torch.utils.data import IterableDataset, get_worker_info

from penstock.client.api.appliance import Appliance
from penstock.client.api.data_executor import DataExecutor
from penstock.client.api.data_loader import DataLoader
from penstock.client.stream.checkpoint_schedule import CheckpointSteps, positive

__all__ = ["Lookahead"]

T = TypeVar("T")


class Lookahead(IterableDataset[Any]):
    """Give it to the framework in place of the loader, and save it in place of the loader::

        ahead = Lookahead(loader)
        prepared = ...                            # what the framework makes of `ahead`
        for batch in ahead.handed_out(prepared):
            ...
            ahead.state_dict()                    # of the batches up to this one

    Where the loop is the framework's own, its hook for the start of a batch calls `took()` instead; the callbacks in
    penstock.client.integrations do. An epoch that the framework has left without coming to its end is over when it
    begins the next one.

    It is an iterable dataset too: torch.utils.data.DataLoader(ahead, batch_size=None) goes through frameworks that
    take nothing else. The batches come from Penstock's workers still, so that needs no worker processes of its own.

    Args:
        loader: the Penstock DataLoader.
        depth: batches that the framework may be ahead when a state is asked for.
        checkpoint_steps, appliance: as for DataExecutor.

    Raises:
        TypeError: the loader is none of ours.
        InvalidArgumentError: depth or checkpoint_steps below 1.
    """

    def __init__(
        self,
        loader: DataLoader,
        *,
        depth: int = 1,
        checkpoint_steps: CheckpointSteps = None,
        appliance: Appliance | None = None,
    ) -> None:
        self._loader = loader
        self._depth = positive("depth", depth)
        self._executor = DataExecutor(loader, checkpoint_steps=checkpoint_steps, appliance=appliance)
        self._epoch_iterator: weakref.ref[Generator[Any, None, None]] | None = None
        """What the framework iterates."""
        self._begun: Generator[Any, None, None] | None = None
        """The executor's side of it, while the loop has got no batch of it."""
        self._waiting: list[Any] = []
        """What was taken of such an epoch."""
        self._step: int | None = None
        """The loop's; None before the first epoch, and once a state was loaded."""
        self._loads = 0
        self._over_at: int | None = None
        """The step of a loaded state whose pass is not gone on with; None once the loop has got a batch."""

    # ---- the framework's side

    def __iter__(self) -> Iterator[Any]:
        """One epoch, or what is left of it. The same one again if the loop has got nothing of it: some frameworks begin
        an epoch twice, and what they took of it the first time is handed out again."""
        if get_worker_info() is not None:
            raise RuntimeError(
                f"{self._loader.name}: a Lookahead is iterated in the training process, for its batches come from "
                "Penstock's workers: give torch's DataLoader num_workers=0"
            )
        if self._waiting and self._begun is not None:
            self._close_epoch()
        else:
            self._leave()
            self._begun = cast("Generator[Any, None, None]", iter(self._executor))
            self._step = self._loader.step
        batches = self._hand_out(self._begun, deque(self._waiting))
        self._epoch_iterator = weakref.ref(batches)
        return batches

    def _hand_out(self, batches: Generator[Any, None, None], again: deque[Any]) -> Generator[Any, None, None]:
        while again:
            yield again.popleft()
        for batch in batches:
            if self._begun is batches:
                self._waiting.append(batch)
                if len(self._waiting) > self._depth:
                    self._got()  # nobody counts, or the framework is too far ahead; state_dict() says so
            yield batch
            del batch  # or it would stay alive while the next one is waited for

    def __len__(self) -> int:
        """Batches of a whole epoch. TypeError if the loader has no length."""
        return len(self._loader)

    def _leave(self) -> None:
        """Frameworks that count batches do not ask for the end of an epoch, and hold its iterator."""
        self._close_epoch()
        begun = self._begun
        self._got()
        if begun is not None:
            begun.close()

    def _close_epoch(self) -> None:
        batches = self._epoch_iterator() if self._epoch_iterator is not None else None
        if batches is not None:
            batches.close()

    def _got(self) -> None:
        """From now on nothing of this epoch is handed out twice, and it ends with the framework's iterator."""
        self._begun = None
        self._waiting.clear()

    # ---- the loop's side

    @property
    def step(self) -> int:
        """The last step that the loop has got, over the whole life of the run."""
        return self._loader.step if self._step is None else self._step

    def took(self) -> None:
        """The loop has got the next batch.

        Raises RuntimeError if no such batch was taken from here: something repeats batches, or counts them twice.
        """
        if self._step is None or self._step >= self._loader.step:
            raise RuntimeError(
                f"{self._loader.name}: the loop got a batch after step {self.step}, and the framework had taken none "
                "from here: something repeats batches or makes its own (Accelerate's prepare() of a torch "
                "DataLoader shares one process's batches among all: use prepare_data_loader(..., num_processes=1, "
                "process_index=0, dispatch_batches=False)), or took() is called more than once a batch"
            )
        self._step += 1
        self._over_at = None
        if self._begun is not None:
            self._got()

    def handed_out(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches of one pass through what the framework made of this loader, counted.

        Raises RuntimeError if it hands out more, or fewer, than it took: it shares, joins or repeats batches; or if a
        state is loaded in the loop.
        """
        loads = self._loads
        for batch in batches:
            self.took()
            yield batch
            del batch  # or it would stay alive while the next one is waited for
            if self._loads != loads:
                raise RuntimeError(
                    f"{self._loader.name}: load_state_dict while handed_out(...) is iterated; leave its loop first"
                )
        if self.step != self._loader.step:
            raise RuntimeError(
                f"{self._loader.name}: the epoch is over at step {self._loader.step}, and the loop got the batches up "
                f"to step {self.step}: the framework shares, joins or drops batches. Each box has batches of its own "
                "already, so it must not (Accelerate: prepare_data_loader(..., num_processes=1, process_index=0, "
                "dispatch_batches=False))"
            )

    # ---- state

    @property
    def place(self) -> tuple[int, int]:
        """(box, num_boxes) of this process."""
        return self._loader.place

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last step that the loop has got.

        Raises:
            RuntimeError: the framework is further ahead than `depth`; or nobody said that the loop got its batches.
            NotRestartableError, StateUnavailableError: as for DataLoader.state_dict().
        """
        ahead = self._loader.step - self.step
        if ahead > self._depth:
            raise RuntimeError(
                f"{self._loader.name}: {self._loader.step} batches were taken, and the loop said that it got "
                f"{self.step}, which is more than depth={self._depth} apart: iterate handed_out(...), call took() for "
                "each batch, or use the callback of penstock.client.integrations; with a framework that is further "
                "ahead, give a greater depth"
            )
        return self._loader.state_at(self.step)

    def load_state_dict(self, sd: dict[str, Any], strict: bool = True) -> None:
        """Go on from a state of this loader, with the next epoch that is begun. Errors as for the DataLoader."""
        self._leave()
        self._loader.load_state_dict(sd, strict)
        self._loads += 1
        self._step = None
        if self._over_at == self._loader.step:
            self._loader.leave_epoch()
        else:
            self._over_at = None

    # ---- for frameworks whose epoch may be shorter than the epoch

    @property
    def mid_epoch(self) -> bool:
        """Whether batches of the epoch that was last begun are left, or may be left, behind those that were taken."""
        return self._loader.mid_epoch

    def leave_epoch(self) -> None:
        """After load_state_dict: the loop that was saved was done with its epoch, so the next epoch to be begun is the
        one after it. Loading the same state once more does not change that: Lightning does, by itself."""
        self._over_at = self._loader.step
        self._loader.leave_epoch()
