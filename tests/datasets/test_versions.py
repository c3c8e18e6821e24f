"""Datasets that grow while they are read: versions, and the states of loaders over them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from all_workers import AllWorkers, saved
from forked import join_all
from shardsets import numbers

from penstock.client import DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance, LostWorker
from penstock.data import MDSWriter, Stream, StreamingDataset, StreamingLoader, merge_index
from penstock.data.formats.index import INDEX, version_index
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardUnavailableError, StateMismatchError


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path, bucket: str) -> str:
    """Address of an empty folder."""
    return str(tmp_path / "data") if request.param == "local" else bucket


def append(place: Any, first: int, count: int = 20, **settings: Any) -> int | None:
    with MDSWriter(place, {"number": "int"}, size_limit=294, append=True, **settings) as writer:
        for number in range(first, first + count):
            writer.write({"number": number})
    return writer.version


def write(place: Any, count: int, first: int = 0, **settings: Any) -> None:
    """Write a dataset without versions."""
    numbers(place, count, first, **settings)


def read(place: str, cache: Path, **settings: Any) -> list[int]:
    with closing(StreamingDataset(place, cache, **settings)) as dataset:
        return [sample["number"] for sample in dataset[:]]


@pytest.mark.parametrize("hashes", [[], ["sha1"]])
def test_reader_of_a_version_is_not_disturbed(place: str, hashes: list[str], tmp_path: Path) -> None:
    """Readers that opened the dataset before it had versions go on, too."""
    write(place, 30, hashes=hashes)
    unversioned = StreamingDataset(place, tmp_path / "a", cache_limit=500)
    assert unversioned[0] == {"number": 0}
    assert append(place, 30, 10, hashes=hashes) == 2
    first = StreamingDataset(place, tmp_path / "b", version=1)
    assert append(place, 40, 10, hashes=hashes) == 3
    for dataset in (unversioned, first):
        assert [sample["number"] for sample in dataset[:]] == list(range(30))
        dataset.close()
    assert unversioned.fingerprint == first.fingerprint
    assert (unversioned.versions, first.versions) == ([None], [1])
    assert read(place, tmp_path / "c") == list(range(50))
    assert read(place, tmp_path / "c", version=2) == list(range(40))
    with pytest.raises(DatasetError, match=r"must have version 4, but its index index-000004.json is missing"):
        read(place, tmp_path / "c", version=4)


def test_torn_index_of_a_version_is_named(tmp_path: Path) -> None:
    append(tmp_path / "data", 0)
    append(tmp_path / "data", 1)
    path = tmp_path / "data" / version_index(2)
    whole = path.read_bytes()
    for size in (0, 10, 60, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DatasetError, match=r"index-000002.json(: the index is invalid| must be)") as caught:
            StreamingDataset(str(tmp_path / "data"))
        assert size > 20 or "got a damaged file, which names no version. Restore the file" in caught.value.message
    path.write_bytes((tmp_path / "data" / version_index(1)).read_bytes())
    with pytest.raises(DatasetError, match=r"must be the index of version 2, got that of version 1\. Restore"):
        StreamingDataset(str(tmp_path / "data"), version=2)
    path.write_bytes((tmp_path / "data" / INDEX).read_bytes())
    assert len(StreamingDataset(str(tmp_path / "data"))) == 40


def loader(place: str, cache: Path, version: Any = None, **settings: Any) -> Callable[[], StreamingLoader]:
    def make() -> StreamingLoader:
        dataset = StreamingDataset(streams=[Stream(place, cache, version=version)])
        options = {"global_batch_size": 6, "shuffle": True, "seed": 1, "collate_fn": list, **settings}
        return StreamingLoader(dataset, **options)

    return make


@pytest.mark.parametrize(("place", "asked"), [("local", "newest"), ("remote", None)], indirect=["place"])
def test_state_in_an_epoch_keeps_its_version(place: str, asked: Any, tmp_path: Path) -> None:
    assert append(place, 0, 60) == 1
    make = loader(place, tmp_path / "cache", asked)
    whole = AllWorkers(make, (1, 1)).take(14)  # an epoch and a half
    fleet = AllWorkers(make, (2, 1))
    got = fleet.take(3)
    assert append(place, 60, 30) == 2
    fleet.lose(0)
    fleet.lose(1)
    assert [worker.dataset.versions for worker in fleet.workers] == [[1], [1]]
    got += fleet.take(1)
    for topology, steps in (((1, 2), 3), ((1, 1), 7)):
        fleet = AllWorkers(make, topology, fleet)
        assert fleet.workers[0].dataset.versions == [1]
        got += fleet.take(steps)
    assert got == whole, "also over epochs that begin in a run"


@pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
def test_new_runner_keeps_the_version(tmp_path: Path) -> None:
    """A worker that starts again at the beginning of its stream, after the next version was published."""
    append(tmp_path, 0, 60)

    def streamed(publish: bool) -> list[list[int]]:
        got = []
        with FakeAppliance(num_workers_per_box=2, faults=[LostWorker(8)]) as appliance:
            made = DataLoader(loader(str(tmp_path), tmp_path, collate_fn=number_tensor))
            for batch in DataExecutor(made, num_steps=25, appliance=appliance):
                got.append(batch.tolist())
                if publish and len(got) == 5:
                    append(tmp_path, 60, 30)
        return got

    assert streamed(publish=False) == streamed(publish=True)


def number_tensor(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([sample["number"] for sample in samples])


@pytest.mark.parametrize(
    ("place", "topology", "steps"), [("local", (1, 1), 0), ("remote", (2, 1), 10)], indirect=["place"]
)
def test_newest_version_begins_with_an_epoch(place: str, topology: Any, steps: int, tmp_path: Path) -> None:
    append(place, 0, 60)
    fleet = AllWorkers(loader(place, tmp_path / "cache", "newest"), topology)
    fleet.take(steps)
    append(place, 60, 30)
    for asked, version, count in (("newest", 2, 90), (None, 1, 60)):
        moved = AllWorkers(loader(place, tmp_path / "cache", asked), (1, 2), fleet)
        assert moved.workers[0].dataset.versions == [version]
        assert sorted(row["number"] for batch in moved.take(count // 6) for row in batch) == list(range(count))
        assert moved.state()["order"]["versions"] == [version]


def state_in(made: StreamingLoader) -> Any:
    next(iter(made))
    return saved(made.state_dict())


def test_other_version_is_named(place: str, tmp_path: Path) -> None:
    append(place, 0, 60)
    state = state_in(loader(place, tmp_path / "cache")())
    append(place, 60, 30)
    with pytest.raises(StateMismatchError, match=r"versions\[0\] was 1 and is 2 now"):
        loader(place, tmp_path / "cache", 2)().load_state_dict(state)


def test_carried_samples_keep_the_version(place: str, tmp_path: Path) -> None:
    """At the end of an epoch whose last samples come in the next one's first batch."""
    append(place, 0, 60)
    make = loader(place, tmp_path / "cache", "newest", tail="carry", global_batch_size=7)
    ended = make()
    assert len(list(ended)) == 8
    append(place, 60, 30)
    following = make()
    following.load_state_dict(saved(ended.state_dict()))
    assert following.dataset.versions == [1]


