"""penstock.worker.loader.user_loaders: one batch in place of a loader's stream."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import lengths
import pytest
from torch.utils.data import DataLoader

from penstock.worker.loader.user_loaders import FirstBatch


def test_as_many_as_the_loader_has_in_every_pass() -> None:
    numbers: Any = [10, 11, 12, 13, 14]
    first = FirstBatch(DataLoader(numbers, batch_size=2))
    assert len(first) == 3
    for _ in range(2):
        assert [batch.tolist() for batch in first] == [[10, 11]] * 3


def test_endless_without_length_and_loader_freed() -> None:
    made: list[int] = []
    ended: list[bool] = []

    def numbers() -> Iterator[int]:
        try:
            for number in range(3):
                made.append(number)
                yield number
        finally:
            ended.append(True)

    first = FirstBatch(numbers())
    assert list(islice(first, 5)) == [0] * 5
    assert (made, ended) == ([0], [True])
    assert list(islice(first, 2)) == [0] * 2
    with pytest.raises(TypeError, match="generator' has no len"):
        len(first)


def test_a_len_that_raises() -> None:
    first = FirstBatch(lengths.raising())
    assert [batch.tolist() for batch in islice(first, 2)] == [[0, 1]] * 2
    with pytest.raises(ValueError, match="the manifest"):
        len(first)


@pytest.mark.parametrize("nothing", [[], iter(())])
def test_nothing_of_nothing(nothing: object) -> None:
    assert list(FirstBatch(nothing)) == []  # type: ignore[arg-type]
