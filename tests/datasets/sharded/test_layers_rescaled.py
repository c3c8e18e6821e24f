"""Layers through a ShardLoader, over chains of rescales: what other stacks lose there."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from given_shards import Given
from tests.datasets.sharded.contract import Fleet, Shape

from penstock.data import Mixture, Packed, Repeated, ShardedSource, WindowShuffled

CHAINS: list[list[Shape]] = [[(2, 1), (3, 1), (5, 1)], [(1, 12), (1, 11), (1, 12)], [(1, 1), (4, 16), (1, 1)]]


@pytest.mark.parametrize("chain", CHAINS)
def test_open_lines_survive_a_rescale(chain: list[Shape]) -> None:
    """IBM's packing lost 16 to 32 tokens at each rescale."""
    shards = 12

    def make() -> ShardedSource:
        documents = [
            [list(range(at, at + 23)) for at in range(s * 100_000, s * 100_000 + 2300, 23)] for s in range(shards)
        ]
        return Packed(Given(documents), length=32)

    lines = shards * (2300 // 32)
    fleet: Fleet | None = None
    taken: list[list[Any]] = []
    for number, shape in enumerate(chain):
        fleet = Fleet(make, shape, fleet, global_batch_size=12)
        steps = 17 if number < len(chain) - 1 else lines // 12 - len(taken)
        taken += fleet.take(steps)
    got: dict[int, list[int]] = defaultdict(list)
    for line in (line for batch in taken for line in batch):
        got[int(line[0]) // 100_000] += line.tolist()
    for shard in range(shards):
        assert got[shard] == list(range(shard * 100_000, shard * 100_000 + 2300 // 32 * 32))


@pytest.mark.parametrize("chain", CHAINS)
def test_mixture_shares_survive_a_rescale(chain: list[Shape]) -> None:
    """IBM's mixing counted its sources anew after each; here also where the batch size changes with it."""
    shards = 12

    def make() -> ShardedSource:
        return Mixture(
            [Repeated(Given([[(n, s, at) for at in range(50)] for s in range(shards)])) for n in range(3)],
            [0.7, 0.2, 0.1],
        )

    fleet: Fleet | None = None
    rows: list[Any] = []
    for batch, shape in zip((64, 72, 80), chain, strict=True):
        fleet = Fleet(make, shape, fleet, global_batch_size=batch, partitions=4)
        rows += [row for taken in fleet.take(23) for row in taken]
    sources = np.array([row[0] for row in rows])
    for source, share in enumerate((0.7, 0.2, 0.1)):
        assert np.abs(np.cumsum(sources == source) - share * np.arange(1, len(rows) + 1)).max() < 1
    next_of: dict[tuple[int, int], int] = defaultdict(int)
    for number, shard, at in rows:
        assert at == next_of[number, shard] % 50
        next_of[number, shard] += 1


def test_windowed_mixture_survives_other_batches() -> None:
    def make() -> ShardedSource:
        mixed = Mixture([Given([[(n, s, at) for at in range(3000)] for s in range(4)]) for n in range(2)], [1, 1])
        return WindowShuffled(mixed, 16)

    fleet: Fleet | None = None
    rows: list[Any] = []
    for batch, shape in zip((8, 12, 20), CHAINS[0], strict=True):
        fleet = Fleet(make, shape, fleet, global_batch_size=batch, partitions=2)
        rows += [row for taken in fleet.take(9) for row in taken]
    assert len(set(rows)) == len(rows) == 9 * 40
    for shard in range(4):
        for number in range(2):
            seen = sorted(at for n, s, at in rows if (n, s) == (number, shard))
            assert len(set(range(seen[-1] + 1)) - set(seen)) < 16, "only what the open window still holds is missing"
