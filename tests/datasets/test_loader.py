"""The loader's order and states, on any number of boxes and workers, and in torch's own loaders."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, SupportsIndex, cast

import numpy as np
import pytest
import torch
import torch.utils.data
from all_workers import AllWorkers, Shape
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shardsets import numbers
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.data.loading.streaming_loader import StreamingLoader
from penstock.data.ordering.partition import Tail
from penstock.data.streaming_dataset import StreamingDataset
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    StateCorruptError,
    StateMismatchError,
    StateVersionError,
)
from penstock.proto.state.generators import capture_rng
from penstock.proto.state.restartable import RestartableDataLoader

SHAPES: list[Shape] = [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (4, 1), (5, 4)]


def collated(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["number"] for sample in samples]


def loader_of(dataset: StreamingDataset, **changed: Any) -> StreamingLoader:
    options: dict[str, Any] = {"shuffle": True, "seed": 9, "shuffle_block": 30, "collate_fn": collated, **changed}
    return StreamingLoader(dataset, **options)


class Cluster(AllWorkers):
    """All workers of a shape over a dataset."""

    def __init__(self, dataset: StreamingDataset, shape: Shape, before: Cluster | None = None, **options: Any) -> None:
        super().__init__(lambda: loader_of(dataset, **options), shape, before)


class Augmented(StreamingDataset):
    """Each sample with what it draws."""

    def __getitem__(self, index: SupportsIndex) -> Any:
        number = super().__getitem__(index)["number"]
        return number, random.random(), np.random.random(), torch.rand(()).item()


def drawn(samples: list[Any]) -> list[Any]:
    return [random.random(), *samples]


def test_augmentation_depends_on_the_sample_alone(hundred: Path) -> None:
    """Not to the process's generators, to workers, boxes or restarts; and a restore key names it too."""

    def loader(**changed: Any) -> StreamingLoader:
        return loader_of(dataset, global_batch_size=12, collate_fn=list, **changed)

    dataset = Augmented(local=hundred)
    first, again = loader(), loader()
    whole = [list(first) for _ in range(2)]
    before = capture_rng()
    assert [list(again) for _ in range(2)] == whole
    assert capture_rng() == before
    assert len({draw for epoch in whole for batch in epoch for row in batch for draw in row[1:]}) == 600
    workers = AllWorkers(loader, (2, 2))
    got = workers.take(5)
    rest = AllWorkers(loader, (1, 3), workers).take(len(whole[0]) - 5)
    assert sorted(row for batch in [*got, *rest] for row in batch) == sorted(row for batch in whole[0] for row in batch)
    keyed = loader(keys="key")
    assert [[keyed.restore_sample(key) for key in batch["key"]] for batch in keyed] == whole[0]
    assert list(loader(reseed=False)) != whole[0]
    dataset.close()


def test_collate_randomness_depends_on_the_batch(dataset: StreamingDataset) -> None:
    first = list(loader_of(dataset, batch_size=9, collate_fn=drawn))
    again = loader_of(dataset, batch_size=9, collate_fn=drawn)
    again.load_state_dict(again.state_after(4))
    assert list(again) == first[4:]
    assert len({batch[0] for batch in first}) == len(first)


def test_state_of_other_augmentation_is_refused(dataset: StreamingDataset) -> None:
    """Without a shuffle the seed decides nothing else; and what does not draw may have any."""
    options: dict[str, Any] = {"batch_size": 9, "shuffle": False}
    state = loader_of(dataset, collate_fn=drawn, seed=1, **options).state_dict()
    with pytest.raises(StateMismatchError, match="seed was 1 and is 2"):
        loader_of(dataset, collate_fn=drawn, seed=2, **options).load_state_dict(state)
    plain = StreamingLoader(dataset, batch_size=9, seed=1)
    StreamingLoader(dataset, batch_size=9, seed=2).load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("shape", "tail"),
    [
        *(((2, 3), tail) for tail in ("emit", "pad", "drop")),
        *(((1, 3), "pad"), ((2, 1), "emit"), ((3, 2), "drop"), ((4, 1), "pad"), ((5, 4), "emit")),
    ],
)
def test_order_and_rows_equal_one_workers(dataset: StreamingDataset, shape: Shape, tail: Tail) -> None:
    alone = Cluster(dataset, (1, 1), global_batch_size=15, tail=tail)
    assert Cluster(dataset, shape, global_batch_size=15, tail=tail).take(27) == alone.take(27)


