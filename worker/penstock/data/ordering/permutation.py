"""Keyed permutations, computed for each element and not stored. A shuffled epoch of 10^9 samples is a Feistel network
over b bits, a bijection for any round function, with the smallest b, at least 6, that holds n values. A result of n or
more is permuted again (cycle-walking: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Each
element has its own key and n, so one call can draw from many shuffled blocks.

Saved states are positions in this order, so the arithmetic must never change; a test compares it with recorded values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 8
MIN_BITS = 6
"""Least width of the network, in bits; fewer give too few permutations."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _ONE = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(1)


def _scrambled(words: Words) -> Words:
    """Hash by the finalizer of splitmix64 (G. Steele, D. Lea and C. Flood, 2014)."""
    words = (words ^ (words >> _30)) * _FIRST
    words = (words ^ (words >> _27)) * _SECOND
    return words ^ (words >> _31)


def mix(key: int, *parts: npt.ArrayLike) -> Words:
    """Return a 64-bit key, derived from `key`, for each element of `parts` (integers or arrays, broadcast)."""
    with np.errstate(over="ignore"):
        words = _scrambled(np.asarray(key & (2**64 - 1), np.uint64) + _GOLDEN)
        for part in parts:
            words = _scrambled((words ^ np.asarray(part).astype(np.uint64)) + _GOLDEN)
    return words


def gathered(groups: Ints, places: Ints, values: Callable[[int, Ints], npt.ArrayLike]) -> Ints:
    """Return values(group, places in it) for elements of several groups, with one call for each group."""
    found = np.empty(len(groups), np.int64)
    for group in np.unique(groups).tolist():
        chosen = groups == group
        found[chosen] = values(group, places[chosen])
    return found


def permuted(positions: npt.ArrayLike, count: npt.ArrayLike, keys: npt.ArrayLike) -> Ints:
    """Return each position's image under the permutation of [0, count) by its key (64 bits); broadcast; `count` below
    2^62."""
    at, size, key = np.broadcast_arrays(
        np.asarray(positions).astype(np.uint64), np.asarray(count).astype(np.uint64), np.asarray(keys).astype(np.uint64)
    )
    shape = at.shape
    words, size, key = at.ravel().copy(), size.ravel(), key.ravel()
    moving = np.flatnonzero(size > _ONE)
    bits = _bits(size)
    with np.errstate(over="ignore"):
        while moving.size:
            words[moving] = _feistel(words[moving], bits[moving], key[moving])
            moving = moving[words[moving] >= size[moving]]
    return words.astype(np.int64).reshape(shape)


def _bits(size: Words) -> Words:
    _, exponent = np.frexp((size - _ONE).astype(np.float64))
    exponent = exponent.astype(np.uint64)
    # A float of 53 bits may have been rounded up to the next power of two. One bit too many would still be correct, but
    # only a decision in integers gives the same result on every machine.
    exponent = np.where((size - _ONE) >> np.maximum(exponent, _ONE) - _ONE == 0, exponent - _ONE, exponent)
    return np.maximum(exponent, np.uint64(MIN_BITS))


def _feistel(words: Words, bits: Words, key: Words) -> Words:
    low_bits = bits >> _ONE
    high_bits = bits - low_bits
    low_mask, high_mask = (_ONE << low_bits) - _ONE, (_ONE << high_bits) - _ONE
    high, low = words >> low_bits, words & low_mask
    for _ in range(0, ROUNDS, 2):
        key = key + _GOLDEN
        high = high ^ (_scrambled(low + key) & high_mask)
        key = key + _GOLDEN
        low = low ^ (_scrambled(high ^ key) & low_mask)
    found: Words = high << low_bits | low
    return found
