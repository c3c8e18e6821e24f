"""A sharded dataset through coordinator, worker daemons and lanes: one order, whatever the shape and whoever dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sharded
from chains import kill_runners, runners
from neighbours import beside
from shard_server import Fault, ShardServer

from penstock.client import Appliance, DataExecutor, DataLoader
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


def loader_of(where: object, cache: Path, input_fn: Any = sharded.streamed, *arguments: Any) -> DataLoader:
    options = {"global_batch_size": BATCH, "shuffle": True, "shuffle_block": 100}
    return DataLoader(input_fn, str(where), str(cache), *arguments, **options)


def train(
    shared: Appliance, job: str, loaders: list[DataLoader], workers: int, steps: int
) -> tuple[list[list[int]], list[Any]]:
    """Global batches of numbers in the order of the epoch, from one box for each loader; and their states."""

    def one(box: int) -> tuple[list[list[int]], Any]:
        with beside(shared, box=box, num_boxes=len(loaders), num_workers_per_box=workers, job=job) as appliance:
            executor = DataExecutor(loaders[box], num_steps=steps, appliance=appliance)
            rows = [batch["number"].tolist() for batch in executor]
            return rows, loaders[box].state_dict()

    with ThreadPoolExecutor(len(loaders)) as pool:
        rows, states = zip(*pool.map(one, range(len(loaders))), strict=True)
    return [_in_order(list(step)) for step in zip(*rows, strict=True)], list(states)


def _in_order(rows: list[list[int]]) -> list[int]:
    boxes = len(rows)
    return [rows[at % boxes][at // boxes] for at in range(sum(map(len, rows)))]


@pytest.fixture(scope="module")
def whole(appliance: Appliance, numbers: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Return one and a half epochs from one worker."""
    got, _ = train(appliance, "whole", [loader_of(numbers, tmp_path_factory.mktemp("whole"))], 1, 65)
    assert sorted(row for batch in got[:42] for row in batch) == list(range(SAMPLES))
    return got


# Saved in the middle of an epoch of 42 steps, at its end, one step before that and one behind it.
@pytest.mark.parametrize("steps", [[7, 35], [41, 2]])
def test_resumes_on_any_topology_across_epochs(
    appliance: Appliance, numbers: Path, whole: list[list[int]], tmp_path: Path, steps: list[int]
) -> None:
    got: list[list[int]] = []
    state = None
    shapes = [(1, 2), (2, 3), (1, 1)]
    for leg, ((boxes, workers), count) in enumerate(zip(shapes, [*steps, 65 - sum(steps)], strict=True)):
        loaders = [loader_of(numbers, tmp_path) for _ in range(boxes)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        rows, states = train(appliance, f"resume{steps[0]}.{leg}", loaders, workers, count)
        got += rows
        state = states[0]
    assert got == whole


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_a_killed_runner_changes_nothing(
    appliance: Appliance, numbers: Path, whole: list[list[int]], tmp_path: Path
) -> None:
    rows, before = [], runners()
    # Many more steps than are read: a runner that has made all batches is gone before it can be killed.
    executor = DataExecutor(loader_of(numbers, tmp_path), num_steps=10_000, appliance=appliance)
    for batch in executor:
        rows.append(batch["number"].tolist())
        if executor.step in (10, 41, 50):
            kill_runners(before)
        if executor.step >= len(whole) and executor.stats.recoveries:  # batches made before the kill come first
            break
    assert rows[: len(whole)] == whole


def test_through_worker_processes_of_a_dataloader(
    appliance: Appliance, numbers: Path, whole: list[list[int]], tmp_path: Path
) -> None:
    loader = loader_of(numbers, tmp_path, sharded.forked, 2)
    got, _ = train(appliance, "forked", [loader], 1, 42)
    assert got == whole[:42]


def test_each_file_is_downloaded_once_for_all(
    appliance: Appliance, numbers: Path, whole: list[list[int]], tmp_path: Path
) -> None:
    """Two boxes of two workers on this host; the server fails now and then."""
    with ShardServer(numbers) as server:
        failing = ("index.json", "shard.00001.mds.zstd", "shard.00007.mds.zstd")
        for name in failing:
            server.faults[name] = [Fault(status=503), Fault(cut_after=20)]
        loaders = [loader_of(server.url, tmp_path) for _ in range(2)]
        got, _ = train(appliance, "server", loaders, 2, 65)
        files = {file.name for file in numbers.iterdir()}
        tries = {name: server.requests[name] for name in files}
    assert got == whole
    assert tries == {name: 3 if name in failing else 1 for name in files}


def test_file_missing_on_a_server_is_named(
    appliance: Appliance, numbers: Path, whole: list[list[int]], tmp_path: Path
) -> None:
    with ShardServer(numbers) as server:
        server.faults["shard.00003.mds.zstd"] = [Fault(status=404, stays=True)]
        with pytest.raises(errors.ShardUnavailableError, match=r"http://127\.0\.0\.1:\d+/shard\.00003\.mds\.zstd.*404"):
            train(appliance, "gone", [loader_of(server.url, tmp_path)], 2, 65)


def test_what_cannot_be_read_is_an_error_by_name(appliance: Appliance, numbers: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.ShardUnavailableError, match=f"{tmp_path}/nothing"):
        train(appliance, "missing", [loader_of(tmp_path / "nothing", tmp_path / "cache")], 1, 1)
