"""Batches without rows, where an epoch ends with fewer samples than there are boxes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock.data import LogicalShards, MapLoader, ShardLoader
from penstock.data.loading.collating import empty_batch, without_rows
from penstock.proto.errors import DatasetError
from penstock.proto.state.assignment import Assignment, assigned
from penstock.worker.batch.building import collate

pytestmark = pytest.mark.filterwarnings("ignore:the epoch's last batch has fewer samples than there are boxes")


@pytest.mark.parametrize("ahead", [{}, {"fetch_threads": 2, "reseed": False}])
def test_empty_batch_has_the_form_of_the_others(ahead: dict[str, Any]) -> None:
    samples = [{"x": torch.full((4,), number), "name": str(number), "y": number} for number in range(2)]
    batches = []
    for box in range(3):
        with assigned(Assignment(box, 3, 0, 1, 0, 1)):
            loader = MapLoader(samples, global_batch_size=3, keys="key", **ahead)
        batches += list(loader)
    assert [batch["x"].tolist() for batch in batches] == [[[0] * 4], [[1] * 4], []]
    assert batches[2]["x"].shape == (0, 4)
    assert batches[2]["x"].dtype == batches[2]["y"].dtype == torch.int64
    assert batches[2]["name"] == batches[2]["key"] == []


class Packed(NamedTuple):
    tokens: torch.Tensor
    offsets: np.ndarray[Any, np.dtype[np.int64]]
    rows: int


def packed(samples: list[list[int]]) -> Packed:
    tokens = torch.tensor([token for sample in samples for token in sample])
    return Packed(tokens, np.cumsum([0, *map(len, samples)]), len(samples))


def test_rows_are_taken_out_where_they_are() -> None:
    empty = empty_batch(packed, [1, 2, 3])
    assert type(empty) is Packed
    assert (empty.tokens.tolist(), empty.offsets.tolist(), empty.rows) == ([], [0], 0)
    along = empty_batch(lambda samples: torch.stack([sample["x"] for sample in samples], 1), {"x": torch.ones(4, 5)})
    assert along.shape == (4, 0, 5)
    assert empty_batch(list, "sample") == []
    assert empty_batch(lambda samples: {"kind": "a", "x": (samples, None)}, 1) == {"kind": "a", "x": ([], None)}
    assert empty_batch(collate, {"x": np.ones(2), "y": (1, 2.5)})["y"][1].shape == (0,)
    assert without_rows({"x": torch.ones(3, 2), "y": ["a"] * 3, "z": [np.ones(3)]})["z"][0].shape == (0,)
    with pytest.raises(DatasetError, match=r"got a object as the batch\. .* Pass tail='pad'"):
        empty_batch(lambda samples: object(), 1)
    with pytest.raises(DatasetError, match=r"got a int as the batch\. .* Pass tail='pad'"):
        without_rows({"x": 5})


def test_a_source_s_own_batches_without_rows() -> None:
    batches = [torch.full((2,), number) for number in range(4)]
    got = []
    for box in range(3):
        with assigned(Assignment(box, 3, 0, 1, 0, 1)):
            got.append([batch.tolist() for batch in ShardLoader(LogicalShards([batches], shards=1), unbatched=True)])
    assert got == [[[0, 0], [3, 3]], [[1, 1], []], [[2, 2], []]]


def test_an_empty_batch_is_said() -> None:
    with (
        assigned(Assignment(1, 2, 0, 1, 0, 1)),
        pytest.warns(UserWarning, match="fewer samples than there are boxes"),
    ):
        assert list(MapLoader(range(1), batch_size=4)) != []
