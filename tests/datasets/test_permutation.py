"""Keyed permutations: bijections, and the same for ever."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.ordering.permutation import mix, permuted


def test_it_is_a_bijection() -> None:
    for count, key in itertools.product([*range(1, 70), 255, 256, 257, 4095, 4096, 4097, 100_000], range(3)):
        assert np.array_equal(np.sort(permuted(np.arange(count), count, mix(key, 5))), np.arange(count))


@given(st.integers(1, 1 << 61), st.integers(0, 1 << 64), st.integers(0, 1 << 61))
def test_it_stays_in_its_domain(count: int, key: int, position: int) -> None:
    assert 0 <= int(permuted(position % count, count, mix(key))) < count


def test_it_is_the_same_for_ever() -> None:
    """A saved state is a position in this order."""
    assert mix(0, 1).tolist() == 627405149472732430
    assert permuted(np.arange(10), 10, mix(1, 2)).tolist() == [1, 4, 2, 8, 9, 0, 5, 7, 3, 6]
    assert permuted([0, 1, 2], [2**61 + 1, 10**18, 7], [1, 2, 3]).tolist() == [
        187670454433825455,
        512709826542127014,
        4,
    ]
