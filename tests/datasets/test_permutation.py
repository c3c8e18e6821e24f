"""Keyed permutations: bijections, uniform, and the same for ever."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.ordering.permutation import mix, permuted


def test_it_is_a_bijection() -> None:
    for count, key in itertools.product([*range(1, 70), 255, 256, 257, 4095, 4096, 4097, 100_000], range(3)):
        assert np.array_equal(np.sort(permuted(np.arange(count), count, mix(key, 5))), np.arange(count))


@given(st.integers(1, 1 << 61), st.integers(0, 1 << 64), st.integers(0, 1 << 61))
def test_it_stays_in_its_domain(count: int, key: int, position: int) -> None:
    assert 0 <= int(permuted(position % count, count, mix(key))) < count


def test_each_element_has_its_own_domain_and_key() -> None:
    counts, keys = np.array([1, 5, 1000, 10**9]), mix(3, np.arange(4))
    together = permuted([0, 3, 999, 10**8], counts, keys)
    alone = [int(permuted(at, count, key)) for at, count, key in zip([0, 3, 999, 10**8], counts, keys, strict=True)]
    assert together.tolist() == alone


def test_permutations_are_equally_frequent() -> None:
    found = Counter(map(tuple, permuted(np.arange(4), 4, mix(1, np.arange(24_000))[:, None]).tolist()))
    assert len(found) == 24
    assert chi_square(list(found.values())) < 60  # of 23 degrees of freedom: one in 40,000 is above


@pytest.mark.parametrize("count", [10, 1000, 1 << 20])
def test_where_the_first_goes_is_uniform(count: int) -> None:
    keys = mix(7, np.arange(40_000))
    cells = np.bincount(permuted(0, count, keys) * 10 // count, minlength=10)
    assert chi_square(cells.tolist()) < 40  # of 9: one in 100,000


def test_neighbours_go_apart() -> None:
    gone = permuted(np.arange(1 << 16), 1 << 16, mix(1))
    # The mean distance of two random places of n is n / 3.
    assert abs(np.abs(np.diff(gone)).mean() / (1 << 16) - 1 / 3) < 0.01


def test_it_is_the_same_for_ever() -> None:
    """A saved state is a position in this order."""
    assert mix(0, 1).tolist() == 627405149472732430
    assert permuted(np.arange(10), 10, mix(1, 2)).tolist() == [1, 4, 2, 8, 9, 0, 5, 7, 3, 6]
    assert permuted([0, 1, 2], [2**61 + 1, 10**18, 7], [1, 2, 3]).tolist() == [
        187670454433825455,
        512709826542127014,
        4,
    ]


def chi_square(counts: list[int]) -> float:
    mean = sum(counts) / len(counts)
    return sum((count - mean) ** 2 for count in counts) / mean