def test_an_epoch_has_every_sample_once(dataset: StreamingDataset) -> None:
    loader = loader_of(dataset, batch_size=7)
    epochs = [[row for batch in loader for row in batch] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(100))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert len(loader) == 15


def test_without_a_shuffle_it_is_as_stored(dataset: StreamingDataset) -> None:
    assert [row for batch in loader_of(dataset, batch_size=8, shuffle=False) for row in batch] == list(range(100))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(0, 23)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from(["emit", "pad", "drop"]),
)
def test_it_goes_on_in_any_shape_from_any_step(
    dataset: StreamingDataset, legs: list[tuple[Shape, int]], partitions: int, tail: Tail
) -> None:
    options: dict[str, Any] = {"global_batch_size": 10, "partitions": partitions, "tail": tail}
    whole = Cluster(dataset, (1, 1), **options).take(sum(steps for _, steps in legs) + 15)
    got: list[list[int]] = []
    cluster = None
    for shape, steps in [*legs, ((1, 2), 15)]:
        cluster = Cluster(dataset, shape, cluster, **options)
        got += cluster.take(steps)
    assert got == whole


@pytest.mark.parametrize("steps", [1, 2, 5, 9, 10, 11])  # an epoch has ten
def test_other_batch_size_resumes_at_the_same_row(dataset: StreamingDataset, steps: int) -> None:
    before = Cluster(dataset, (2, 2), batch_size=5)
    rows = [row for batch in before.take(steps) for row in batch]
    after = Cluster(dataset, (3, 1), before, batch_size=2)
    while len(rows) < 150:
        rows += after.take(1)[0]
    whole = [row for batch in Cluster(dataset, (1, 1), batch_size=1).take(len(rows)) for row in batch]
    assert rows == whole


@pytest.mark.parametrize(("shape", "steps"), [((1, 2), 1), ((1, 2), 15), ((2, 3), 3), ((2, 3), 16), ((2, 3), 30)])
def test_other_batch_size_keeps_the_workers_turn(dataset: StreamingDataset, shape: Shape, steps: int) -> None:
    cluster = Cluster(dataset, shape, global_batch_size=7)
    rows = [row for batch in cluster.take(steps) for row in batch]
    for batch in (4, 11, 4, 7):
        cluster = Cluster(dataset, shape, cluster, global_batch_size=batch)
        rows += [row for batch in cluster.take(5) for row in batch]
    whole = [row for batch in Cluster(dataset, (1, 1), batch_size=1).take(len(rows)) for row in batch]
    assert rows == whole


def test_replicas_go_on_where_they_were(dataset: StreamingDataset) -> None:
    """Two boxes that give the same, as with tensor parallelism; saved where it is their second worker's turn."""

    def replicas(before: Cluster | None = None) -> Cluster:
        return Cluster(dataset, (2, 2), before, rank=(0, 1), batch_size=7)

    first = replicas()
    got = first.take(3)
    got += replicas(first).take(20)
    assert [batch[::2] for batch in got] == [batch[1::2] for batch in got]
    assert [batch[::2] for batch in got] == Cluster(dataset, (1, 1), batch_size=7).take(23)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more worker processes than processors
@pytest.mark.parametrize("workers", [0, 3])
def test_in_a_plain_torch_dataloader(dataset: StreamingDataset, workers: int) -> None:
    whole = Cluster(dataset, (1, 1), batch_size=9).take(24)
    loader = loader_of(dataset, batch_size=9)
    got = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        got += list(torch.utils.data.DataLoader(loader, batch_size=None, num_workers=workers))
    assert got == whole
    loader.set_epoch(0)
    again = loader_of(dataset, batch_size=9)
    again.load_state_dict(loader.state_after(5))
    assert list(torch.utils.data.DataLoader(again, batch_size=None, num_workers=workers)) == whole[5:12]
    again.load_state_dict(loader.state_after(12))
    assert list(again) == whole[12:24], "the end of an epoch is the beginning of the next"


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_stateful_dataloader(dataset: StreamingDataset, workers: int) -> None:
    def made() -> Any:
        return StatefulDataLoader(loader_of(dataset, batch_size=9), batch_size=None, num_workers=workers)

    whole = list(made())
    first = made()
    stream: Iterator[Any] = iter(first)
    got = [next(stream) for _ in range(5)]
    again = made()
    again.load_state_dict(first.state_dict())
    assert got + list(again) == whole


