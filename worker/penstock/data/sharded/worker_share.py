from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.data.ordering.balance import Imbalance
from penstock.data.ordering.order_states import OrderProgress
from penstock.data.ordering.partition import Partition, WorkerTurn
from penstock.data.sharded.epoch_stream import EpochStream, Rows
from penstock.data.sharded.layers.left_out import opened
from penstock.data.sharded.protocol import SavedPosition
from penstock.data.sharded.row_balance import RowBalance
from penstock.data.sharded.shard_cursors import HeldSample, ShardReaders
from penstock.data.sharded.shard_keys import KeyStage, SampleKey, as_made_before
from penstock.data.sharded.shard_states import FixedOrder, ShardedPosition
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateMismatchError
from penstock.proto.state.generators import derive_seed


@dataclass(frozen=True)
class SharePlan:
    """Settings of a worker's share, the same in all epochs with the same changes of weights."""

    fixed_order: FixedOrder
    seed: int
    box: int
    stages: Sequence[KeyStage]
    """Stages of the present epoch: one, unless weights were changed by `penstock mix`."""
    keys: bool
    balance: RowBalance | None

    def opening(self, epoch: int) -> tuple[int, int]:
        """Return the (epoch, seed) to open the source with: if endless, always epoch 0, with another seed for each."""
        if not self.fixed_order.source.endless:
            return epoch, self.seed
        return 0, derive_seed(self.seed, "pass", epoch) if epoch else self.seed

    def readers(self, position: ShardedPosition) -> ShardReaders:
        epoch, endless_order, alone = position.progress.epoch, position.endless_order, position.cut is None
        key: Callable[[int, int, SavedPosition], str] | None = None
        if self.keys:

            def key(shard: int, index: int, saved: SavedPosition) -> str:
                block, stage = None if endless_order is None else endless_order.block, self.stages[0]
                if len(self.stages) > 1 and endless_order is not None:
                    position = endless_order.position_of(shard)(index)
                    stage = [stage for stage in self.stages if stage.position <= position][-1]
                    saved = as_made_before(saved, stage)
                return SampleKey.text(epoch, shard, index, stage.order, saved, block, alone=alone)

        position_of = None if endless_order is None else endless_order.position_of
        return ShardReaders(
            self.fixed_order.source, *self.opening(epoch), position.cursors, position_of=position_of, key=key
        )

    def stream(self, position: ShardedPosition, readers: ShardReaders) -> EpochStream:
        return EpochStream(self.fixed_order, position, readers, self.box)

    def endless_rows(self, position: ShardedPosition, number: int, first: int, every: int) -> Rows:
        """Return row `first` of an endless source's batch, and each `every`-th row after it."""
        assert position.endless_order is not None
        batch = position.progress.topology.batch
        begin = position.progress.start + number * batch
        shards, indices = position.endless_order.at(np.arange(begin + first, begin + batch, every))
        return [(shard, index, False) for shard, index in zip(shards.tolist(), indices.tolist(), strict=True)]

    def all_rows(self, position: ShardedPosition, stream: EpochStream | None, number: int) -> Rows | None:
        """Return the rows of all boxes in a batch, by position; None after the last. `stream`: None if endless."""
        return self.endless_rows(position, number, 0, 1) if stream is None else stream.all_rows(number)

    def imbalance(self, position: ShardedPosition, steps: int) -> Imbalance:
        assert self.balance is not None
        progress, readers, found = position.progress, self.readers(position), list[tuple[float, float]]()
        stream = None if position.endless_order is not None else self.stream(position, readers)
        for number in range(steps):
            rows = self.all_rows(position, stream, number)
            if rows is None:
                break
            step = progress.start // progress.topology.batch + number
            found.append(self.balance.ratios(self.opening(progress.epoch), rows, progress.topology.boxes, step))
        readers.close()
        plain, balanced = np.mean(found, axis=0) if found else (1.0, 1.0)
        return Imbalance(float(plain), float(balanced))

    def restored(self, key: str, stages_of: Callable[[int], Sequence[KeyStage]]) -> Any:
        found, source = SampleKey.of(key), self.fixed_order.source
        stages = {stage.order: stage for stage in stages_of(found.epoch)}
        if found.order not in stages:
            raise StateMismatchError(
                f"the restore key must have the digest {[*stages][-1]} of this loader's order, got {found.order}"
            )
        if found.shard >= source.num_shards or (found.block is None) == source.endless:
            raise InvalidArgumentError(
                f"the restore key {key!r:.200} must have a shard below {source.num_shards}, and a block only if endless"
            )
        endless_order = None if found.block is None else self.fixed_order.endless_order(found.block)
        position_of = None if endless_order is None else endless_order.position_of(found.shard)
        epoch, seed = self.opening(found.epoch)
        cursor = opened(stages[found.order].source, found.shard, epoch, seed, found.saved, position_of)
        try:
            cursor.skip(found.index - found.at)
            return next(cursor)
        except StopIteration:
            raise DatasetError(
                f"shard {found.shard} of epoch {found.epoch} must have the sample {found.index} of the restore key"
            ) from None
        finally:
            cursor.close()

    def has_rows(self, position: ShardedPosition) -> bool:
        readers = self.readers(position)
        try:
            return self.stream(position, readers).has_rows()
        finally:
            readers.close()

    def check_length(self, epoch: int, length: int, batch: int, boxes: int) -> None:
        if Partition(length, 0, batch, boxes, self.fixed_order.tail).batches == 0 or length == 0:
            raise DatasetError(f"epoch {epoch} must have enough samples for one batch of {batch} rows, got {length}")


