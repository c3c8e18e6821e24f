"""Any stack of layers, saved at any step and gone on with elsewhere, is the stack that was not cut. contract.py cuts
stacks at any place of a shard."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layer_stacks import stacks
from tests.datasets.sharded.contract import Fleet, Make, batches_of

from penstock.proto.errors import DatasetError

SHAPES = st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 1), (1, 5), (2, 5), (1, 11), (1, 12), (3, 4)])


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(stacks(), st.lists(st.tuples(SHAPES, st.integers(0, 6)), min_size=1, max_size=5), st.integers(3, 6))
def test_any_stack_keeps_its_order_over_any_chain(make: Make, chain: list[Any], batch: int) -> None:
    """Chains of topologies, each going on from the state of the one before, in which a worker dies."""
    whole = Fleet(make, (1, 1), global_batch_size=batch, tail="drop")
    expected = []
    with suppress(DatasetError):  # an epoch of a small source may have no batch, or a shard nothing to repeat
        expected = batches_of(whole.take(sum(count for _, count in chain)))
    assume(expected)
    fleet: Fleet | None = None
    got: list[list[bytes]] = []
    for shape, count in chain:
        fleet = Fleet(make, shape, fleet, global_batch_size=batch, tail="drop")
        got += batches_of(fleet.take(count // 2))
        fleet.lose(0)
        got += batches_of(fleet.take(count - count // 2))
    assert got == expected
