"""Balance of cost in a ShardLoader. Rows are exchanged only between the boxes of a step: positions and states stay the
same, and no box reads a row of a later step first, for which it would have to read its shard backwards."""

from __future__ import annotations

import numpy as np

from penstock.data.ordering.balance import Balance, Costs, assign_in_turn, assign_to_boxes, cost_ratio
from penstock.data.sharded.epoch_stream import Rows
from penstock.data.sharded.protocol import ShardedSource, known_records
from penstock.proto.errors import InvalidArgumentError

__all__ = ["RowBalance"]


class RowBalance:
    def __init__(self, balance: Balance, source: ShardedSource) -> None:
        if not isinstance(balance, Balance):
            raise InvalidArgumentError(
                f"balance must be a penstock.data.Balance or None, got {balance!r}. Pass Balance(cost)"
            )
        if balance.over_steps != 1:
            raise InvalidArgumentError(
                f"over_steps must be 1 in a ShardLoader, whose shards are read forwards, got {balance.over_steps}. "
                "Leave over_steps out, or use a MapLoader"
            )
        records = known_records(source)
        if records is None:
            raise InvalidArgumentError(
                "balance needs a source that knows which record each sample is: LogicalShards of indexable pieces, or "
                f"Mapped or Repeated over it, got {source!r:.200}. Leave balance out, or use pieces with len() and "
                "records by index"
            )
        self._numbers, self._costs = records.numbers, Costs(balance.cost, source, records.total)
        self.assigns = not balance.report

    def own(self, opening: tuple[int, int], rows: Rows, box: int, boxes: int, turn: int) -> tuple[Rows, float]:
        """Return a box's rows, and the step's imbalance. `turn`: the step, which decides who gets the costliest row."""
        costs, plain = self.costs(opening, rows), assign_in_turn(len(rows), boxes)
        assigned = assign_to_boxes(costs, boxes, turn) if self.assigns else plain
        return [rows[row] for row in assigned[box].tolist()], cost_ratio(costs, assigned)

    def ratios(self, opening: tuple[int, int], rows: Rows, boxes: int, turn: int) -> tuple[float, float]:
        costs = self.costs(opening, rows)
        plain, assigned = assign_in_turn(len(rows), boxes), assign_to_boxes(costs, boxes, turn)
        return cost_ratio(costs, plain), cost_ratio(costs, assigned)

    def costs(self, opening: tuple[int, int], rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        shards, indices = (np.array([row[part] for row in rows], np.int64) for part in (0, 1))
        return self._costs.of(self._numbers(*opening, shards, indices))
