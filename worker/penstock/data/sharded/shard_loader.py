"""Batches of a source in logical shards, with a position that can be saved and moved to any topology."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np
import torch.utils.data

from penstock.data.arguments import at_least_one, one_of, whole
from penstock.data.loading.collating import checked_collate, empty_batch, without_rows
from penstock.data.loading.keyed_random import seed_generators, seeds_of
from penstock.data.loading.restore_keys import checked_name, with_keys
from penstock.data.loading.worker_identity import WorkerIdentity, global_batch
from penstock.data.ordering.order_states import OrderProgress, Topology
from penstock.data.ordering.partition import APART, Partition
from penstock.data.sharded.layers.layer import checked, is_keyed
from penstock.data.sharded.protocol import ShardedSource
from penstock.data.sharded.round_robin import Tail
from penstock.data.sharded.shard_keys import SampleKey, digest_of
from penstock.data.sharded.shard_states import FixedOrder, ShardedPosition, check_order
from penstock.data.sharded.worker_share import SharePlan, WorkerShare
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateMismatchError
from penstock.proto.state.generators import capture_rng, derive_seed, restore_rng
from penstock.worker.batch.building import collate

__all__ = ["ShardLoader"]

_log = logging.getLogger(__name__)


class ShardLoader(torch.utils.data.IterableDataset[Any]):
    """Batches of a source in logical shards, in an order that does not depend on who makes them.

    Inside an input_fn it makes this worker's share, and follows RestartableDataLoader: it resumes on any number of
    boxes and workers. In a plain torch DataLoader (`DataLoader(loader, batch_size=None, num_workers=4)`) the worker
    processes share the batches, and the order is the same again; torchdata's StatefulDataLoader saves it there. By
    itself it yields all batches of this rank (RANK and WORLD_SIZE, if they are set).

    A finite source is read round robin over its shards, sample 0 of each, then sample 1, and so on; an epoch is an
    epoch, or what is left of it behind a loaded state. Every worker goes along the whole stream and skips what is not
    its own.

    An endless source has one epoch without an end, in which a worker reads only its own shards where the number of
    boxes divides `partitions` and the global batch, and the number of workers divides the shards of a partition. Its
    order is that of `block` and of no batch size, so it stays when batches are halved and accumulated. An epoch that
    is begun after it, by leaving it or by set_epoch, is another order of the same source, from the beginning.
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
        rank: tuple[int, int] | None = None,
        collate_fn: Callable[[list[Any]], Any] = collate,
        unbatched: bool = False,
    ) -> None:
        """
        Args:
            batch_size: rows of a box's batch; the global batch grows with the number of boxes.
            global_batch_size: rows of all boxes' batches together; give one of the two. Boxes share them as evenly as
                can be, and no box goes without.
            seed: of all randomness in the source; None takes the run's (0 outside a worker).
            partitions: of an endless source: parts of its shards, from which a batch's rows are taken in turn. The
                number of shards must be a multiple of it. Choose the largest number of boxes.
            block: of an endless source: samples in a row that come from one column of its shards. The order depends on
                it, and not on the batch size: give the rows of all boxes in an optimizer's step where that takes
                several batches. None: as the loaded state says, or the global batch with which the run begins.
            tail: of a finite source's last batch that is not full: "emit" it, "pad" it with samples of the epoch's
                beginning, or "drop" it.
            keys: name under which each batch carries the restore keys of its rows, a list of str: a further field of a
                batch that is a dict; another batch comes as {"batch": the batch, keys: the list}.
            rank: (this one, how many) data-parallel ranks share each global batch; None: the worker's box among all
                boxes, or outside of a worker RANK and WORLD_SIZE. Replicas, as with tensor parallelism, give the same.
            collate_fn: list of samples -> batch. One of yours may draw from the global generators of python, numpy and
                torch: they are set before each batch, from the seed and the place of the batch's first row, and
                afterwards they are as they were.
            unbatched: the source's samples are batches already: a box gets one at each step, as it is. Give no batch
                size. Where the last ones are fewer than the boxes, "emit" gives the others one without rows.

        Raises InvalidArgumentError or DatasetError for settings that cannot be meant.
        """
        super().__init__()
        self._identity = identity = WorkerIdentity.now(rank)
        partitions, seed = at_least_one("partitions", partitions), whole("seed", seed)
        block = None if block is None else at_least_one("block", block)
        self._batch = _batch(batch_size, global_batch_size, identity.boxes, unbatched)
        _check(source, partitions, block, tail)
        self._tail: Tail = APART if unbatched and tail == "emit" else tail
        self.source, self._collate = source, _only if unbatched else checked_collate(collate_fn)
        self._keys = checked_name(keys)
        self._seed = identity.seed if seed is None else seed
        draws = not unbatched and collate_fn is not collate
        self._collate_key = derive_seed(self._seed, "collate") if draws else None
        self._order: dict[str, Any] = {
            "source": _described(source),
            "shards": source.num_shards,
            "endless": source.endless,
            "seed": self._seed,
            "partitions": partitions if source.endless else None,
            "tail": None if source.endless else tail,
        }
        self._fixed_order = FixedOrder(source, partitions, self._tail, block)
        self._plan = SharePlan(self._fixed_order, self._seed, identity.box, digest_of(self._order), keys is not None)
        self._begun = ShardedPosition(
            OrderProgress(0, 0, 0, self._topology()),
            endless_order=self._fixed_order.endless_order(block or self._batch),
        )
        """Where the epoch began, or will."""
        self._stands = True
        """The next epoch begins where the loader stands; else in the next epoch."""
        self._told_again = False
        """The log says what an epoch behind an endless one is."""
        self._share: WorkerShare | None = None
        """Of the epoch that goes on; an iterator of an earlier one yields nothing more."""
        lengths = None if source.endless else source.lengths(0)
        if not is_keyed(self._order["source"]) or (lengths is None and not source.endless):
            self.advance_state = None  # type: ignore[method-assign, assignment]
        if lengths is not None:
            self._plan.check_length(0, sum(map(int, lengths)), self._batch, identity.boxes)

    def __len__(self) -> int:
        """Batches of a whole epoch that this process makes. Raises TypeError where that is not known."""
        lengths = None if self.source.endless else self.source.lengths(self._begun.progress.epoch)
        if lengths is None:
            why = "is endless" if self.source.endless else "does not know the lengths of its shards beforehand"
            raise TypeError(f"a ShardLoader has no len() where its source {why}")
        partition = Partition(sum(map(int, lengths)), 0, self._batch, self._identity.boxes, self._tail)
        return self._identity.turn().done(partition.batches)

    def __iter__(self) -> Iterator[Any]:
        """The next epoch, or the rest of the one that a loaded state is in."""
        if not self._stands:
            if self.source.endless and not self._told_again:
                self._told_again = True
                _log.warning(
                    "a ShardLoader's pass over an endless source was left, and another one begins: all of the source "
                    "again, in another order. To go on with the next batch, keep the iterator, or load its state_dict()"
                )
            self._go_to_epoch(self._begun.progress.epoch + 1)
        self._stands = False
        return _Epoch(self)

    def set_epoch(self, epoch: int) -> None:
        """The next epoch is this epoch, from its beginning; or from where a loaded state stands in it."""
        number = whole("epoch", epoch)
        if number is None or number < 0:
            raise InvalidArgumentError(f"epoch={epoch}: the first one is 0")
        epoch = number
        if not self._stands or epoch != self._begun.progress.epoch:
            self._go_to_epoch(epoch)

    def config(self) -> dict[str, Any]:
        """What decides which sample is where in the order, as values of JSON: a state with another one is refused."""
        endless_order = self._begun.endless_order
        return {
            "kind": "ShardLoader",
            **copy.deepcopy(self._order),
            "block": None if endless_order is None else endless_order.block,
        }

    def can_restore_sample(self) -> bool:
        """Any sample can be had again by its key; of functions that draw from the process's generators, not what they
        drew."""
        return True

    def restore_sample(self, key: str) -> Any:
        """The sample that had this restore key, read again.

        Raises:
            StateMismatchError: the key is of other data, or another order of them.
            InvalidArgumentError, StateCorruptError: it is no key, or damaged.
            DatasetError: there is no such sample.
        """
        found = SampleKey.of(key)
        if found.order != self._plan.order:
            raise StateMismatchError(
                f"the restore key is of a sample in the order {found.order}, and this loader's is {self._plan.order}: "
                "the source, its settings, seed, shards or partitions are not those that it was made with"
            )
        if found.shard >= self.source.num_shards or (found.block is None) == self.source.endless:
            raise InvalidArgumentError(f"restore key {key!r:.200} names no sample of this source")
        endless_order = None if found.block is None else self._fixed_order.endless_order(found.block)
        place = None if endless_order is None else endless_order.place(found.shard)
        epoch, seed = self._plan.opening(found.epoch)
        cursor = self.source.open(found.shard, epoch, seed, found.token, place)
        try:
            cursor.skip(found.index - found.at)
            return next(cursor)
        except StopIteration:
            raise DatasetError(
                f"shard {found.shard} of epoch {found.epoch} ends before sample {found.index}, which a restore key "
                "names. Were the data changed?"
            ) from None
        finally:
            cursor.close()

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        """This worker's place, after the batches that it has yielded so far."""
        position = self._begun if self._share is None else self._share.position()
        return position.state(self._order)

    @staticmethod
    def advance_state(state_dict: dict[str, Any], batches: int) -> dict[str, Any]:
        """A worker's state after so many more of its batches of the same epoch: the shards' marks stay where they are,
        and what lies between is passed over after a resume. None of the user's code runs for it.

        Only where the place is a number (the source is endless, or knows its lengths) and nothing draws from the
        process's generators, which a step between two snapshots would have to have: else a loader's own is None."""
        return {**state_dict, "done": OrderProgress.parsed(state_dict).done + batches}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Go to a place of this order: a state of this very topology, or one that fits any, as an only worker's does.

        Raises:
            StateMismatchError: it is a place in another order, or of one of several workers of another topology.
            StateCorruptError, StateVersionError: it cannot be read.
        """
        check_order(state_dict, self._order, strict=strict)
        if "others" in state_dict:
            position = self._part(state_dict)
        else:
            position, topology = self._fixed_order.read(state_dict), self._topology()
            before = position.progress
            if before.done and before.topology != topology:
                if (
                    not before.topology.boxes == before.topology.workers == 1
                ):  # other boxes know the ends of other shards
                    raise StateMismatchError(
                        f"the state is one worker's of {before.topology}, and this is one of {topology}; a state of "
                        "aggregate_state_dict fits any topology"
                    )
                position = self._part(state_dict)
            elif before.topology != topology:
                position = self._fixed_order.repartitioned(position, topology, first=0)
        self._go(position)

    def aggregate_state_dict(self, worker_states: list[Any]) -> dict[str, Any]:
        """One state from those of all workers, in order of global_worker_id; it fits any topology."""
        return self._fixed_order.aggregated(worker_states)

    def deaggregate_state_dict(self, aggregated: Any, strict: bool = True) -> dict[str, Any]:
        """This worker's part."""
        check_order(aggregated, self._order, strict=strict)
        if "others" not in aggregated:
            raise StateMismatchError(
                "this is the state of one worker; deaggregate_state_dict takes what aggregate_state_dict returned"
            )
        return self._part(aggregated).state(self._order)

    def _part(self, aggregated: Mapping[str, Any]) -> ShardedPosition:
        identity = self._identity
        part, moved = self._fixed_order.part(aggregated, identity.number, identity.all_workers, self._topology())
        progress = part.progress
        if part.endless_order is not None:
            turn, batch = identity.turn(progress.first), progress.topology.batch
            own = part.endless_order.own(
                progress.start + turn.number * batch, batch, turn.of, identity.box, identity.boxes
            )
            return replace(part, marks=part.marks.among(set(own.tolist())))
        if moved and not self._plan.has_rows(part):
            return ShardedPosition(OrderProgress(progress.epoch + 1, 0, 0, progress.topology))
        return part

    def __getstate__(self) -> dict[str, Any]:
        """Its place goes along to another process, what it has open does not: the next epoch there is the next one."""
        if self._share is None:
            return self.__dict__.copy()
        return {**self.__dict__, "_begun": self._share.position(), "_share": None}

    # ---- passes

    def _topology(self) -> Topology:
        return Topology(self._identity.boxes, self._identity.turn().of, self._batch)

    def _go(self, position: ShardedPosition) -> None:
        """The next epoch begins there."""
        if self._share is not None:
            self._share.close()
            self._share = None
        self._begun, self._stands = position, True

    def _go_to_epoch(self, epoch: int) -> None:
        self._go(ShardedPosition(OrderProgress(epoch, 0, 0, self._topology()), endless_order=self._begun.endless_order))

    def _begin(self) -> WorkerShare:
        """Open the epoch that the loader stands before. Only here it is known among how many worker processes of a
        torch
        DataLoader: in those the loader is a copy of one that was made, and maybe loaded, outside of them."""
        progress, topology = self._begun.progress, self._topology()
        if progress.topology != topology:
            if progress.done and progress.topology.workers > 1:
                raise StateMismatchError(
                    f"the loader stands at a place of {progress.topology}, and is read by {topology}: load the state in the "
                    "processes that read (torchdata's StatefulDataLoader does)"
                )
            self._begun = self._fixed_order.repartitioned(self._begun, topology, first=0)
        self._share = WorkerShare(self._plan, self._begun, self._identity.turn(self._begun.progress.first))
        return self._share

    def _make(self, samples: list[tuple[Any, str | None]]) -> Any:
        assert self._share is not None
        if samples:
            make = partial(self._collate, [sample for sample, _ in samples])
        else:
            make = partial(self._empty, self._share.template())
        batch = make() if self._collate_key is None else self._keyed(make, self._collate_key, *self._share.place())
        if self._keys is None:
            return batch
        return with_keys(batch, self._keys, [key or "" for _, key in samples])

    @staticmethod
    def _keyed(make: Callable[[], Any], key: int, *place: int) -> Any:
        """What it makes with generators of this place, so that it depends on nothing that was drawn before."""
        before = capture_rng()
        try:
            seed_generators(seeds_of(key, np.array([place[0]]), *place[1:])[0])
            return make()
        finally:
            restore_rng(before)

    def _empty(self, sample: Any) -> Any:
        return without_rows(sample) if self._collate is _only else empty_batch(self._collate, sample)


