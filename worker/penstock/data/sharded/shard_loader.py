"""Loader of batches from a source in logical shards, with a position that can be saved and moved to any topology."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch.utils.data

from penstock.data.arguments import at_least_one, whole
from penstock.data.loading.collating import checked_collate, empty_batch, may_draw, without_rows
from penstock.data.loading.counting import Counts, LoaderCounts, skipped_rows
from penstock.data.loading.keyed_random import seeded
from penstock.data.loading.restore_keys import checked_name, with_keys
from penstock.data.loading.worker_identity import WorkerIdentity, global_batch
from penstock.data.ordering.balance import Balance, Imbalance
from penstock.data.ordering.order_states import OrderProgress, Topology
from penstock.data.ordering.partition import APART, Partition
from penstock.data.sharded.layers.layer import is_keyed
from penstock.data.sharded.layers.packed_rows import collate_packed
from penstock.data.sharded.mixture_changes import (
    CHANGES,
    LoadSource,
    MixtureChange,
    changed,
    in_epoch,
    listed,
    merged,
    mixture_of,
    new_parts,
    new_position,
    refuse_to_import,
    shares_at,
    stages_of,
    still_to_come,
    try_sources,
    with_all_changes,
)
from penstock.data.sharded.protocol import ShardedSource
from penstock.data.sharded.row_balance import RowBalance
from penstock.data.sharded.sample_counts import changes_shares, counted_samples, wanted_shares
from penstock.data.sharded.shard_cursors import HeldSample
from penstock.data.sharded.shard_keys import KeyStage, digest_of
from penstock.data.sharded.shard_orders import Tail
from penstock.data.sharded.shard_states import (
    TAKEN,
    FixedOrder,
    ShardedPosition,
    check_order,
    check_source,
    check_state,
    described,
    differences,
)
from penstock.data.sharded.worker_share import SharePlan, WorkerShare
from penstock.proto.errors import InvalidArgumentError, StateMismatchError
from penstock.proto.state.counts import Group, Row, Tally, note_imbalance
from penstock.proto.state.generators import derive_seed
from penstock.worker.batch.building import collate

__all__ = ["ShardLoader"]

_log = logging.getLogger(__name__)


class ShardLoader(torch.utils.data.IterableDataset[Any]):
    """Loader of batches from a source in logical shards, in an order that does not depend on boxes and workers.

    Example::

        def input_fn():
            shards = LogicalShards([LineFile(path) for path in sorted(glob("/data/*.jsonl"))], shards=240)
            return ShardLoader(Repeated(shards), batch_size=32, partitions=8)

    Inside an input_fn the loader makes this worker's share of the batches, and implements RestartableDataLoader: a
    saved state can be resumed on any number of boxes (data-parallel ranks) and workers. In a plain torch DataLoader
    (`DataLoader(loader, batch_size=None, num_workers=4)`) the worker processes share the batches, and the order is the
    same; torchdata's StatefulDataLoader saves the position there. Anywhere else the loader yields all batches of this
    rank (RANK and WORLD_SIZE, if they are set).

    A finite source is read round robin over its shards: sample 0 of each, then sample 1, and so on. One iteration is
    one epoch, or the rest of it after a loaded state. Every worker goes through the whole stream, and skips the rows of
    other workers.

    An endless source has one epoch without an end. With the default `block`, each worker reads only shards of its own
    if the number of boxes divides `partitions` and the global batch, and the number of workers of a box divides the
    number of shards in a partition.
    The order depends on `block` and not on the batch size, so the order stays the same when batches are halved and
    gradients are accumulated. A second epoch (after the first was abandoned, or by set_epoch) reads the source from the
    beginning in another order.
    """

    loads_own_state = True
    exact_states = True

    def __init__(
        self,
        source: ShardedSource,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        seed: int | None = None,
        partitions: int = 1,
        block: int | None = None,
        tail: Tail = "emit",
        keys: str | None = None,
        counts: Counts | None = None,
        balance: Balance | None = None,
        rank: tuple[int, int] | None = None,
        collate_fn: Callable[[list[Any]], Any] = collate,
        unbatched: bool = False,
    ) -> None:
        """
        Args:
            batch_size: rows of a box's batch; the global batch grows with the number of boxes.
            global_batch_size: rows of all boxes' batches together. Give either batch_size or global_batch_size. Boxes
                share the rows as evenly as possible, and each gets at least one.
            seed: seed of all randomness in the source; None: the run's seed (0 outside a worker).
            partitions: for an endless source: number of parts into which its shards are divided. A batch's rows are
                taken from the parts round robin. The number of shards must be a multiple of `partitions`. Give the
                largest number of boxes that you will use.
            block: for an endless source: number of consecutive samples that come from one column of its shards (one
                shard of each partition). The order depends on `block`, and not on the batch size. If an optimizer's
                step takes several batches, give the number of rows of all boxes in a step. None: the block of the
                loaded state, or the global batch with which the run begins.
            tail: treatment of the incomplete last batch of a finite source: "emit" it, "pad" it with samples of the
                epoch's beginning, or "drop" it.
            keys: name of a field that is added to each batch, with a text for each row that `restore_sample` takes to
                read the row's sample again. A batch that is not a dict becomes {"batch": batch, keys: ...}.
            counts: settings of the counts of samples by source and key, see `Counts`; None: nothing is counted.
            balance: distribution of the rows of a step to the boxes by cost, see Balance; None: rows are assigned
                round robin. The source must be LogicalShards of indexable pieces, or Mapped or Repeated over it. Costs
                are given by record, in the order of the pieces. A box also reads shards of other boxes' partitions.
            rank: (this rank, number of data-parallel ranks); the ranks share each global batch. None: the worker's box
                and the number of boxes, or outside a worker RANK and WORLD_SIZE. Ranks that need the same rows, as in
                tensor parallelism, pass the same value.
            collate_fn: function from a list of samples to a batch. The function may draw from the global random
                generators of python, numpy and torch: the generators are seeded before each batch, from `seed` and the
                position of the batch's first row, and set back to their earlier state afterwards. torch's
                default_collate, the default function and `collate_packed` draw nothing, and are not seeded.
            unbatched: True if the source's samples are batches already: a box gets one of them at each step, unchanged.
                Leave out the batch size. If fewer batches than boxes are left at the end, tail="emit" gives the other
                boxes a batch without rows.

        Raises InvalidArgumentError or DatasetError for invalid arguments.
        """
        super().__init__()
        self._code = source
        """Source as the user's code made it, without the changes of its mixture's weights that an operator ordered."""
        self._changes: list[MixtureChange] = []
        """Changes of weights that an operator ordered (mixture_changes.py). `_present`: those that apply in the present
        epoch. `_history`: those that saved states will list. `_assigned`: those that the coordinator sent."""
        self._present: list[MixtureChange] = []
        self._history: list[MixtureChange] = []
        self._assigned: list[MixtureChange] = []
        self._load_source: LoadSource = refuse_to_import
        self._identity = identity = WorkerIdentity.now(rank)
        partitions, seed = at_least_one("partitions", partitions), whole("seed", seed)
        block = None if block is None else at_least_one("block", block)
        self._batch = global_batch(batch_size, global_batch_size, identity.boxes, unbatched=unbatched)
        self._partitions, self._block, self._asked_tail, self._counts = partitions, block, tail, LoaderCounts(counts)
        self._tail: Tail = APART if unbatched and tail == "emit" else tail
        self._collate = _only if unbatched else checked_collate(collate_fn)
        self._keys, self._balance = checked_name(keys), balance
        self._seed = identity.seed if seed is None else seed
        draws = not unbatched and collate_fn is not collate_packed and may_draw(collate_fn)
        self._collate_key = derive_seed(self._seed, "collate") if draws else None
        self._warned = False
        """True once the warning about a second epoch of an endless source was logged."""
        self._read(source)

    def _read(self, source: ShardedSource) -> None:
        """Set the source to read, and go to its first position."""
        partitions, block, tail, identity = self._partitions, self._block, self._asked_tail, self._identity
        check_source(source, partitions, block, tail)
        self.source = source
        self._order: dict[str, Any] = {
            "source": described(source),
            "shards": source.num_shards,
            "endless": source.endless,
            "seed": self._seed,
            "partitions": partitions if source.endless else None,
            "tail": None if source.endless else tail,
        }
        self._fixed_order = FixedOrder(source, partitions, self._tail, block)
        stages = stages_of(self._code, self._present, self._load_source, self._order)
        balance = None if self._balance is None else RowBalance(self._balance, source)
        self._plan = SharePlan(self._fixed_order, self._seed, identity.box, stages, self._keys is not None, balance)
        self._begun = ShardedPosition(
            OrderProgress(0, 0, 0, self._topology()),
            endless_order=self._fixed_order.endless_order(block or self._batch),
        )
        """Position at which the present epoch began, or at which the next iteration will begin."""
        self._at_position = True
        """True if the next iteration begins at `_begun`; False if it begins the epoch after that of `_begun`."""
        self._share: WorkerShare | None = None
        """Batches that this worker makes in the epoch that was begun last; None if the position was set since. An
        iterator over any other share has ended."""
        lengths = None if source.endless else source.lengths(0)
        self._counts.set_shares(wanted_shares(source))
        counts = self._counts.tally is not None  # counting needs the samples between two states
        self._wants_change = counts and changes_shares(source)
        keyed = is_keyed(source)
        self.draws_nothing = keyed and type(self) is ShardLoader
        """True if batches do not depend on the process's random generators, so that states need not hold these. Not
        known of a user's subclass."""
        if counts or balance or not keyed or (lengths is None and not source.endless):
            self.advance_state = None  # type: ignore[method-assign, assignment]
        if lengths is not None:
            self._plan.check_length(0, sum(map(int, lengths)), self._batch, identity.boxes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self.source!r}: {self._batch} samples in a global batch>"

    def __len__(self) -> int:
        """Return the number of batches that this process makes in a whole epoch. Raises TypeError if the source is
        endless or its lengths are unknown."""
        lengths = None if self.source.endless else self.source.lengths(self._begun.progress.epoch)
        if lengths is None:
            why = "is endless" if self.source.endless else "does not report the lengths of its shards"
            raise TypeError(
                f"len() of a ShardLoader needs a finite source with known lengths, but the source {why}. Count the "
                "batches while iterating"
            )
        partition = Partition(sum(map(int, lengths)), 0, self._batch, self._identity.boxes, self._tail)
        return self._identity.turn().done(partition.batches)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, or over the rest of the epoch in which a loaded state lies."""
        if not self._at_position:
            if self.source.endless and not self._warned:
                self._warned = True
                _log.warning(
                    "a second epoch of an endless source begins, which reads the source from its beginning in another "
                    "order, because the first epoch was abandoned. To continue with the next batch, keep the "
                    "iterator, or load the loader's state_dict()"
                )
            self._move_to_epoch(self._begun.progress.epoch + 1)
        self._at_position = False
        return _Epoch(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The iteration starts at the epoch's beginning; or, if a state in this
        epoch was loaded, at that state's position."""
        number = whole("epoch", epoch)
        if number is None or number < 0:
            raise InvalidArgumentError(f"epoch must be at least 0, got {epoch}. Count epochs from 0")
        epoch = number
        if not self._at_position or epoch != self._begun.progress.epoch:
            self._move_to_epoch(epoch)

    def config(self) -> dict[str, Any]:
        """Return the settings that decide the order of samples, as JSON values. A state with different settings is
        refused."""
        endless_order = self._begun.endless_order
        return {
            "kind": "ShardLoader",
            **copy.deepcopy(self._order),
            "block": None if endless_order is None else endless_order.block,
        }

    def imbalance(self, steps: int = 100) -> Imbalance:
        """Return how unequal the boxes' costs are in `steps` steps from the epoch's beginning, or from a loaded state
        on, without balance and with it. No sample is read. Raises InvalidArgumentError for a loader without
        `balance`."""
        if self._balance is None:
            raise InvalidArgumentError("imbalance() needs costs of records. Pass balance=Balance(cost, report=True)")
        whole = self._fixed_order.repartitioned(self._begun, self._topology(), first=0)
        return self._plan.imbalance(whole, at_least_one("steps", steps))

    def can_restore_sample(self) -> bool:
        """Return True: any sample can be read again by its restore key. A user's function that draws from the process's
        random generators returns another value when the sample is read again."""
        return True

    def restore_sample(self, key: str) -> Any:
        """Read the sample of a row again. `key`: the row's restore key, from the batch's field `keys`.

        Raises:
            StateMismatchError: the key is of other data, or of another order.
            InvalidArgumentError, StateCorruptError: `key` is not a restore key, or damaged.
            DatasetError: the shard ends before the sample.
        """
        return self._plan.restored(key, self._stages)

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's position after the batches that it has yielded so far."""
        position = self._begun if self._share is None else self._share.position()
        return {**position.state(self._order), **self._counts.saved(), **self._listed()}

    def _listed(self) -> dict[str, Any]:
        """Return the part of a state that lists the changes of the mixture's weights; an empty dict without changes."""
        return {CHANGES: [change.plain() for change in self._history]} if self._history else {}

    @staticmethod
    def advance_state(state_dict: dict[str, Any], batches: int) -> dict[str, Any]:
        """Return the state that a worker has when it has made `batches` more batches in the same epoch. No user code
        runs. The saved positions in the state stay the same: a resume skips the samples from there. The state lists the
        changes of weights that it listed before, and fits a loader that knows more.

        The loader has None instead of this method if it has `counts` or `balance`, if the lengths of a finite source
        are unknown, or if the source may draw from the process's random generators, whose states would be needed.
        """
        done = OrderProgress.parsed(state_dict).done
        taken = {TAKEN: state_dict.get(TAKEN, done)} if "block" in state_dict else {}  # only of endless sources
        return {**state_dict, **taken, "done": done + batches}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Go to the position of a state. A state from aggregate_state_dict, or from a run with a single worker, fits
        any topology. Any other state, unless it was saved before the first batch, fits only the numbers of boxes and
        workers and the global batch with which it was saved.

        Raises:
            StateMismatchError: the state belongs to another order of samples (strict=False: only a warning, if the
                number of shards and `partitions` are the same), to one of several workers of another topology, or to
                counts by another key (strict=False: the counts begin at zero).
            StateCorruptError, StateVersionError: the state cannot be read.
        """
        self._check_order(state_dict, strict=strict)
        counts: Mapping[str, Any] = state_dict
        if "others" in state_dict:
            position, counts = self._part(state_dict), {**state_dict, **self._counts_part(state_dict)}
        else:
            position, topology = self._fixed_order.read(state_dict), self._topology()
            before = position.progress
            if before.done and before.topology != topology:
                # The ends of other shards may be known only to workers of other boxes.
                if not before.topology.boxes == before.topology.workers == 1:
                    raise StateMismatchError(
                        f"the state of one of several workers must be loaded in its own topology, {before.topology}, "
                        f"got {topology}. Load a state that aggregate_state_dict returned, which fits any topology"
                    )
                position, counts = self._part(state_dict), {**state_dict, **self._counts_part(state_dict)}
            elif before.topology != topology:
                position = self._fixed_order.repartitioned(position, topology, first=0)
        self._counts.load(counts, strict=strict)
        self._move_to(position)

    def aggregate_state_dict(self, worker_states: list[Any]) -> dict[str, Any]:
        """Return one state for any topology, merged from the states of all workers in order of global_worker_id."""
        states = self._with_all_changes(worker_states)
        whole = {**self._fixed_order.aggregated(states), **LoaderCounts.aggregated(states)}
        return {**whole, CHANGES: states[0][CHANGES]} if CHANGES in states[0] else whole

    def _with_all_changes(self, states: Sequence[Any]) -> Sequence[Any]:
        if not any(CHANGES in state for state in states if isinstance(state, Mapping)):
            return states
        taken = []
        for number, state in enumerate(states):
            progress = self._fixed_order.read(state).progress
            own = progress.turn(number % progress.topology.workers)
            taken.append(self._fixed_order.taken(state, lambda first, own=own: own))  # type: ignore[misc]
        return with_all_changes(states, taken)

    def deaggregate_state_dict(self, aggregated: Any, strict: bool = True) -> dict[str, Any]:
        """Return this worker's part of an aggregated state. `strict` and errors: as in `load_state_dict`."""
        self._check_order(aggregated, strict=strict)
        if "others" not in aggregated:
            raise StateMismatchError(
                "the state must come from aggregate_state_dict, got the state of one worker. Pass the states of "
                "all workers to aggregate_state_dict first"
            )
        return {**self._part(aggregated).state(self._order), **self._counts_part(aggregated), **self._listed()}

    def _check_order(self, state: Any, *, strict: bool) -> None:
        """Apply the changes of weights that a state lists, and check that the state belongs to the resulting order."""
        check_state(state)
        until = self._adopt(state) if self._assigned or CHANGES in state else None
        check_order(self._with_later_weights(state, until), self._order, strict=strict)

    def _with_later_weights(self, state: Any, until: int | None = None) -> Mapping[str, Any]:
        return self._fixed_order.with_later_weights(state, self._order, self._identity.turn, until)

    def _stages(self, epoch: int) -> Sequence[KeyStage]:
        """Return the stages of an epoch: its parts from one change of weights by an operator to the next."""
        changes = in_epoch(self._changes, epoch)
        if changes == self._present:
            return self._plan.stages
        return stages_of(self._code, changes, self._load_source, self._order)

    # ---- weights that an operator changes during a run (penstock mix)

    def change_mixture(self, changes: Sequence[Mapping[str, Any]], load: LoadSource) -> None:
        """Apply changes of the uppermost mixture's weights that an operator ordered. Call this before a state is
        loaded.

        changes: dicts as `MixtureChange.plain` returns them, in the order in which they were ordered. load: function
        from a name ("module:function") to the source that this function of the user returns. Raises
        InvalidArgumentError if the changes do not fit the mixture.
        """
        self._assigned, self._load_source = [MixtureChange.parsed(change) for change in changes], cache(load)
        self._history = self._assigned
        self._use(self._assigned, 0)

    def plan_change(
        self,
        steps: int,
        epochs: int,
        state: Mapping[str, Any] | None,
        weights: Mapping[str, Any],
        added: Mapping[str, str],
        retired: Sequence[str],
    ) -> tuple[str, tuple[int, int], dict[str, int], dict[str, float], dict[str, float], dict[str, str]]:
        """Try a change of the mixture's weights that an operator orders. Do not use the loader afterwards. Return the
        digest of the order with the change; the (epoch, position) at which it begins; by the sources' names their new
        weights as whole numbers, their shares before the change, and their shares after it; and the functions of all
        sources that the code lacks, because the changes that added them may not apply to each later launch of the job.

        steps: number of global batches to the change, from `state` or, with `epochs`, from this epoch's beginning.
        epochs: number of epochs that the run has begun since `state`. state: aggregated state from which the run began;
        None: it began at the data's beginning. weights, added, retired: see `new_parts`.

        Raises InvalidArgumentError or StateMismatchError for an impossible change.
        """
        mixture_of(self.source)  # raises an error if there is none
        epoch, begin = 0, 0
        if state is not None:
            self._check_order(state, strict=True)
            epoch, begin = self._fixed_order.reached(state, self._identity.turn)
        if epochs:
            epoch, begin = epoch + epochs, 0
            self._use(self._changes, epoch)
        position, before = new_position(begin, steps, self._batch), mixture_of(self.source)
        parts = new_parts(before, position, weights, added, retired)
        functions = {**{name: fn for one in self._changes for name, fn in one.added.items() if name in parts}, **added}
        at = replace(self._begun, progress=OrderProgress(epoch, position, 0, self._topology())).state(self._order)
        self._use([*self._changes, MixtureChange("", position, parts, functions, epoch=epoch)], epoch)
        check_order(self._with_later_weights({**at, "others": {}}), self._order, strict=True)
        beside = max(before.names, key=parts.__getitem__)
        self._try_sources([*([beside] if added and parts[beside] else []), *added])
        was, now = shares_at(before, position), shares_at(mixture_of(self.source), position)
        return digest_of(self._order), (epoch, position), parts, was, now, functions

    def _try_sources(self, names: Sequence[str]) -> None:
        """Make a batch from one sample of each named source, to find out whether the sources work."""
        samples = try_sources(self.source, names, self._seed)
        if self._counts.counter is not None:
            counted_samples(self._counts.counter, samples)
        if samples and self._collate is not _only:
            seeded(partial(self._collate, [held.sample for held in samples]), self._seed, 0)

    def _use(self, changes: list[MixtureChange], epoch: int) -> None:
        """Set the changes of weights. If those that apply in `epoch` are others than those that apply now, make the
        source with them, and go to its first position."""
        self._changes, present = changes, in_epoch(changes, epoch)
        if present != self._present:
            source, self._present = changed(self._code, present, self._load_source), present
            self._read(source)

    def _adopt(self, state: Mapping[str, Any]) -> int | None:
        """Apply the changes that a state lists, and those of the run that begin later. If the user's code already has
        the weights of all changes before the state's position (in a Schedule), apply only the later ones.

        Return the position from which the state's description lacks a change that applies, because the state was
        advanced beyond a change that it does not know; None if it lacks none before the state's position."""
        reached = taken = (0, 0)
        if self.source.endless:
            turn = self._identity.turn
            reached, taken = self._fixed_order.reached(state, turn), self._fixed_order.taken(state, turn)
        known = listed(state)
        changes = self._history = merged(known, self._assigned, reached, taken)
        keys = {change.key for change in known}
        until = min((one.position for one in changes if one.begins < reached and one.key not in keys), default=None)
        later = still_to_come(changes, reached)
        if later != changes and until is None:
            with contextlib.suppress(InvalidArgumentError):  # raised if the code lacks a source of a change
                self._use(later, reached[0])
                if not differences(self._with_later_weights(state)["order"], self._order):
                    return None
        self._use(changes, reached[0])
        return until

    @property
    def tally(self) -> Tally | None:
        """Counts of samples from the run's beginning on, by source and key; None without `counts`."""
        return self._counts.tally

    @property
    def key_field(self) -> str | None:
        """Name of the field of a batch that holds its restore keys; None without `keys`."""
        return self._keys

    def _counts_part(self, aggregated: Mapping[str, Any]) -> dict[str, Any]:
        identity = self._identity
        return self._counts.part(aggregated, identity.box, identity.boxes, identity.turn().number)

    def _part(self, aggregated: Mapping[str, Any]) -> ShardedPosition:
        identity = self._identity
        part, moved = self._fixed_order.part(aggregated, identity.number, identity.all_workers, self._topology())
        progress = part.progress
        if part.endless_order is not None:
            turn, batch = identity.turn(progress.first), progress.topology.batch
            if self._plan.balance is not None and self._plan.balance.assigns:
                return part  # with balance, rows may come from any shard
            own = part.endless_order.own(
                progress.start + turn.number * batch, batch, turn.of, identity.box, identity.boxes
            )
            return replace(part, cursors=part.cursors.among(set(own.tolist())))
        if moved and not self._plan.has_rows(part):
            return ShardedPosition(OrderProgress(progress.epoch + 1, 0, 0, progress.topology))
        return part

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle: the position, without open shards. If an epoch was begun, the copy's next
        iteration begins the next one."""
        if self._share is None:
            return self.__dict__.copy()
        return {**self.__dict__, "_begun": self._share.position(), "_share": None}

    # ---- epochs

    def _topology(self) -> Topology:
        return Topology(self._identity.boxes, self._identity.turn().of, self._batch)

    def _move_to(self, position: ShardedPosition) -> None:
        """Set the position at which the next iteration begins, and close the open shards."""
        if self._share is not None:
            self._share.close()
            self._share = None
        self._begun, self._at_position = position, True

    def _move_to_epoch(self, epoch: int) -> None:
        endless_order = self._begun.endless_order
        self._use(self._changes, epoch)
        self._move_to(ShardedPosition(OrderProgress(epoch, 0, 0, self._topology()), endless_order=endless_order))

    def _begin(self) -> WorkerShare:
        """Return the batches that this worker makes from the loader's position on. If the topology is another one than
        that of the position, adapt the position first: a worker process of a torch DataLoader has a copy of a loader
        that was made in the parent process, before it was known that several processes share the batches."""
        progress, topology = self._begun.progress, self._topology()
        if progress.topology != topology:
            if progress.done and progress.topology.workers > 1:
                raise StateMismatchError(
                    f"the loader must be read in the topology for which its state was loaded, {progress.topology}, got "
                    f"{topology}. Load the state in the processes that read (torchdata's StatefulDataLoader does)"
                )
            self._begun = self._fixed_order.repartitioned(self._begun, topology, first=0)
        self._share = WorkerShare(self._plan, self._begun, self._identity.turn(self._begun.progress.first))
        self._want()
        return self._share

    def _want(self) -> None:
        """Set the shares of the sources at the present position, for comparison with the counts, if they change."""
        latest = self._share.latest() if self._wants_change and self._share is not None else None
        if latest is not None:
            shard, saved = latest
            order = self._begun.endless_order
            self._counts.set_shares(
                wanted_shares(self.source, shard, saved, None if order is None else order.position_of(shard))
            )

    def _make(self, samples: list[HeldSample]) -> tuple[Any, dict[Group, Row]]:
        """Return the batch of these samples, and its number of samples by source and key (empty without `counts`)."""
        assert self._share is not None
        values = [held.sample for held in samples]
        counted = {} if self._counts.counter is None else counted_samples(self._counts.counter, samples)
        if samples:
            make = partial(self._collate, values)
        else:
            make = partial(self._empty, self._share.template())
        batch = make() if self._collate_key is None else seeded(make, self._collate_key, *self._share.first_row())
        if self._keys is None:
            return batch, counted
        return with_keys(batch, self._keys, [held.key or "" for held in samples]), counted

    def _empty(self, sample: Any) -> Any:
        return without_rows(sample) if self._collate is _only else empty_batch(self._collate, sample)


class _Epoch:
    """Iterator over the batches of one epoch. It advances the position of its loader."""

    def __init__(self, loader: ShardLoader) -> None:
        self._loader = loader
        self._share: WorkerShare | None = loader._begin()

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        samples = self._next(read=True)
        batch, counted = self._loader._make(samples)
        if self._share is not None and self._share.imbalance is not None and counted:
            note_imbalance(counted, self._share.imbalance)
        self._loader._counts.handed_out(counted)
        self._loader._want()
        self._done()
        return batch

    def skip_batch(self) -> None:
        """Advance the loader's position by one batch, without making the batch."""
        self._next(read=False)
        if self._share is not None and self._loader._counts.tally is not None:
            self._loader._counts.handed_out(skipped_rows({"": self._share.rows}))
        self._done()

    def _next(self, *, read: bool) -> list[HeldSample]:
        loader = self._loader
        while self._share is not None and self._share is loader._share:
            samples = self._share.next(read=read)
            if samples is not None:
                return samples
            if not loader._identity.alone(loader._identity.turn()):
                break  # other workers count epochs, too: they learn from the next iter() that this epoch has ended
            resumed = self._share.begun_at_end
            loader._move_to_epoch(loader._begun.progress.epoch + 1)
            if not resumed:
                break
            # The state at an epoch's end must also serve as the state at the next epoch's beginning, because a caller
            # may have only this state.
            loader._at_position, self._share = False, loader._begin()
        else:
            self._share = None
        raise StopIteration

    def _done(self) -> None:
        assert self._share is not None
        self._share.done()


def _only(samples: list[Any]) -> Any:
    (sample,) = samples
    return sample
