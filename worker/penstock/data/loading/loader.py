"""Base class of MapLoader, StreamingLoader and ShardLoader: batches in an order that does not depend on the numbers of
boxes and workers, and positions in this order as states.

A subclass has the order. It answers where a state lies in it (`_check_order`, `_own_position`, `_part`), writes states
(`_saved`, `_aggregated`), and makes the batches from a position on. Two kinds of order differ in that, and stay apart:
PositionLoader computes which sample is at a position, so its position is a few integers, and batches may be planned and
read ahead; a ShardLoader reads shards forwards by cursors, whose states are part of its position.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch.utils.data

from penstock.data.arguments import at_least_one, whole
from penstock.data.loading.counting import LoaderCounts
from penstock.data.loading.restore_keys import checked_name
from penstock.data.loading.worker_identity import WorkerIdentity
from penstock.data.ordering.balance import Imbalance
from penstock.data.ordering.order_states import TAKEN, Topology, progress_of
from penstock.proto.errors import InvalidArgumentError, StateMismatchError
from penstock.proto.state.counts import Tally

__all__ = ["Loader"]


class Loader(torch.utils.data.IterableDataset[Any], ABC):
    """Loader of batches. One iteration is one epoch, or the rest of an epoch after a loaded state."""

    loads_own_state = True
    exact_states = True
    draws_nothing = False
    """True if batches do not depend on the process's random generators, so that states need not hold these."""

    _described: dict[str, Any]
    """All settings that decide the order, by name. `load_state_dict` refuses a state with other settings."""

    def __init__(
        self, name: str, identity: WorkerIdentity, batch: int, keys: str | None, counts: LoaderCounts, balance: Any
    ) -> None:
        """
        Args:
            name: name of the data, for messages.
            batch: number of rows of all boxes' batches together.
            keys: name of the field for restore keys; None: batches have none.
            balance: assignment of rows to boxes by cost; None: round robin.
        """
        super().__init__()
        self._name, self._identity, self._batch = name, identity, batch
        self._key_field, self._counts, self._balance = checked_name(keys), counts, balance
        self._at_position = True
        """True if the next iteration begins at the present position; False if at the next epoch's beginning."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Set `advance_state` to None in a subclass that overrides `state_dict` but not `advance_state`, because the
        inherited function does not know the subclass's states. None means that states cannot be advanced."""
        super().__init_subclass__(**keywords)
        if "state_dict" in vars(cls) and "advance_state" not in vars(cls):
            cls.advance_state = None  # type: ignore[assignment]

    def _promise(self, *, draws_nothing: bool, advances: bool = True) -> None:
        """Set what other parts may rely on. Of a user's subclass it is not known that it draws nothing. To count needs
        the samples, and an advanced state lacks the generators' states."""
        self.draws_nothing = draws_nothing and type(self).__module__.startswith("penstock.data.")
        if self._counts.tally is not None or not self.draws_nothing or not advances:
            self.advance_state = None  # type: ignore[method-assign, assignment]

    # ---- the order

    @abstractmethod
    def _epoch_number(self) -> int:
        """Return the number of the epoch at whose beginning, or within which, the position lies."""

    @abstractmethod
    def _go_to_epoch(self, epoch: int) -> None: ...

    @abstractmethod
    def _imbalance(self, steps: int) -> Imbalance: ...

    @abstractmethod
    def _saved(self) -> dict[str, Any]:
        """Return the present position as a state, without counts."""

    @abstractmethod
    def _check_order(self, state: Any, *, strict: bool) -> None:
        """Raise StateMismatchError for a state of another kind of loader, or of another order (strict=False: only a
        warning); StateCorruptError or StateVersionError for one that cannot be read."""

    @abstractmethod
    def _is_whole(self, topology: Topology) -> bool:
        """Return True if the state of one worker of this topology says where all workers are."""

    @abstractmethod
    def _own_position(self, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Return the position in the state of this worker, or of one that has made no batch."""

    @abstractmethod
    def _part(self, aggregated: Mapping[str, Any], *, strict: bool) -> Any:
        """Return the position of this worker in a state of all workers."""

    @abstractmethod
    def _state_of(self, position: Any) -> dict[str, Any]: ...

    @abstractmethod
    def _go_to(self, position: Any) -> None: ...

    @abstractmethod
    def _aggregated(self, states: list[Any]) -> dict[str, Any]:
        """Merge the states of all workers, without counts. The topology is taken from the states, because any process
        may call this."""

    # ---- epochs

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The iteration starts at the epoch's beginning; or, if a state in this
        epoch was loaded, at that state's position."""
        number = whole("epoch", epoch)
        if number is None or number < 0:
            raise InvalidArgumentError(f"epoch must be at least 0, got {epoch}. Count epochs from 0")
        if not self._at_position or number != self._epoch_number():
            self._go_to_epoch(number)

    def imbalance(self, steps: int = 100) -> Imbalance:
        """Return how unequal the costs of the boxes are, without balance and with it, as a mean over `steps` steps from
        the present epoch's beginning (of a ShardLoader, from a loaded state on). No sample is read. Raise
        InvalidArgumentError for a loader without `balance`."""
        if self._balance is None:
            raise InvalidArgumentError(
                f"{self._name}: imbalance() needs the costs of samples. Pass balance=Balance(cost, report=True) to the "
                "loader"
            )
        return self._imbalance(at_least_one("steps", steps))

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's position after the batches that it has yielded so far."""
        return {**self._saved(), **self._counts.saved()}

    @staticmethod
    def advance_state(state_dict: dict[str, Any], batches: int) -> dict[str, Any]:
        """Return the state that a worker will have after `batches` more of its batches in the same epoch. It is
        computed from `state_dict`, without reading data or running user code. Cursor states stay the same: a resume
        skips the samples from there. So do the changes of weights that it lists; it fits a loader that knows more.

        The loader has None instead of this method if states cannot be computed: with `counts`, if batches depend on the
        process's random generators, and for a ShardLoader with `balance` or of a finite source of unknown lengths.
        """
        done = progress_of(state_dict).done
        taken = {TAKEN: state_dict.get(TAKEN, done)} if "block" in state_dict else {}  # only of endless sources
        return {**state_dict, **taken, "done": done + batches}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Go to the position of a state. A state from aggregate_state_dict or state_after, or of a run with a single
        worker, fits any topology. Any other state, unless it was saved before the first batch, fits only the numbers of
        boxes and workers and the global batch (and `skip`) with which it was saved.

        Raises:
            StateMismatchError: the state belongs to another order of samples; or it is the state of one of several
                workers, with another topology or `skip`; or `skip` leaves out more samples before the position than
                when the state was saved; or its counts are by another key. With strict=False another order, if the
                position has a meaning in it, and another `skip` are only warnings, and counts begin at zero.
            StateCorruptError, StateVersionError: the state cannot be read.
        """
        self._check_order(state_dict, strict=strict)
        before, topology = progress_of(state_dict), self._topology()
        counts: Mapping[str, Any] = state_dict
        if "others" in state_dict or (before.done and before.topology != topology):
            if "others" not in state_dict and not self._is_whole(before.topology):
                raise StateMismatchError(
                    f"{self._name}: the state of one of several workers must be loaded in its own topology, "
                    f"{before.topology}, got {topology}. Load a state that aggregate_state_dict or state_after "
                    "returned, which fits any topology"
                )
            position = self._part(state_dict, strict=strict)
            counts = {**state_dict, **self._counts_part(state_dict)}
        else:
            position = self._own_position(state_dict, strict=strict)
        self._counts.load(counts, strict=strict)
        self._go_to(position)

    def aggregate_state_dict(self, worker_states: list[Any]) -> dict[str, Any]:
        """Merge the states of all workers, in order of global_worker_id, into one state that fits any topology."""
        if not worker_states:
            raise InvalidArgumentError(
                "aggregate_state_dict needs the states of all workers, got an empty list. Pass one state for each "
                "worker"
            )
        return {**self._aggregated(worker_states), **LoaderCounts.aggregated(worker_states)}

    def deaggregate_state_dict(self, aggregated: Any, strict: bool = True) -> dict[str, Any]:
        """Return this worker's part of a state that `aggregate_state_dict` or `state_after` returned. `strict` and
        errors: as in `load_state_dict`."""
        self._check_order(aggregated, strict=strict)
        progress = progress_of(aggregated)
        if "others" not in aggregated and progress.done and not self._is_whole(progress.topology):
            raise StateMismatchError(
                "deaggregate_state_dict needs a state that aggregate_state_dict returned, got the state of one "
                "worker. Merge the states of all workers first"
            )
        return {**self._state_of(self._part(aggregated, strict=strict)), **self._counts_part(aggregated)}

    def config(self) -> dict[str, Any]:
        """Return the settings that decide the order of samples, as a dict of JSON values. A state with different
        settings is refused."""
        return {"kind": type(self).__name__, **copy.deepcopy(self._described)}

    def can_restore_sample(self) -> bool:
        """Return True: `restore_sample` can read any sample again. A user's function that draws from the process's
        random generators returns another value then."""
        return True

    # ---- counts and keys

    @property
    def tally(self) -> Tally | None:
        """Counts of the samples up to the present position, by source and key; None without `counts`."""
        return self._counts.tally

    @property
    def key_field(self) -> str | None:
        """Name of the field of a batch that holds its restore keys; None without `keys`."""
        return self._key_field

    def _counts_part(self, aggregated: Mapping[str, Any]) -> dict[str, Any]:
        identity = self._identity
        return self._counts.part(aggregated, identity.box, identity.boxes, identity.turn().number)

    def _topology(self) -> Topology:
        return Topology(self._identity.boxes, self._identity.turn().of, self._batch)
