"""The closed forms of both orders, against models that count step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.sharded.shard_orders import EndlessOrder, RoundRobin

LENGTHS = st.lists(st.one_of(st.integers(0, 9), st.just(0)), min_size=1, max_size=9)


def in_turns(lengths: list[int]) -> list[tuple[int, int]]:
    """(shard, index) at each position."""
    return [(s, i) for i in range(max(lengths)) for s, length in enumerate(lengths) if i < length]


@given(LENGTHS, st.data())
def test_round_robin_is_right_up_to_known_ends(lengths: list[int], data: st.DataObject) -> None:
    """An end that is not known makes nothing wrong before the position where it shows."""
    order = in_turns(lengths)
    known = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    rounds = RoundRobin(len(lengths), {shard: lengths[shard] for shard in known})
    assert rounds.length == (sum(lengths) if len(known) == len(lengths) else None)
    unknown = [lengths[shard] for shard in range(len(lengths)) if shard not in known]
    shows = sum(min(length, min(unknown, default=1 << 30)) for length in lengths)
    assert list(zip(*rounds.at(np.arange(shows)), strict=True)) == order[:shows]
    for shard in data.draw(st.permutations(range(len(lengths)))):
        rounds.end(shard, lengths[shard])
    assert list(zip(*rounds.at(np.arange(len(order))), strict=True)) == order
    for position in range(len(order) + 3):
        before = [shard for shard, _ in order[:position]]
        assert rounds.counts(position).tolist() == [before.count(shard) for shard in range(len(lengths))]


def dealt(endless_order: EndlessOrder, count: int) -> list[tuple[int, int]]:
    """(shard, index) at each position, counted step by step."""
    used, read = [0] * endless_order.columns, [0] * endless_order.shards
    order = []
    for position in range(count):
        column = position // endless_order.block % endless_order.columns
        shard = column * endless_order.partitions + used[column] % endless_order.partitions
        order.append((shard, read[shard]))
        used[column] += 1
        read[shard] += 1
    return order


GRIDS = st.builds(
    lambda partitions, columns, block: EndlessOrder(partitions * columns, partitions, block),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 11),
)


@given(GRIDS)
def test_a_grid_deals_column_by_column(endless_order: EndlessOrder) -> None:
    count = 2 * endless_order.columns * endless_order.block + 3
    order = dealt(endless_order, count)
    shards, indices = endless_order.at(np.arange(count))
    assert list(zip(shards.tolist(), indices.tolist(), strict=True)) == order
    for position, (shard, index) in enumerate(order):
        assert endless_order.position_of(shard)(index) == position
    for position in range(0, count, 3):
        before = [shard for shard, _ in order[:position]]
        assert endless_order.counts(position).tolist() == [before.count(shard) for shard in range(endless_order.shards)]


@settings(max_examples=25)
@given(GRIDS, st.integers(0, 40), st.integers(0, 9), st.integers(1, 4), st.integers(1, 5))
def test_own_shards_are_those_of_the_workers_rows(
    endless_order: EndlessOrder, start: int, more: int, boxes: int, workers: int
) -> None:
    batch = boxes + more
    period = endless_order.columns * endless_order.block * endless_order.partitions
    everybody: set[int] = set()
    for box in range(boxes):
        for slot in range(workers):
            first = start + slot * batch
            begins = first + workers * batch * np.arange(period)
            rows = (begins[:, None] + np.arange(box, batch, boxes)).reshape(-1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("penstock.data.sharded.shard_orders.POSITIONS_PER_CALL", 5)
                own = endless_order.own(first, batch, workers, box, boxes).tolist()
            assert own == sorted(set(endless_order.at(rows)[0].tolist()))
            everybody |= set(own)
    assert everybody == set(range(endless_order.shards))
