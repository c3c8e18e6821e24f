"""The contract of sources in logical shards, on each of ours: a line in SOURCES, and it is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import layer_stacks
import opaque_streams
import pytest
import stacked_sources
from listed import Counting, Listed
from tests.datasets.sharded.contract import CURSOR_CHECKS, LOADER_CHECKS, Make

from penstock.worker.datasets import LogicalShards


def numbers() -> Iterator[int]:
    yield from (1, 2, 3)


def nothing() -> Iterator[int]:
    yield from ()


SOURCES: dict[str, Make] = {
    "lists": lambda: Listed([5, 5, 5]),
    "unequal lists": lambda: Listed([3, 0, 11, 1, 0]),
    "of unknown lengths": lambda: Listed([7, 0, 2, 4], known=False),
    "one shard": lambda: Listed([9], known=False),
    "endless": lambda: Counting(6),
    "an empty piece between two": lambda: LogicalShards([numbers, nothing, numbers], counts=[3, 0, 3], shards=1),
    **opaque_streams.SOURCES,
    **layer_stacks.STACKS,
    **stacked_sources.SOURCES,
}


@pytest.mark.parametrize("check", [*CURSOR_CHECKS, *LOADER_CHECKS], ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", SOURCES)
def test_a_source(name: str, check: Callable[[Make], None]) -> None:
    check(SOURCES[name])
