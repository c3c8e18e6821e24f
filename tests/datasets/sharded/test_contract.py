"""The contract of sources in logical shards, on each of ours: a line in SOURCES, and it is checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import layer_stacks
import numpy as np
import opaque_streams
import pytest
import torch
from tests.datasets.sharded.contract import CURSOR_CHECKS, Make

from penstock.data import LogicalShards
from penstock.proto.state import snapshot_cadence


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
    "an empty piece between two": lambda: LogicalShards([numbers, nothing, numbers], counts=[3, 0, 3], shards=1),
    **opaque_streams.SOURCES,
    **layer_stacks.STACKS,
}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams take snapshots whenever they may, whatever they cost: by count alone."""
    monkeypatch.setattr(snapshot_cadence, "SHARE", 1.0)


@pytest.mark.parametrize("check", CURSOR_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SOURCES)
def test_a_source(name: str, check: Callable[[Make], None]) -> None:
    check(SOURCES[name])
