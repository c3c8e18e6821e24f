"""The contract of sources in logical shards, on each of ours: a line in SOURCES, and it is checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import layer_stacks
import numpy as np
import opaque_streams
import pytest
import torch
from listed import Counting, Listed
from tests.datasets.sharded.contract import CURSOR_CHECKS, LOADER_CHECKS, Make

from penstock.data import LogicalShards, MegatronDocuments, megatron_blend

MEGATRON = Path(__file__).parents[2] / "data" / "megatron"


def numbers() -> Iterator[int]:
    yield from (1, 2, 3)


def nothing() -> Iterator[int]:
    yield from ()


class Drawing:
    """Records that draw from every generator, read along or by number."""

    def __init__(self, records: int) -> None:
        self.records = records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> list[float]:
        if index >= self.records:
            raise IndexError(index)
        return [index, random.random(), random.gauss(0, 1), np.random.normal(), float(torch.rand(()))]


def drawing(records: int) -> Iterator[list[float]]:
    order = random.sample(range(records), records)
    yield from (Drawing(records)[index] for index in order)


def drawing_table(records: int) -> list[float]:
    """Opened in an order that is drawn."""
    return [*random.sample(range(records), records), np.random.normal()]


SOURCES: dict[str, Make] = {
    "pieces that draw": lambda: LogicalShards([partial(drawing, 5), partial(drawing, 4)], shards=2),
    "records that draw": lambda: LogicalShards([Drawing(7), [1, 2, 3], Drawing(5)], shards=3, shuffle=True),
    "tables that draw": lambda: LogicalShards([partial(drawing_table, n) for n in (4, 6, 5)], shards=3, max_open=1),
    "unequal lists": lambda: Listed([3, 0, 11, 1, 0]),
    "of unknown lengths": lambda: Listed([7, 0, 2, 4], known=False),
    "one shard": lambda: Listed([9], known=False),
    "endless": lambda: Counting(6),
    "an empty piece between two": lambda: LogicalShards([numbers, nothing, numbers], counts=[3, 0, 3], shards=1),
    "Megatron's documents": lambda: LogicalShards(
        [MegatronDocuments(MEGATRON / name)[:12] for name in ("text", "sentences")], shards=3, shuffle=True
    ),
    "a Megatron blend": lambda: megatron_blend([f"{MEGATRON}/text", f"{MEGATRON}/images"], shards=2),
    **opaque_streams.SOURCES,
    **layer_stacks.STACKS,
}


DEALT = [
    "records that draw",
    "generators",
    "language model",
    "mixture by tokens, scheduled",
    "packed by best fit",
]
"""Sources that a loader divides; test_loader.py has lists. A loader sees cursors alone, which are checked for all."""


@pytest.mark.parametrize("check", CURSOR_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SOURCES)
def test_a_source(name: str, check: Callable[[Make], None]) -> None:
    check(SOURCES[name])


@pytest.mark.parametrize("check", LOADER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", DEALT)
def test_a_loader_of_a_source(name: str, check: Callable[[Make], None]) -> None:
    check(SOURCES[name])
