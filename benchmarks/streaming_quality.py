"""Quality of a shuffled order, and its cost, in numbers.

`order[p]` is the number of the sample at position p; sample i is in shard i // per_shard. Every figure is 1 for an
order that is drawn uniformly from all permutations, unless its description says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Quality", "quality"]

WINDOW = 256
"""Number of consecutive samples, as in a large global batch, in which the number of different shards is counted."""
BINS = 20
"""Number of equal parts into which an epoch is divided for the chi-square."""


@dataclass(frozen=True)
class Quality:
    displacement: float
    """Mean distance between a sample's number and its position, divided by the number of samples. One third for a
    uniform order."""
    neighbours: float
    """Probability that two consecutive samples are from one shard, divided by the same probability in a uniform
    order."""
    window_shards: float
    """Mean number of different shards in WINDOW consecutive samples, divided by the number that is expected in a
    uniform order."""
    chi_square: float
    """Chi-square of how a shard's samples are distributed over BINS equal parts of the epoch, divided by its degrees of
    freedom, as the mean over all shards."""
    most_in_use: float
    """Largest share of the shards that is in use at one time. A shard is in use from its first to its last sample in
    the order, so a cache of this size downloads no shard twice. Nearly 1 for a uniform order."""
    mean_in_use: float
    """Share of the shards that is in use, as the mean over all positions."""


def quality(order: npt.NDArray[np.int64], shards: int, per_shard: int) -> Quality:
    """Return the quality of an order of the samples in `shards` shards with `per_shard` samples each. Raises ValueError
    if the order is not a permutation."""
    samples = shards * per_shard
    positions = np.full(samples, -1, np.int64)
    positions[order] = np.arange(samples)
    if len(order) != samples or (positions < 0).any():
        raise ValueError(
            f"order must be a permutation of 0 to {samples - 1}, got {len(order)} positions that are not: a fault of "
            "the reader"
        )
    of_shard = positions.reshape(shards, per_shard)
    first, last = of_shard.min(axis=1), of_shard.max(axis=1)
    changes = np.zeros(samples + 1, np.int64)
    np.add.at(changes, first, 1)
    np.add.at(changes, last + 1, -1)
    in_use = np.cumsum(changes[:-1])
    return Quality(
        displacement=float(np.abs(positions - np.arange(samples)).mean() / samples),
        neighbours=_neighbours(order // per_shard, samples, per_shard),
        window_shards=_window_shards(order // per_shard, shards, per_shard),
        chi_square=_chi_square(of_shard, samples, per_shard),
        most_in_use=float(in_use.max() / shards),
        mean_in_use=float(in_use.mean() / shards),
    )


def _neighbours(shard_at: Any, samples: int, per_shard: int) -> float:
    return float((shard_at[1:] == shard_at[:-1]).mean() * (samples - 1) / (per_shard - 1))


def _window_shards(shard_at: Any, shards: int, per_shard: int) -> float:
    samples = len(shard_at)
    windows = np.sort(shard_at[: samples // WINDOW * WINDOW].reshape(-1, WINDOW), axis=1)
    found = (np.diff(windows, axis=1) != 0).sum(axis=1).mean() + 1

    def ways(of: int) -> float:  # log of (of choose WINDOW), without the terms that cancel
        return lgamma(of + 1) - lgamma(of - WINDOW + 1)

    missed = exp(ways(samples - per_shard) - ways(samples))
    return float(found / (shards * (1 - missed)))


def _chi_square(of_shard: Any, samples: int, per_shard: int) -> float:
    bins = of_shard * BINS // samples
    counts = np.stack([(bins == number).sum(axis=1) for number in range(BINS)], axis=1)
    expected = per_shard / BINS
    return float((((counts - expected) ** 2).sum(axis=1) / expected).mean() / (BINS - 1))
