"""Balance of cost in a ShardLoader. Rows are exchanged only between the boxes of a step: positions and states stay the
same, and no box reads a row of a later step first, for which it would have to read its shard backwards."""

from __future__ import annotations

import numpy as np

from penstock.data.ordering.balance import Balance, StepBalance, checked_balance
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.epoch_stream import Rows
from penstock.data.sharded.protocol import ShardedSource, known_records
from penstock.proto.errors import InvalidArgumentError


class RowBalance(StepBalance):
    def __init__(self, balance: Balance, source: ShardedSource) -> None:
        if checked_balance(balance).over_steps != 1:
            raise InvalidArgumentError(f"over_steps must be 1 in a ShardLoader, got {balance.over_steps}")
        records = known_records(source)
        if records is None:
            raise InvalidArgumentError(
                f"balance needs LogicalShards of indexable pieces, or Mapped or Repeated over it, got {source!r:.200}"
            )
        super().__init__(balance, source, records.total)
        self._numbers = records.numbers

    def own(self, opening: tuple[int, int], rows: Rows, box: int, boxes: int, turn: int) -> tuple[Rows, float]:
        """Return a box's rows, and the step's imbalance. `turn`: the step, which decides who gets the costliest row."""
        assigned, ratio = self.assign(self._ids(opening, rows), boxes, turn)
        return [rows[row] for row in assigned[box].tolist()], ratio

    def ratios(self, opening: tuple[int, int], rows: Rows, boxes: int, turn: int) -> tuple[float, float]:
        ids = self._ids(opening, rows)
        return self.plain_ratio(ids, boxes), self.balanced_ratio(ids, boxes, turn)

    def _ids(self, opening: tuple[int, int], rows: Rows) -> Ints:
        shards, indices = (np.array([row[part] for row in rows], np.int64) for part in (0, 1))
        return self._numbers(*opening, shards, indices)
