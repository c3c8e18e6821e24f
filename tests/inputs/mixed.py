"""Mixtures of numbered samples, for runs whose weights change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.data import Counts, LogicalShards, Mapped, Mixture, Schedule, ShardLoader

SHARDS = 8
ROWS = 8
"""Rows of a global batch."""


def numbers(first: int) -> LogicalShards:
    return LogicalShards([range(first, first + 500)], shards=SHARDS)


def math() -> LogicalShards:
    """A source to add: numbers from 2000 on."""
    return numbers(2000)


def train(
    schedule: Mapping[int, Mapping[str, float]] | None = None, *, more: bool = False, keys: str | None = None
) -> ShardLoader:
    """Two sources, numbers from 0 and from 1000 on. `schedule`: weights by the number of steps before."""
    sources = {"web": numbers(0), "code": numbers(1000)} | ({"math": math()} if more else {})
    weights: Any = {"web": 3, "code": 1} if schedule is None else Schedule(schedule, rows_per_step=ROWS)
    source = Mapped(Mixture(sources, weights), int)
    return ShardLoader(source, global_batch_size=ROWS, seed=5, partitions=2, keys=keys, counts=Counts())


def planned(changes: list[Any]) -> ShardLoader:
    """The same with changes that were made at a position: pairs (samples before, weights)."""
    weights: Any = Schedule({0: {"web": 3, "code": 1}} | dict(changes))
    source = Mapped(Mixture({"web": numbers(0), "code": numbers(1000)}, weights), int)
    return ShardLoader(source, global_batch_size=ROWS, seed=5, partitions=2)


def plain() -> ShardLoader:
    """The mixture of `train` without functions and counts, so that a state can be advanced without a loader."""
    source = Mixture({"web": numbers(0), "code": numbers(1000)}, {"web": 3, "code": 1})
    return ShardLoader(source, global_batch_size=ROWS, seed=5, partitions=2)
