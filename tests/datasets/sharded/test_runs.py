"""Runs of samples: what is read ahead does not show, neither in errors nor in saved positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from given_shards import rest

from penstock.data import Chunked, LogicalShards, Mapped, Packed, Repeated
from penstock.data.sharded.protocol import Cursor, SavedPosition, ShardedSource
from penstock.data.sharded.runs import take
from penstock.proto.errors import DatasetError

DOCUMENTS = [np.arange(10 * n, 10 * n + 3) for n in range(60)]
BAD = 40
"""Number of the document that cannot be read."""


def failing(document: Any) -> Any:
    if document[0] == 10 * BAD:
        raise ZeroDivisionError("bad document")
    return document


def same(document: Any) -> Any:
    return document


STACKS: dict[str, Callable[[ShardedSource], ShardedSource]] = {
    "chunked": lambda source: Chunked(source, length=2, eos=1),
    "packed": lambda source: Packed(source, length=7),
    "packed pieces": lambda source: Packed(Repeated(Chunked(source, length=2, bos=1)), length=7),
    "whole documents": lambda source: Packed(source, length=7, pad=0, split=False),
    "with separators": lambda source: Packed(source, length=7, bos=1, eos=2),
}


def lists(samples: Any) -> list[Any]:
    return [sample.tolist() for sample in samples]


class Reading:
    """Samples that were read, and the saved position after them."""

    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.position: SavedPosition = None

    def go_on(self, cursor: Cursor, count: int) -> None:
        """Read runs until an error."""
        while True:
            self.position = cursor.saved_position()
            self.samples += lists(take(cursor, count).samples)


def over(name: str, function: Callable[[Any], Any]) -> ShardedSource:
    return STACKS[name](Mapped(LogicalShards([DOCUMENTS], shards=1), function, name="f"))


@pytest.mark.parametrize("count", [3, 50])
@pytest.mark.parametrize("name", STACKS)
def test_error_comes_where_it_is_needed(name: str, count: int) -> None:
    expected = lists(rest(over(name, same)))
    single, got = Reading(), Reading()
    with pytest.raises(ZeroDivisionError, match="bad document"):
        single.go_on(over(name, failing).open(0, 0, 1), 1)
    with pytest.raises(ZeroDivisionError, match="bad document"):
        got.go_on(over(name, failing).open(0, 0, 1), count)
    needing = next(number for number, sample in enumerate(expected) if 10 * BAD in sample)
    assert needing - 1 <= len(single.samples) <= needing, "a line may need the document to know that it does not fit"
    assert len(single.samples) - count < len(got.samples) <= len(single.samples)
    assert (got.samples + lists(rest(over(name, same), got.position)))[: len(expected)] == expected


def test_error_is_not_early_for_pieces() -> None:
    """Each piece before a document that is too long comes, in runs of any size."""
    documents = [np.arange(3)] * 20 + [np.arange(9)]
    for count in (1, 4, 100):
        got, source = Reading(), Chunked(LogicalShards([documents], shards=1), length=4, longest=8)
        with pytest.raises(DatasetError, match="document 20 of shard 0 in epoch 0 must have at most longest=8"):
            got.go_on(source.open(0, 0, 1), count)
        assert len(got.samples) == 20


def test_user_code_runs_once_for_each_sample() -> None:
    calls: list[int] = []

    def noted(document: Any) -> Any:
        calls.append(int(document[0]))
        return document

    cursor = over("packed pieces", noted).open(0, 0, 1)
    for count in (1, 5, 2, 9):
        take(cursor, count)
    assert calls == [10 * n for n in range(len(calls))]