def test_state_is_integers_and_names_its_order(dataset: StreamingDataset) -> None:
    loader = loader_of(dataset, batch_size=4)
    stream = iter(loader)
    for _ in range(3):
        next(stream)
    state = loader.state_dict()
    assert (state["epoch"], state["start"], state["done"]) == (0, 0, 3)
    assert state["order"]["data"] == dataset.fingerprint
    assert isinstance(loader, RestartableDataLoader)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seed": 10}, "seed was 9 and is 10"),
        ({"shuffle": False}, "shuffle_block was 30 and is None"),
        ({"shuffle_block": None}, "shuffle_block was 30 and is 'all'"),
        ({"partitions": 2}, "partitions was 1 and is 2"),
        ({"tail": "drop"}, "tail was 'emit' and is 'drop'"),
        ({"epoch_size": 60}, r"samples was \[100\] and is \[60\]"),
    ],
)
def test_state_of_other_order_is_refused_by_name(dataset: StreamingDataset, changed: dict[str, Any], says: str) -> None:
    state = loader_of(dataset, batch_size=4).state_dict()
    other = loader_of(dataset, batch_size=4, **changed)
    with pytest.raises(StateMismatchError, match=says):
        other.load_state_dict(state)
    with pytest.warns(UserWarning, match=says):
        other.load_state_dict(state, strict=False)


def test_worker_state_fits_its_own_topology_only(dataset: StreamingDataset) -> None:
    cluster = Cluster(dataset, (1, 2), batch_size=4)
    cluster.take(2)
    with pytest.raises(
        StateMismatchError, match="aggregate_state_dict or state_after returned, which fits any number of workers"
    ):
        loader_of(dataset, batch_size=4).load_state_dict(cluster.workers[0].state_dict())


@pytest.mark.parametrize(
    ("spoilt", "error"),
    [
        ({"epoch": -1}, StateCorruptError),
        ({"done": "3"}, StateCorruptError),
        ({"start": True}, StateCorruptError),
        ({"topology": {}}, StateCorruptError),
        ({"topology": {"boxes": 0, "workers": 1, "batch": 4}}, StateCorruptError),
        ({"start": 101}, StateCorruptError),
        ({"start": -1}, StateCorruptError),
        ({"start": -(1 << 62)}, StateCorruptError),
        ({"skip": 3}, StateCorruptError),
        ({"skip": [[1, 2, 3]]}, StateCorruptError),
        ({"skip": [[2, 1]]}, StateCorruptError),
        ({"skip": [[1, "2"]]}, StateCorruptError),
        ({"done": 101}, StateCorruptError),
        ({"epoch": 10**30}, StateCorruptError),
        ({"first": 1}, StateCorruptError),
        ({"others": None, "workers": 1}, StateCorruptError),
        ({"others": [1], "workers": 1}, StateCorruptError),
        ({"format": 0}, StateCorruptError),
        ({"format": 4}, StateVersionError),
        ({"order": 3}, StateCorruptError),
    ],
)
def test_a_state_that_cannot_be_is_refused(
    dataset: StreamingDataset, spoilt: dict[str, Any], error: type[Exception]
) -> None:
    loader = loader_of(dataset, batch_size=4)
    with pytest.raises(error):
        loader.load_state_dict({**loader.state_dict(), **spoilt})
    for other in ({}, None, {"model": 3}, [1]):
        with pytest.raises(StateMismatchError, match="got one of another loader"):
            loader.load_state_dict(other)


def test_numbers_of_numpy_s_and_torch_s_do(dataset: StreamingDataset) -> None:
    numbers = {"seed": np.int64(9), "shuffle_block": np.int32(30), "partitions": torch.tensor(1)}
    loader = loader_of(
        dataset, batch_size=np.int64(4), epoch_size=np.int64(90), rank=(np.int64(0), np.int64(1)), **numbers
    )
    stream = iter(loader)
    first = next(stream)
    other = loader_of(dataset, batch_size=4, epoch_size=90)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert list(other) == list(stream)
    other.set_epoch(0)
    assert next(iter(other)) == first