def following_rows(rows: Sequence[tuple[int, int, bool]]) -> list[int]:
    """Return, for each row, how many rows after it are the next of its shard, to be read in one call."""
    counts = [0] * len(rows)
    for at in range(len(rows) - 2, -1, -1):
        (shard, index, again), following = rows[at], rows[at + 1]
        if not again and following == (shard, index + 1, False):
            counts[at] = counts[at + 1] + 1
    return counts


class WorkerShare:
    def __init__(self, plan: SharePlan, begun: ShardedPosition, turn: WorkerTurn) -> None:
        self._plan, self._begun, self._turn = plan, begun, turn
        self._done = begun.progress.done
        self._readers = plan.readers(begun)
        self._stream = None if begun.endless_order is not None else plan.stream(begun, self._readers)
        self._first: tuple[int, int] | None = None
        """(shard, index) of this box's first row in the present batch; None if it has none."""
        self.imbalance: float | None = None
        """Of the batch that `next` returned or skipped last; None without `balance`."""
        self.rows = 0
        """Number of this box's rows in that batch."""
        self._between = True
        """False while a batch is made, and after making it has failed."""

    def next(self, *, read: bool = True) -> list[HeldSample] | None:
        """Return the samples of the next batch, perhaps none in an epoch's last (see `template`); None after it. Until
        `done`, the same are returned again. read=False: skip the batch, and return an empty list."""
        if self._between:
            self._readers.begin()
            self._between = False
        number, progress = self._turn.batch(self._done), self._begun.progress
        balance = self._plan.balance
        if balance is not None:
            rows = self._plan.all_rows(self._begun, self._stream, number)
            if rows is not None:
                opening, batch = self._plan.opening(progress.epoch), progress.topology.batch
                step = progress.start // batch + number
                rows, self.imbalance = balance.own(opening, rows, self._plan.box, progress.topology.boxes, step)
        elif self._stream is not None:
            rows = self._stream.rows(number, read=read)
        else:
            rows = self._plan.endless_rows(self._begun, number, self._plan.box, progress.topology.boxes)
        if rows is None:
            assert self._stream is not None
            self._between = True
            if progress.start == 0 and (length := self._stream.length) is not None:
                self._plan.check_length(progress.epoch, length, progress.topology.batch, progress.topology.boxes)
            return None
        self._first, self.rows = None if not rows else rows[0][:2], len(rows)
        if not read:
            return []
        get = self._readers.get
        return [
            get(shard, index, again=again, following=following)
            for (shard, index, again), following in zip(rows, following_rows(rows), strict=True)
        ]

    def template(self) -> Any:
        """Return a sample of another box of the present batch: the form of this box's batch without rows."""
        return self._readers.get(*self._first_of_all(), again=True).sample

    def first_row(self) -> tuple[int, int, int]:
        """Return (epoch, shard, index) of this box's first row, or of the sample that `template` returns."""
        shard, index = self._first or self._first_of_all()
        return self._begun.progress.epoch, int(shard), int(index)

    def _first_of_all(self) -> tuple[int, int]:
        assert self._stream is not None
        return self._stream.first(self._turn.batch(self._done))

    def done(self) -> None:
        self._done += 1
        self._readers.done()
        self._between = True

    def position(self) -> ShardedPosition:
        cursors = self._readers.states(up_to_date=self._between)
        ended = self._stream.ended if self._stream is not None else {}
        begun = self._begun.progress
        progress = OrderProgress(begun.epoch, begun.start, self._done, begun.topology, begun.first)
        return ShardedPosition(progress, cursors, ended, self._begun.endless_order, self._begun.cut)

    def latest(self) -> tuple[int, SavedPosition] | None:
        """Return the shard that was read last, and its cursor's saved position, at which a mixture's present weights
        are looked up; if none was read, the starting position's furthest one."""
        states = self._begun.cursors
        furthest = max(states, key=lambda shard: (states[shard][0], shard), default=None)
        return self._readers.latest() or (None if furthest is None else (furthest, states[furthest][1]))

    @property
    def begun_at_end(self) -> bool:
        """True if no batch was made: if `next` returns None then, the share had begun at the epoch's end."""
        return self._done == self._begun.progress.done

    def close(self) -> None:
        self._readers.close()
