"""Loader of batches from a source in logical shards, with a position that can be saved and moved to any topology."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, get_args

from penstock.data.arguments import at_least_one, one_of, whole
from penstock.data.loading.collating import checked_collate, empty_batch, may_draw, name_rows, without_rows
from penstock.data.loading.counting import Counts, LoaderCounts, skipped_rows
from penstock.data.loading.keyed_random import seeded
from penstock.data.loading.loader import Loader
from penstock.data.loading.restore_keys import with_keys
from penstock.data.loading.worker_identity import WorkerIdentity, global_batch
from penstock.data.ordering.balance import Balance, Imbalance
from penstock.data.ordering.order_states import (
    NUMBER_LIMIT,
    OrderProgress,
    Topology,
    check_format,
    differences,
    others_of,
    progress_of,
)
from penstock.data.ordering.partition import APART, Partition
from penstock.data.sharded.layers.layer import is_keyed, leaves_out
from penstock.data.sharded.layers.packed_rows import collate_packed
from penstock.data.sharded.layers.restart import LayersRestart
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
    refuse_to_import,
    stages_of,
    still_to_come,
    try_sources,
    with_all_changes,
)
from penstock.data.sharded.protocol import ShardedSource
from penstock.data.sharded.row_balance import RowBalance
from penstock.data.sharded.sample_counts import changes_shares, counted_samples, wanted_shares
from penstock.data.sharded.shard_cursors import CursorStates, HeldSample
from penstock.data.sharded.shard_keys import KeyStage, digest_of
from penstock.data.sharded.shard_orders import Tail
from penstock.data.sharded.shard_states import (
    KIND,
    FixedOrder,
    ShardedPosition,
    check_order,
    check_source,
    described,
)
from penstock.data.sharded.worker_share import SharePlan, WorkerShare
from penstock.proto.errors import InvalidArgumentError, StateMismatchError
from penstock.proto.state.counts import Group, Row, note_imbalance
from penstock.proto.state.generators import derive_seed
from penstock.worker.batch.building import collate

_log = logging.getLogger(__name__)

Layers = Literal["keep", "restart"]
SHOWN = 10


class ShardLoader(Loader):
    """Loader of batches from a source in logical shards, in an order that does not depend on boxes and workers.

    Example::

        def input_fn():
            shards = LogicalShards([LineFile(path) for path in sorted(glob("/data/*.jsonl"))], shards=240)
            return ShardLoader(Repeated(shards), batch_size=32, partitions=8)

    It works inside and outside of an input_fn as a MapLoader does; in worker processes of a torch DataLoader,
    torchdata's StatefulDataLoader saves the state.

    One iteration is one epoch, or the rest of it after a loaded state. docs/sharded.md describes the orders of finite
    and of endless sources.
    """

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
            batch_size, global_batch_size, keys, counts, rank: as in MapLoader.
            partitions: for an endless source: number of parts, a divisor of the number of its shards, into which these
                are divided. A batch's rows are taken from the parts round robin. Give the most boxes that you will use.
            block: for an endless source: number of consecutive samples from one column of its shards (one shard of each
                partition). If an optimizer's step takes several batches, give the rows of all boxes in a step. None:
                the block of the loaded state, or the global batch with which the run begins.
            tail: treatment of the incomplete last batch of a finite source: "emit" it, "pad" it with samples of the
                epoch's beginning, or "drop" it.
            seed: seed of all randomness in the source; None: the run's seed (0 outside a worker).
            balance: distribution of a step's rows to the boxes by cost, see Balance; None: round robin. The source must
                be LogicalShards of indexable pieces, or Mapped or Repeated over it; costs are given by record, in the
                order of the pieces. A box then also reads shards of other boxes' partitions.
            collate_fn: function from a list of samples to a batch. The global random generators of python, numpy and
                torch are seeded for it from `seed` and the position of the batch's first row, and restored afterwards,
                except for torch's default_collate, the default function and `collate_packed`, which draw nothing.
            unbatched: True if the source's samples are batches already: a box gets one at each step, unchanged. Leave
                out the batch size. If fewer batches than boxes are left at the end, tail="emit" gives the other boxes a
                batch without rows.
        """
        identity = WorkerIdentity.now(rank)
        batch = global_batch(batch_size, global_batch_size, identity.boxes, unbatched=unbatched)
        super().__init__("ShardLoader", identity, batch, keys, LoaderCounts(counts, skips=leaves_out(source)), balance)
        self._code = source
        self._changes: list[MixtureChange] = []
        """Ordered by an operator. `_present`: now in force; `_history`: for saved states; `_assigned`: as sent."""
        self._present: list[MixtureChange] = []
        self._history: list[MixtureChange] = []
        self._assigned: list[MixtureChange] = []
        self._load_source: LoadSource = refuse_to_import
        partitions, seed = at_least_one("partitions", partitions), whole("seed", seed)
        block = None if block is None else at_least_one("block", block)
        self._partitions, self._block, self._asked_tail = partitions, block, tail
        self._tail: Tail = APART if unbatched and tail == "emit" else tail
        self._collate = _only if unbatched else checked_collate(collate_fn)
        self._seed = identity.seed if seed is None else seed
        self._own_collate = may_draw(collate_fn)
        draws = not unbatched and collate_fn is not collate_packed and may_draw(collate_fn)
        self._collate_key = derive_seed(self._seed, "collate") if draws else None
        self._warned = False
        self._read(source)

    def _read(self, source: ShardedSource) -> None:
        partitions, block, tail, identity = self._partitions, self._block, self._asked_tail, self._identity
        check_source(source, partitions, block, tail)
        self.source = source
        self._described = {
            "source": described(source),
            "shards": source.num_shards,
            "endless": source.endless,
            "seed": self._seed,
            "partitions": partitions if source.endless else None,
            "tail": None if source.endless else tail,
        }
        self._fixed_order = FixedOrder(source, partitions, self._tail, block)
        stages = stages_of(self._code, self._present, self._load_source, self._described)
        balance = None if self._balance is None else RowBalance(self._balance, source)
        self._plan = SharePlan(
            self._fixed_order, self._seed, identity.box, stages, self._key_field is not None, balance
        )
        self._begun = ShardedPosition(
            OrderProgress(0, 0, 0, self._topology()),
            endless_order=self._fixed_order.endless_order(block or self._batch),
        )
        """Where the present epoch began, or the next iteration will begin."""
        self._at_position = True
        self._share: WorkerShare | None = None
        """Batches of the epoch begun last; None if the position was set since, which ends other iterators."""
        lengths = None if source.endless else source.lengths(0)
        self._counts.set_shares(wanted_shares(source))
        counts = self._counts.tally is not None  # counting needs the samples between two states
        self._wants_change = counts and changes_shares(source)
        self._promise(
            draws_nothing=is_keyed(source), advances=balance is None and (source.endless or lengths is not None)
        )
        if lengths is not None:
            self._plan.check_length(0, sum(map(int, lengths)), self._batch, identity.boxes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self.source!r}: {self._batch} samples in a global batch>"

    def __len__(self) -> int:
        """Return the number of batches that this process makes in a whole epoch. Raises TypeError if it is unknown."""
        lengths = None if self.source.endless else self.source.lengths(self._begun.progress.epoch)
        if lengths is None:
            why = "is endless" if self.source.endless else "does not report the lengths of its shards"
            raise TypeError(f"len() of a ShardLoader needs a finite source with known lengths, but the source {why}")
        partition = Partition(sum(map(int, lengths)), 0, self._batch, self._identity.boxes, self._tail)
        return self._identity.turn().done(partition.batches)

    def __iter__(self) -> Iterator[Any]:
        if not self._at_position:
            if self.source.endless and not self._warned:
                self._warned = True
                _log.warning(
                    "a second epoch of an endless source begins, which reads the source from its beginning in another "
                    "order, because the first epoch was abandoned. To continue with the next batch, keep the "
                    "iterator, or load the loader's state_dict()"
                )
            self._go_to_epoch(self._begun.progress.epoch + 1)
        self._at_position = False
        return _Epoch(self)

    def _epoch_number(self) -> int:
        return self._begun.progress.epoch

    def config(self) -> dict[str, Any]:
        endless_order = self._begun.endless_order
        block = None if endless_order is None else endless_order.block
        return {**super().config(), "kind": "ShardLoader", "block": block}

    def _imbalance(self, steps: int) -> Imbalance:
        whole = self._fixed_order.repartitioned(self._begun, self._topology(), first=0)
        return self._plan.imbalance(whole, steps)

    def restore_sample(self, key: str) -> Any:
        """Read the sample of a row again. `key`: the row's restore key, from the batch's field `keys`. Raises
        StateMismatchError for a key of other data or another order, InvalidArgumentError or StateCorruptError for one
        that is no key or damaged, DatasetError if the shard ends before the sample."""
        return self._plan.restored(key, self._stages)

    # ---- states

    def _saved(self) -> dict[str, Any]:
        return self._state_of(self._begun if self._share is None else self._share.position())

    def _state_of(self, position: ShardedPosition) -> dict[str, Any]:
        return {**position.state(self._described), **self._listed()}

    def _listed(self) -> dict[str, Any]:
        return {CHANGES: [change.plain() for change in self._history]} if self._history else {}

    def _is_whole(self, topology: Topology) -> bool:
        return topology.boxes == topology.workers == 1  # workers of other boxes may know the ends of other shards

    def _own_position(self, state: Mapping[str, Any], *, strict: bool) -> ShardedPosition:
        position, topology = self._fixed_order.read(state), self._topology()
        if position.progress.topology == topology:
            return position
        return self._fixed_order.repartitioned(position, topology, first=0)

    def load_state_dict(self, state_dict: Any, strict: bool = True, layers: Layers = "keep") -> None:
        """As every Loader. `layers`: "restart" if the layers over the documents are others than in the saved run: the
        position in the documents stays, and the layers begin anew. No document is lost. One of which a part was
        yielded is read again from its beginning; the state lists these in "cut", as (shard, index in the shard). Only
        from a state of all workers; StateMismatchError if the data differ, or the old layers are needed."""
        super().load_state_dict(self._with_layers(state_dict, layers, own=False), strict)

    def deaggregate_state_dict(self, aggregated: Any, strict: bool = True, layers: Layers = "keep") -> dict[str, Any]:
        """As every Loader. `layers`: as in `load_state_dict`."""
        return super().deaggregate_state_dict(self._with_layers(aggregated, layers, own=True), strict)

    def _with_layers(self, state: Any, layers: Layers, *, own: bool) -> Any:
        """Return a state for the present layers. `own`: of this worker's shards only."""
        one_of("layers", layers, get_args(Layers))
        if layers == "keep":
            return state
        check_format(state, *KIND)
        until = self._adopt(state) if self._assigned or CHANGES in state else None
        order = self._with_later_weights(state, until)["order"]
        now = {**state, "order": {**order, "source": self._described["source"]}}
        check_order(now, self._described, strict=True)
        if not differences(order.get("source"), self._described["source"]):
            return state
        topology = progress_of(now).topology
        if others_of(state, {}) or not ("others" in state or self._is_whole(topology)):
            raise StateMismatchError(
                "layers='restart' needs a state of all workers at one step. Take DataLoader.state_dict(), from another "
                "step if this one is at an epoch's end"
            )
        restart = LayersRestart(order.get("source", {}), self.source)
        position, counts = self._fixed_order.before_restart(now, restart)
        opening, endless_order = self._plan.opening(position.progress.epoch), position.endless_order
        needed = self._part(now, strict=True).cursors if own and endless_order is not None else position.cursors
        cursors, cut = CursorStates(), list[tuple[int, int | None]]()
        for shard, count in enumerate(counts.tolist()):
            if not count or (shard in position.cursors and shard not in needed):
                continue
            if shard in position.ended:
                cursors[shard] = count, restart.anew(count, None)
                continue
            position_of = None if endless_order is None else endless_order.position_of(shard)
            index, saved = position.cursors.get(shard, (0, None))
            place = restart.place((shard, *opening), index, saved, count, position_of)
            cursors[shard] = count, place.saved
            cut += [(shard, number) for number in place.cut]
        if cut:
            _log.warning(
                "the layers begin anew: %d documents of which a part was yielded are read again; as (shard, index in "
                "it), and all in the state's entry 'cut': %s",
                len(cut),
                cut[:SHOWN],
            )
        position = replace(position, cursors=cursors, cut=tuple(cut))
        return {**now, **position.state(now["order"])}

    def _aggregated(self, states: list[Any]) -> dict[str, Any]:
        known = self._with_all_changes(states)
        whole = self._fixed_order.aggregated(known)
        return {**whole, CHANGES: known[0][CHANGES]} if CHANGES in known[0] else whole

    def _with_all_changes(self, states: Sequence[Any]) -> Sequence[Any]:
        if not any(CHANGES in state for state in states if isinstance(state, Mapping)):
            return states
        taken = []
        for number, state in enumerate(states):
            progress = self._fixed_order.read(state).progress
            own = progress.turn(number % progress.topology.workers)
            taken.append(self._fixed_order.taken(state, lambda first, own=own: own))  # type: ignore[misc]
        return with_all_changes(states, taken)

    def _check_order(self, state: Any, *, strict: bool) -> None:
        check_format(state, *KIND)
        until = self._adopt(state) if self._assigned or CHANGES in state else None
        check_order(self._with_later_weights(state, until), self._described, strict=strict)

    def _with_later_weights(self, state: Any, until: int | None = None) -> Mapping[str, Any]:
        return self._fixed_order.with_later_weights(state, self._described, self._identity.turn, until)

    def _stages(self, epoch: int) -> Sequence[KeyStage]:
        changes = in_epoch(self._changes, epoch)
        if changes == self._present:
            return self._plan.stages
        return stages_of(self._code, changes, self._load_source, self._described)

    # ---- weights that an operator changes during a run (penstock mix)

    def change_mixture(self, changes: Sequence[Mapping[str, Any]], load: LoadSource) -> None:
        """Apply weights that an operator changed (`MixtureChange.plain`), before a state is loaded. `load`: from
        "module:function" to the user's source. Raises InvalidArgumentError if they do not fit the uppermost mixture."""
        self._assigned, self._load_source = listed({CHANGES: changes}), cache(load)
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
        """Try a change of the mixture's weights that an operator orders; the loader cannot be used afterwards. Return
        the digest of the order with it; the (epoch, position) at which it begins; by source the new weights as whole
        numbers, the shares before and after; and the functions of all sources that the code lacks, because a later
        launch of the job may not apply the changes that added them. Raises InvalidArgumentError or StateMismatchError
        for an impossible change.

        steps: global batches to the change, from `state` or, with `epochs` (begun since `state`), from this epoch's
        beginning. state: aggregated state from which the run began; None: the data's beginning. weights, added,
        retired: see `new_parts`.
        """
        mixture_of(self.source)  # raises an error if there is none
        epoch, begin = 0, 0
        if state is not None:
            self._check_order(state, strict=True)
            epoch, begin = self._fixed_order.reached(state, self._identity.turn)
        if epochs:
            epoch, begin = epoch + epochs, 0
            self._use(self._changes, epoch)
        position, before = begin + steps * self._batch, mixture_of(self.source)
        if position >= NUMBER_LIMIT:
            raise InvalidArgumentError(f"--from-step must name a step before sample {NUMBER_LIMIT}, got {position}")
        parts = new_parts(before, position, weights, added, retired)
        functions = {**{name: fn for one in self._changes for name, fn in one.added.items() if name in parts}, **added}
        at = replace(self._begun, progress=OrderProgress(epoch, position, 0, self._topology())).state(self._described)
        self._use([*self._changes, MixtureChange("", position, parts, functions, epoch=epoch)], epoch)
        check_order(self._with_later_weights({**at, "others": {}}), self._described, strict=True)
        beside = max(before.names, key=parts.__getitem__)
        self._try_sources([*([beside] if added and parts[beside] else []), *added])
        was, now = before.wanted_by_name(position), mixture_of(self.source).wanted_by_name(position)
        return digest_of(self._described), (epoch, position), parts, was, now, functions

    def _try_sources(self, names: Sequence[str]) -> None:
        """Make a batch from one sample of each named source, to find out whether they work."""
        samples = try_sources(self.source, names, self._seed)
        if self._counts.counter is not None:
            counted_samples(self._counts.counter, samples)
        if samples and self._collate is not _only:
            seeded(partial(self._collate, [held.sample for held in samples]), self._seed, 0)

    def _use(self, changes: list[MixtureChange], epoch: int) -> None:
        self._changes, present = changes, in_epoch(changes, epoch)
        if present != self._present:
            source, self._present = changed(self._code, present, self._load_source), present
            self._read(source)

    def _adopt(self, state: Mapping[str, Any]) -> int | None:
        """Apply the changes that a state lists, and those of the run that begin later; only the later ones if the
        user's code (in a Schedule) has the weights of all before. Return the position from which the state's
        description lacks a change, because it was advanced beyond one that it does not know; None if it lacks none."""
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
                if not differences(self._with_later_weights(state)["order"], self._described):
                    return None
        self._use(changes, reached[0])
        return until

    def _part(self, aggregated: Mapping[str, Any], *, strict: bool) -> ShardedPosition:
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
            return replace(
                part, cursors={shard: part.cursors[shard] for shard in own.tolist() if shard in part.cursors}
            )
        if moved and not self._plan.has_rows(part):
            return ShardedPosition(OrderProgress(progress.epoch + 1, 0, 0, progress.topology))
        return part

    def __getstate__(self) -> dict[str, Any]:
        """Without open shards. If an epoch was begun, the copy begins the next one."""
        if self._share is None:
            return self.__dict__.copy()
        return {**self.__dict__, "_begun": self._share.position(), "_share": None}

    # ---- epochs

    def _go_to(self, position: ShardedPosition) -> None:
        if self._share is not None:
            self._share.close()
            self._share = None
        self._begun, self._at_position = position, True

    def _go_to_epoch(self, epoch: int) -> None:
        endless_order = self._begun.endless_order
        self._use(self._changes, epoch)
        self._go_to(ShardedPosition(OrderProgress(epoch, 0, 0, self._topology()), endless_order=endless_order))

    def _begin(self) -> WorkerShare:
        """Return this worker's batches from the position on. A torch DataLoader's process has a copy made before it was
        known that several share the batches, so its position is adapted first."""
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
        """Set the present shares of the sources, for comparison with the counts, if they change."""
        latest = self._share.latest() if self._wants_change and self._share is not None else None
        if latest is not None:
            shard, saved = latest
            order = self._begun.endless_order
            self._counts.set_shares(
                wanted_shares(self.source, shard, saved, None if order is None else order.position_of(shard))
            )

    def _make(self, samples: list[HeldSample]) -> tuple[Any, dict[Group, Row]]:
        assert self._share is not None
        values = [held.sample for held in samples]
        counted = {} if self._counts.counter is None else counted_samples(self._counts.counter, samples)
        if samples:
            make = partial(self._collated, values, self._share)
        else:
            make = partial(self._empty, self._share.template())
        batch = make() if self._collate_key is None else seeded(make, self._collate_key, *self._share.first_row())
        if self._key_field is None:
            return batch, counted
        return with_keys(batch, self._key_field, [held.key or "" for held in samples]), counted

    def _collated(self, samples: list[Any], share: WorkerShare) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            epoch, shard, index = share.first_row()
            rows = f"{len(samples)} samples, of which the first is sample {index} of shard {shard} (epoch {epoch})"
            place = "sample {} of a batch of {}".format
            name_rows(error, samples, rows, lambda at: place(at, rows), own_collate=self._own_collate)
            raise

    def _empty(self, sample: Any) -> Any:
        return without_rows(sample) if self._collate is _only else empty_batch(self._collate, sample)


class _Epoch(Iterator[Any]):
    def __init__(self, loader: ShardLoader) -> None:
        self._loader = loader
        self._share: WorkerShare | None = loader._begin()

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
            loader._go_to_epoch(loader._begun.progress.epoch + 1)
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