def test_epoch_of_a_loaded_state_is_continued(dataset: StreamingDataset) -> None:
    """The usual loop says the epoch's number before each epoch, also before the first one that is resumed."""
    loader = loader_of(dataset, batch_size=10)
    whole = [list(loader) for _ in range(3)]
    loader.set_epoch(1)
    state = loader.state_after(4)
    loader.load_state_dict(state)
    got = []
    for epoch in range(state["epoch"], 3):
        loader.set_epoch(epoch)
        got.append(list(loader))
    assert got == [whole[1][4:], whole[2]]
    loader.set_epoch(1)
    assert next(iter(loader)) == whole[1][0]
    loader.set_epoch(1)
    assert next(iter(loader)) == whole[1][0]
    for number in (-1, 0.5):
        with pytest.raises(InvalidArgumentError, match=f"epoch must be .* got {number}"):
            loader.set_epoch(cast(Any, number))
    with pytest.raises(InvalidArgumentError, match="batches must be at least 0, got -1"):
        loader.state_after(-1)


def test_a_batch_can_be_passed_over(dataset: StreamingDataset) -> None:
    loader = loader_of(dataset, batch_size=10)
    whole = list(loader)
    loader.set_epoch(0)
    stream: Any = iter(loader)
    assert next(stream) == whole[0]
    stream.skip_batch()
    assert list(stream) == whole[2:]


def test_a_batch_that_fails_is_tried_again(dataset: StreamingDataset) -> None:
    fails = [True]

    def collate(samples: list[Any]) -> Any:
        if fails and fails.pop():
            raise ValueError("once")
        return collated(samples)

    loader = loader_of(dataset, batch_size=10, collate_fn=collate)
    stream = iter(loader)
    with pytest.raises(ValueError, match="once"):
        next(stream)
    assert loader.state_dict()["done"] == 0
    assert [*stream] == list(loader_of(dataset, batch_size=10))


def test_stop_iteration_in_collate_is_an_error(dataset: StreamingDataset) -> None:
    def collate(samples: list[Any]) -> Any:
        return next(sample for sample in samples if sample["number"] < 0)

    with pytest.raises(DatasetError, match="StopIteration came out of the collate_fn"):
        list(loader_of(dataset, batch_size=10, collate_fn=collate))