def test_state_from_before_versions_goes_on(place: str, tmp_path: Path) -> None:
    write(place, 60, hashes=["sha1"])
    make = loader(place, tmp_path / "before")
    whole = AllWorkers(make, (1, 1)).take(10)
    fleet = AllWorkers(make, (1, 2))
    got = fleet.take(3)
    append(place, 60, 30, hashes=["sha1"])
    fleet = AllWorkers(loader(place, tmp_path / "after"), (2, 1), fleet)
    assert got + fleet.take(7) == whole
    assert fleet.workers[0].dataset.versions == [1]


def test_versions_are_never_replaced(place: str) -> None:
    append(place, 0)
    for replace in (partial(write, place, 10, exist_ok=True), partial(merge_index, place)):
        with pytest.raises(DatasetError, match=r"must not have versions when it is replaced.*append=True"):
            replace()
    with pytest.raises(DatasetError, match=r"must be empty, .*append=True to publish"):
        write(place, 10)
    with pytest.raises(
        DatasetError, match=r"column_names of the appended shards must be \['number'\], .* got \['other'\]"
    ):
        MDSWriter(place, {"other": "int"}, append=True)
    with pytest.raises(InvalidArgumentError, match='version must be a number of at least 0, "newest" or None, got -1'):
        StreamingDataset(place, version=-1)


def write_bad(place: str) -> None:
    with MDSWriter(place, {"number": "int"}, size_limit=294, append=True) as writer:
        for number in [*range(30), "no number"]:
            writer.write({"number": number})


def test_failed_append_publishes_nothing(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves shards only where an index lists them."""
    append(place, 0)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DatasetError, match="column 'number'"):
        write_bad(place)
    assert read(place, tmp_path / "cache") == list(range(20))
    plain = RemoteFolder.write

    def fail(at: str, after: bool) -> Callable[..., None]:
        def write(self: RemoteFolder, name: str, data: bytes, **options: Any) -> None:
            if name != at or after:
                plain(self, name, data, **options)
            if name == at:
                raise ShardUnavailableError("the power failed")

        return write

    for at, after, versions, count in (
        (version_index(2), False, [1], 20),
        (INDEX, False, [1, 2], 20),
        (INDEX, True, [1, 2, 3], 40),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(RemoteFolder, "write", fail(at, after))
            with pytest.raises(ShardUnavailableError, match="the power failed"):
                append(place, 20)
        assert len(read(place, tmp_path / f"{at} {after}")) == count
        if before == ["data"]:
            folders = {path.name.split("-")[0] for path in (tmp_path / "data").iterdir() if path.is_dir()}
            assert folders == {"appended"}
        for version in versions[1:]:
            assert read(place, tmp_path / f"{at} {after} {version}", version=version) == list(range(40))
    assert append(place, 40) == 4, "a version's index is never written again"
    assert read(place, tmp_path / "other") == list(range(60))


def test_close_that_failed_can_be_called_again(tmp_path: Path) -> None:
    for appends in (True, False):
        writer = MDSWriter(tmp_path / str(appends), {"number": "int"}, append=appends)
        writer.write({"number": 7})
        index = writer.out.parent / INDEX if appends else writer.out / INDEX
        index.mkdir()
        with pytest.raises((OSError, ShardUnavailableError)):
            writer.close()
        index.rmdir()
        writer.close()
        assert read(str(tmp_path / str(appends)), tmp_path) == [7]


def test_writers_append_at_the_same_time(tmp_path: Path) -> None:
    append(tmp_path, 0)
    join_all(*(partial(append, tmp_path, first) for first in (20, 40, 60)))
    with closing(StreamingDataset(tmp_path)) as dataset:
        assert dataset.versions == [4]
        assert sorted(sample["number"] for sample in dataset[:]) == list(range(80))


def test_parts_are_appended_by_merging(place: str, tmp_path: Path) -> None:
    write(f"{place}/b", 10)
    merge_index(place, append=True)
    write(f"{place}/a", 10, first=10)
    merge_index(place, append=True)
    merge_index(place, append=True)  # there is nothing new
    assert read(place, tmp_path / "cache") == list(range(20))
    assert read(place, tmp_path / "cache", version=1) == list(range(10))
    with pytest.raises(DatasetError, match="must have version 3"):
        read(place, tmp_path / "cache", version=3)
