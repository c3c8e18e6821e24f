"""Garbage in a process that makes samples, where the user asks for a say in it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from penstock.data import Savable


class Node:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Check that each test restores the garbage collector's settings, which belong to the process."""
    gc.enable()
    gc.unfreeze()
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_garbage_is_collected_every_n_samples() -> None:
    made: list[weakref.ref[Node]] = []

    def nodes(shard: int) -> Iterator[int]:
        for number in range(20):
            made.append(weakref.ref(Node()))
            yield number

    cursor = Savable(nodes, shards=1, collect_every=5).open(0, 0, 1)
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 0
    for number in range(9):
        next(cursor)
        assert [ref() is None for ref in made] == [index < (number + 1) // 5 * 5 for index in range(number + 1)]
    cursor.close()
    assert gc.isenabled()


def test_garbage_of_the_start_is_collected() -> None:
    gc.disable()
    garbage = weakref.ref(Node())
    gc.enable()
    cursor = Savable(lambda shard: iter([1]), shards=1, collect_every=5).open(0, 0, 1)
    assert garbage() is None
    cursor.close()


def test_it_is_given_back_by_the_last_stream() -> None:
    source = Savable(lambda shard: iter([1, 2]), shards=2, collect_every=10)
    one, other = source.open(0, 0, 1), source.open(1, 0, 1)
    assert list(one) == [1, 2]
    one.close()
    assert not gc.isenabled()
    next(other)
    del other  # lost without a close
    assert gc.isenabled()


def test_what_the_user_had_set_stays() -> None:
    source = Savable(lambda shard: iter([1]), shards=1, collect_every=10)
    gc.disable()
    gc.freeze()
    assert list(source.open(0, 0, 1)) == [1]
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.enable()
    gc.unfreeze()


def test_nobody_asked_nothing_changes() -> None:
    cursor = Savable(lambda shard: iter([1, 2]), shards=1).open(0, 0, 1)
    next(cursor)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    cursor.close()