def test_rank_of_a_distributed_job_gets_its_rows(dataset: StreamingDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(loader_of(dataset, batch_size=10))
    monkeypatch.setenv("WORLD_SIZE", "2")
    rows = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        rows.append(list(loader_of(dataset, batch_size=5)))
    assert [[row for pair in zip(*pieces, strict=True) for row in pair] for pieces in zip(*rows, strict=True)] == whole
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(InvalidArgumentError, match="rank must be at least 0 and below the 2 ranks, got 2"):
        loader_of(dataset, batch_size=5)
    assert list(loader_of(dataset, batch_size=5, rank=(0, 2))) == rows[0]
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(InvalidArgumentError, match="RANK=first"):
        loader_of(dataset, batch_size=5)


def test_next_epoch_begins_at_the_loaded_state(dataset: StreamingDataset) -> None:
    loader = loader_of(dataset, batch_size=20)
    stream = iter(loader)
    got = [next(stream) for _ in range(2)]
    state = loader.state_dict()
    rest = list(stream)
    for _ in range(2):
        loader.load_state_dict(state)
        assert list(loader) == rest
    assert got + rest == list(loader_of(dataset, batch_size=20))


def test_state_of_an_epochs_end_begins_the_next(dataset: StreamingDataset) -> None:
    loader = loader_of(dataset, batch_size=20)
    stream = iter(loader)
    for _ in range(5):
        next(stream)
    states = [loader.state_dict()]
    assert next(stream, None) is None
    states.append(loader.state_dict())
    second = list(loader)
    for state in states:
        loader.load_state_dict(state)
        assert list(loader) == second


def test_abandoned_iterator_yields_nothing_more(dataset: StreamingDataset) -> None:
    loader = loader_of(dataset, batch_size=20)
    left = iter(loader)
    next(left)
    stream = iter(loader)
    assert next(left, None) is None
    assert len(list(stream)) == 5
    assert next(stream, None) is None, "an epoch that is over stays over"


def test_rest_is_carried_into_the_next_epoch(dataset: StreamingDataset) -> None:
    """Also where boxes and batches change on the way, and samples ahead are left out."""
    rows: list[int] = []
    cluster = None
    for shape, batch, steps in [((2, 2), 30, 4), ((1, 1), 7, 12), ((3, 1), 11, 5)]:
        cluster = Cluster(dataset, shape, cluster, global_batch_size=batch, tail="carry", partitions=2)
        rows += [row for batch in cluster.take(steps) for row in batch]
    one = loader_of(dataset, batch_size=1, partitions=2)
    whole = [row for _ in range(4) for batch in one for row in batch]
    assert rows == whole[: len(rows)]
    skip = [range(len(rows) + 5, len(rows) + 15)]
    around = Cluster(dataset, (2, 1), cluster, global_batch_size=10, tail="carry", partitions=2, skip=skip).take(1)[0]
    assert around == whole[len(rows) :][:5] + whole[len(rows) :][15:20]


def test_a_key_brings_back_its_sample(dataset: StreamingDataset) -> None:
    loader = loader_of(dataset, batch_size=7, keys="key")
    for batch in [*loader, *loader]:
        assert [loader.restore_sample(key)["number"] for key in batch["key"]] == batch["batch"]
    key = next(iter(loader))["key"][0]
    with pytest.raises(StateMismatchError, match="another dataset, seed or order"):
        loader_of(dataset, batch_size=7, partitions=2).restore_sample(key)


@pytest.mark.filterwarnings("ignore:the epoch's last batch has fewer samples than there are boxes")
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (3, 2), (5, 4)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_tiny_datasets_do(tmp_path: Path, shape: Shape, count: int) -> None:
    dataset = StreamingDataset(local=numbers(tmp_path, count))
    batches = Cluster(dataset, shape, global_batch_size=10).take(3)
    assert all(set(batch) == set(range(count)) and len(batch) == count for batch in batches)


def test_epochs_leave_nothing_behind(dataset: StreamingDataset) -> None:
    loader = loader_of(dataset, batch_size=20)
    for _ in range(3):
        list(loader)
    gc.collect()
    tracemalloc.start()
    for _ in range(15):
        list(loader)
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 32 << 10  # what Python and numpy keep of small objects ends at 24 KiB, after hundreds of epochs


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, InvalidArgumentError, "either batch_size"),
        ({"batch_size": 3, "global_batch_size": 3}, InvalidArgumentError, "either batch_size"),
        ({"batch_size": 0}, InvalidArgumentError, "batch_size=0: each of 1 boxes needs at least one row"),
        ({"batch_size": 3, "tail": "none"}, InvalidArgumentError, "tail must be one of .* got 'none'"),
        ({"batch_size": 3, "partitions": 0}, InvalidArgumentError, "partitions must be at least 1, got 0"),
        ({"batch_size": 3, "shuffle_block": -1}, InvalidArgumentError, "shuffle_block must be at least 1, got -1"),
        ({"batch_size": 101, "tail": "drop"}, DatasetError, "100 samples make no batch of 101"),
        ({"batch_size": 3, "interleave": "batches", "partitions": 2}, InvalidArgumentError, "a multiple of partitions"),
        (
            {"batch_size": 3, "interleave": "batches", "tail": "carry"},
            InvalidArgumentError,
            "each would mix two streams",
        ),
        ({"batch_size": 3, "interleave": "batches", "skip": [range(3, 7)]}, InvalidArgumentError, "sample 7"),
        ({"batch_size": 101, "tail": "carry"}, DatasetError, "100 samples make no batch of 101"),
        ({"batch_size": 3, "interleave": "mixed"}, InvalidArgumentError, "interleave must be one of .* got 'mixed'"),
        ({"batch_size": 2.5}, InvalidArgumentError, "batch_size must be a whole number, got 2.5"),
        ({"global_batch_size": "4"}, InvalidArgumentError, "global_batch_size must be a whole number, got '4'"),
        ({"batch_size": 3, "seed": 1.0}, InvalidArgumentError, "seed must be a whole number, got 1.0"),
        ({"batch_size": 3, "rank": (0, 1.0)}, InvalidArgumentError, "ranks must be a whole number, got 1.0"),
    ],
)
def test_settings_that_cannot_be_meant(
    dataset: StreamingDataset, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        StreamingLoader(dataset, **cast(Any, options))
