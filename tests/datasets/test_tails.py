"""The last samples of an epoch, through chains of topologies: none is repeated, none is lost, but where one says so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from all_workers import AllWorkers, Shape
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.data import LogicalShards, MapLoader, ShardLoader
from penstock.data.loading.collating import empty_batch, without_rows
from penstock.proto.errors import DatasetError
from penstock.proto.state.assignment import Assignment, assigned
from penstock.worker.batch.building import collate

pytestmark = pytest.mark.filterwarnings("ignore:the epoch's last batch has fewer samples than there are boxes")

MOST = 12
"""Samples of an epoch."""

Made = Callable[..., Any]


LOADERS: dict[str, Callable[[int], Made]] = {
    "map": lambda count: lambda **options: MapLoader(range(count), shuffle=True, **options),
    "shards": lambda count: lambda **options: ShardLoader(LogicalShards([range(count)], shards=3), **options),
    "read along": lambda count: (
        lambda **options: ShardLoader(LogicalShards([lambda: iter(range(count))], shards=2), **options)
    ),
}
"""Kind of a loader -> samples of an epoch -> what makes one of them."""


def delivered(made: Made, legs: list[tuple[Shape, int, int]], tail: str) -> tuple[dict[int, list[int]], list[int]]:
    """(epoch of the epoch -> its rows in the order of all boxes, all rows) for legs of (topology, batch, steps)."""
    by_epoch: dict[int, list[int]] = defaultdict(list)
    everything: list[int] = []
    cluster: AllWorkers | None = None
    for shape, batch, steps in legs:

        def loader(batch: int = max(batch, shape[0])) -> Any:
            return made(global_batch_size=batch, tail=tail, seed=1, collate_fn=list)

        cluster = AllWorkers(loader, shape, cluster)
        for _ in range(steps):
            worker = cluster.workers[cluster.step % shape[1]]
            (rows,) = cluster.take(1)
            by_epoch[worker.state_dict()["epoch"]] += rows
            everything += rows
    return by_epoch, everything


LEGS = st.lists(
    st.tuples(st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2), (5, 1)]), st.integers(1, 7), st.integers(0, 5)),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("kind", LOADERS)
@settings(max_examples=8)
@example(count=10, legs=[((1, 1), 3, 3), ((3, 1), 3, 1)], tail="emit", last=False)  # a case that failed once
@given(
    count=st.integers(1, MOST), legs=LEGS, tail=st.sampled_from(["emit", "pad", "drop", "carry"]), last=st.booleans()
)
def test_every_sample_counted(
    kind: str,
    count: int,
    legs: list[tuple[Shape, int, int]],
    tail: str,
    last: bool,
) -> None:
    if tail == "carry" and kind in ("shards", "read along"):
        tail = "emit"
    legs = [*legs, ((1, 1), 5 if last else 2, 3)]
    largest = max(max(batch, shape[0]) for shape, batch, _ in legs)
    if tail in ("drop", "carry") and largest > count:
        return  # no batch at all
    if tail == "drop" and kind == "read along":  # what it leaves out shows only in the batch that is not made
        legs = [(shape, largest, steps) for shape, _, steps in legs]
    by_epoch, everything = delivered(LOADERS[kind](count), legs, tail)
    if tail == "carry":  # an epoch has rows of the epoch before; laid end to end they are those of all epochs
        for at in range(0, len(everything) - count, count):
            assert sorted(everything[at : at + count]) == list(range(count))
        return
    newest = max(by_epoch)
    assert sorted(by_epoch) == list(range(newest + 1))
    for epoch, rows in by_epoch.items():
        assert len(rows) == len(set(rows)) or tail == "pad", "a sample came twice"
        if epoch != newest and tail in ("emit", "pad"):
            assert set(rows) == set(range(count))


@pytest.mark.parametrize("ahead", [{}, {"fetch_threads": 2}])
@pytest.mark.parametrize("reseed", [False, None])
def test_empty_batch_has_the_form_of_the_others(ahead: dict[str, Any], reseed: bool | None) -> None:
    samples = [{"x": torch.full((4,), number), "name": str(number), "y": number} for number in range(2)]
    batches = []
    for box in range(3):
        with assigned(Assignment(box, 3, 0, 1, 0, 1)):
            loader = MapLoader(samples, global_batch_size=3, keys="key", reseed=reseed, **ahead)
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
        assert list(LOADERS["map"](1)(batch_size=4)) != []