class _Epoch:
    """The iterator of an epoch."""

    def __init__(self, loader: ShardLoader) -> None:
        self._loader = loader
        self._share: WorkerShare | None = loader._begin()

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        samples = self._next(read=True)
        batch = self._loader._make(samples)
        self._done()
        return batch

    def skip_batch(self) -> None:
        """Pass over the next batch without making it."""
        self._next(read=False)
        self._done()

    def _next(self, *, read: bool) -> list[tuple[Any, str | None]]:
        loader = self._loader
        while self._share is not None and self._share is loader._share:
            samples = self._share.next(read=read)
            if samples is not None:
                return samples
            if not loader._identity.alone(loader._identity.turn()):
                break  # others keep count of epochs, and find out by the next iter() that this one is over
            resumed = self._share.begun_at_end
            loader._go_to_epoch(loader._begun.progress.epoch + 1)
            if not resumed:
                break
            # The state of an epoch's end is the next one's beginning, for somebody who holds nothing but the state.
            loader._stands, self._share = False, loader._begin()
        else:
            self._share = None
        raise StopIteration

    def _done(self) -> None:
        assert self._share is not None
        self._share.done()


def _batch(batch_size: int | None, global_batch_size: int | None, boxes: int, unbatched: bool) -> int:
    """Rows of all boxes' batches together."""
    if not unbatched:
        return global_batch(whole("batch_size", batch_size), whole("global_batch_size", global_batch_size), boxes)
    if batch_size is not None or global_batch_size is not None:
        raise InvalidArgumentError("unbatched=True: the source's samples are the batches; give no batch size")
    return boxes


def _only(samples: list[Any]) -> Any:
    (sample,) = samples
    return sample


def _described(source: ShardedSource) -> Any:
    """Raises InvalidArgumentError if it is no value of JSON: it might be another text in each process, or other than
    itself once it was saved."""
    described = source.described()
    try:
        json.dumps(described, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"described() of {type(source).__name__} is no value of JSON: {error}") from None
    return described


def _check(source: ShardedSource, partitions: int, block: int | None, tail: str) -> None:
    shards = checked(source, "ShardLoader").num_shards
    one_of("tail", tail, [name for name in get_args(Tail) if name != APART])
    if shards < 1:
        raise InvalidArgumentError(f"a source of {shards} shards: it needs at least one")
    if not source.endless and partitions != 1:
        raise InvalidArgumentError(
            f"partitions={partitions} with a finite source: its shards are read round robin, all together. Wrap it in "
            "Repeated to read it without an end, or leave partitions out"
        )
    if not source.endless and block is not None:
        raise InvalidArgumentError(
            f"block={block} with a finite source: its order depends on no batch size anyway; leave block out"
        )
    if shards % partitions:
        raise InvalidArgumentError(f"partitions={partitions} with {shards} shards: it must divide them")
