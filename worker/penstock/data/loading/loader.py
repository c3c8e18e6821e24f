"""Base class of MapLoader, StreamingLoader and ShardLoader: batches in an order that does not depend on boxes and
workers, and positions in it as states.

A subclass has the order: where a state lies (`_check_order`, `_own_position`, `_part`), how it is written (`_saved`,
`_aggregated`), and the batches from there. A PositionLoader computes the sample at a position, so a position is a few
integers, and batches may be planned ahead; a ShardLoader reads shards forwards by cursors, whose states are part of its
position.
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


class Loader(torch.utils.data.IterableDataset[Any], ABC):
    """Loader of batches. One iteration is one epoch, or the rest of an epoch after a loaded state."""

    loads_own_state = True
    exact_states = True
    draws_nothing = False
    """True if batches do not depend on the process's random generators, so that states need not hold these."""

    _described: dict[str, Any]
    """Settings that decide the order. `load_state_dict` refuses a state with others."""

    def __init__(
        self, name: str, identity: WorkerIdentity, batch: int, keys: str | None, counts: LoaderCounts, balance: Any
    ) -> None:
        """name: of the data, in messages. batch: rows of all boxes together. keys: field for restore keys, or None.
        balance: assigns rows to boxes by cost; None: round robin."""
        super().__init__()
        self._name, self._identity, self._batch = name, identity, batch
        self._key_field, self._counts, self._balance = checked_name(keys), counts, balance
        self._at_position = True
        """True if the next iteration begins at the present position, not at the next epoch."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Set `advance_state` to None (states cannot be advanced) in a subclass that overrides only `state_dict`: the
        inherited function does not know its states."""
        super().__init_subclass__(**keywords)
        if "state_dict" in vars(cls) and "advance_state" not in vars(cls):
            cls.advance_state = None  # type: ignore[assignment]

    def _promise(self, *, draws_nothing: bool, advances: bool = True) -> None:
        """Set what others may rely on. A user's subclass may draw. Counting needs the samples, and an advanced state
        lacks generators."""
        self.draws_nothing = draws_nothing and type(self).__module__.startswith("penstock.data.")
        if self._counts.tally is not None or not self.draws_nothing or not advances:
            self.advance_state = None  # type: ignore[method-assign, assignment]

    # ---- the order

    @abstractmethod
    def _epoch_number(self) -> int:
        """Return the epoch in which, or at whose beginning, the position lies."""

    @abstractmethod
    def _go_to_epoch(self, epoch: int) -> None: ...

    @abstractmethod
    def _imbalance(self, steps: int) -> Imbalance: ...

    @abstractmethod
    def _saved(self) -> dict[str, Any]:
        """Return the present position, without counts."""

    @abstractmethod
    def _check_order(self, state: Any, *, strict: bool) -> None:
        """Raise StateMismatchError for a state of another kind or order (strict=False: only warn for the order);
        StateCorruptError or StateVersionError for one that cannot be read."""

    @abstractmethod
    def _is_whole(self, topology: Topology) -> bool:
        """Return True if one worker's state says where all are."""

    @abstractmethod
    def _own_position(self, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Return the position in a state of this worker, or of one that has made no batch."""

    @abstractmethod
    def _part(self, aggregated: Mapping[str, Any], *, strict: bool) -> Any:
        """Return this worker's position in a state of all."""

    @abstractmethod
    def _state_of(self, position: Any) -> dict[str, Any]: ...

    @abstractmethod
    def _go_to(self, position: Any) -> None: ...

    @abstractmethod
    def _aggregated(self, states: list[Any]) -> dict[str, Any]:
        """Merge all workers' states, without counts. The topology is theirs, because any process may call this."""

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
        """Return how unequal the boxes' costs are, without balance and with it, as a mean over `steps` steps from the
        present epoch's beginning (ShardLoader: from the loaded state). No sample is read. Raises InvalidArgumentError
        without `balance`."""
        if self._balance is None:
            raise InvalidArgumentError(
                f"{self._name}: imbalance() needs the costs of samples. Pass balance=Balance(cost, report=True)"
            )
        return self._imbalance(at_least_one("steps", steps))

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's position after the batches that it has yielded so far."""
        return {**self._saved(), **self._counts.saved()}

    @staticmethod
    def advance_state(state_dict: dict[str, Any], batches: int) -> dict[str, Any]:
        """Return the state after `batches` more of a worker's batches in the same epoch, without reading data or
        running user code. Cursors stay: a resume skips from there. So do listed changes of weights; it fits a loader
        that knows more.

        The loader has None instead where states cannot be computed: with `counts`, if batches depend on the process's
        generators, and for a ShardLoader with `balance` or of a finite source of unknown lengths.
        """
        done = progress_of(state_dict).done
        taken = {TAKEN: state_dict.get(TAKEN, done)} if "block" in state_dict else {}  # only of endless sources
        return {**state_dict, **taken, "done": done + batches}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Go to the position of a state. One from aggregate_state_dict or state_after, of a run with a single worker,
        or from before the first batch fits any topology; any other fits only the boxes, workers, global batch and
        `skip` of its run.

        Raises:
            StateMismatchError: the state has another order; it is one of several workers' states with another topology
                or `skip`; it was saved with a `skip` that leaves out fewer samples before the position; or it has
                counts by another key. With strict=False another order, if the position has a meaning in it, and another
                `skip` only warn, and counts begin at zero.
            StateCorruptError, StateVersionError: the state cannot be read.
        """
        self._check_order(state_dict, strict=strict)
        before, topology = progress_of(state_dict), self._topology()
        counts: Mapping[str, Any] = state_dict
        if "others" in state_dict or (before.done and before.topology != topology):
            if "others" not in state_dict and not self._is_whole(before.topology):
                raise StateMismatchError(
                    f"{self._name}: the state of one of several workers fits only its topology, {before.topology}, got "
                    f"{topology}. Load a state from aggregate_state_dict or state_after"
                )
            position = self._part(state_dict, strict=strict)
            counts = {**state_dict, **self._counts_part(state_dict)}
        else:
            position = self._own_position(state_dict, strict=strict)
        self._counts.load(counts, strict=strict)
        self._go_to(position)

    def aggregate_state_dict(self, worker_states: list[Any]) -> dict[str, Any]:
        """Merge all workers' states, in order of global_worker_id, into one that fits any topology."""
        if not worker_states:
            raise InvalidArgumentError("aggregate_state_dict needs the states of all workers, got an empty list")
        return {**self._aggregated(worker_states), **LoaderCounts.aggregated(worker_states)}

    def deaggregate_state_dict(self, aggregated: Any, strict: bool = True) -> dict[str, Any]:
        """Return this worker's part of a state of `aggregate_state_dict` or `state_after`. Raises: as
        `load_state_dict`."""
        self._check_order(aggregated, strict=strict)
        progress = progress_of(aggregated)
        if "others" not in aggregated and progress.done and not self._is_whole(progress.topology):
            raise StateMismatchError("deaggregate_state_dict needs a state from aggregate_state_dict, got one worker's")
        return {**self._state_of(self._part(aggregated, strict=strict)), **self._counts_part(aggregated)}

    def repeats(self, aggregated: Mapping[str, Any]) -> bool:
        """Return True if the batches up to this state were made for the boxes, workers and global batch of this
        loader. Raises: as `load_state_dict` for a state that cannot be read."""
        return progress_of(aggregated).topology == self._topology()

    def config(self) -> dict[str, Any]:
        """Return the settings that decide the order, as JSON values. A state with others is refused."""
        return {"kind": type(self).__name__, **copy.deepcopy(self._described)}

    def can_restore_sample(self) -> bool:
        """Return True: `restore_sample` reads any sample again. User code that draws randomly returns another value."""
        return True

    # ---- counts and keys

    @property
    def tally(self) -> Tally | None:
        """Counts of the samples up to the present position, by source and key; None without `counts`."""
        return self._counts.tally

    def _counts_part(self, aggregated: Mapping[str, Any]) -> dict[str, Any]:
        identity = self._identity
        return self._counts.part(aggregated, identity.box, identity.boxes, identity.turn().number)

    def _topology(self) -> Topology:
        return Topology(self._identity.boxes, self._identity.turn().of, self._batch)
