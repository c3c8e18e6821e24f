"""A sharded dataset through coordinator, workers and lanes: each file is fetched once for all workers of a host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sharded
from neighbours import beside
from shard_server import Fault, ShardServer

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.data import MDSWriter
from penstock.proto import errors

SAMPLES, BATCH = 1000, 24


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    with MDSWriter(
        folder, {"number": "int", "text": "str"}, compression="zstd", hashes=["sha1"], size_limit=600
    ) as out:
        for number in range(SAMPLES):
            out.write({"number": number, "text": f"sample {number}"})
    return folder


def loader_of(where: object, cache: Path) -> DataLoader:
    options = {"global_batch_size": BATCH, "shuffle": True, "shuffle_block": 100}
    return DataLoader(sharded.streamed, str(where), str(cache), **options)


def train(shared: Appliance, job: str, loaders: list[DataLoader], workers: int, steps: int) -> list[list[int]]:
    """Global batches of numbers in the order of the epoch, from one box for each loader."""

    def one(box: int) -> list[list[int]]:
        with beside(shared, box=box, num_boxes=len(loaders), num_workers_per_box=workers, job=job) as appliance:
            executor = DataExecutor(loaders[box], num_steps=steps, appliance=appliance)
            return [batch["number"].tolist() for batch in executor]

    with ThreadPoolExecutor(len(loaders)) as pool:
        steps_of_all = zip(*pool.map(one, range(len(loaders))), strict=True)
    boxes = len(loaders)
    return [[rows[at % boxes][at // boxes] for at in range(sum(map(len, rows)))] for rows in steps_of_all]


def test_each_file_is_downloaded_once_for_all(appliance: Appliance, numbers: Path, tmp_path: Path) -> None:
    """Two boxes of two workers on this host; the server fails now and then."""
    with FakeAppliance(num_workers_per_box=1, seed=7) as alone:
        executor = DataExecutor(loader_of(numbers, tmp_path / "alone"), num_steps=65, appliance=alone)
        whole = [batch["number"].tolist() for batch in executor]
    assert sorted(row for batch in whole[:42] for row in batch) == list(range(SAMPLES))
    with ShardServer(numbers) as server:
        failing = ("index.json", "shard.00001.mds.zstd", "shard.00007.mds.zstd")
        for name in failing:
            server.faults[name] = [Fault(status=503), Fault(cut_after=20)]
        loaders = [loader_of(server.url, tmp_path) for _ in range(2)]
        got = train(appliance, "server", loaders, 2, 65)
        files = {file.name for file in numbers.iterdir()}
        tries = {name: server.requests[name] for name in files}
    assert got == whole
    assert tries == {name: 3 if name in failing else 1 for name in files}


def test_what_cannot_be_read_is_an_error_by_name(appliance: Appliance, tmp_path: Path) -> None:
    with pytest.raises(errors.ShardUnavailableError, match=f"{tmp_path}/nothing"):
        train(appliance, "missing", [loader_of(tmp_path / "nothing", tmp_path / "cache")], 1, 1)
