"""The order of a map-style dataset: a permutation of each epoch, the same for ever."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.ordering.unsharded_order import UnshardedOrder

GOLDEN = [[8, 6, 5, 3, 2, 6, 9, 1, 0, 8, 4, 7, 7, 3], [0, 2, 3, 1, 4, 6, 5, 7, 8, 11, 9, 10, 12]]


@settings(max_examples=25)
@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 1 << 62))
def test_blocks_are_a_permutation_of_neighbours(length: int, block: int, epoch: int) -> None:
    ids = UnshardedOrder(length, length, seed=1, shuffle=True, block=block).ids(epoch, np.arange(length))
    assert sorted(ids.tolist()) == list(range(length))
    changes = np.count_nonzero(np.diff(ids // block))
    assert changes <= -(-length // block) - 1, "a block was left and come back to"


def test_the_order_is_the_same_for_ever() -> None:
    """A saved state is a position in this order."""
    assert UnshardedOrder(10, 14, seed=5, shuffle=True).ids(2, np.arange(14)).tolist() == GOLDEN[0]
    assert UnshardedOrder(13, 13, seed=5, shuffle=True, block=4).ids(1, np.arange(13)).tolist() == GOLDEN[1]
