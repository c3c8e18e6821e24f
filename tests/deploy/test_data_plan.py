"""`penstock data plan` beside what a run fetches."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from all_workers import AllWorkers
from typer.testing import CliRunner

from penstock.data import MDSWriter, StreamingDataset, StreamingLoader, convert_dataset
from penstock.data.fetch_plan import Fetches, PlannedRun, planned
from penstock.deploy.cli.main import app

ROWS, SHARD = 400, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "set"
    with MDSWriter(out=str(path), columns={"n": "int"}, size_limit=400) as writer:
        for number in range(ROWS):
            writer.write({"n": number})
    return path


def plan(folder: Path, *arguments: str) -> Any:
    done = CliRunner().invoke(app, ["data", "plan", str(folder), *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.parametrize(("boxes", "nodes", "block", "partitions"), [(1, 1, None, 1), (4, 2, 64, 4), (4, 4, 64, 1)])
def test_plan_is_what_boxes_read(folder: Path, boxes: int, nodes: int, block: int | None, partitions: int) -> None:
    """Without a limit a node fetches each shard that its boxes read once."""
    dataset = StreamingDataset(local=folder)
    sizes = dataset.sizes[0]

    def made() -> StreamingLoader:
        return StreamingLoader(
            dataset,
            global_batch_size=20,
            shuffle=True,
            seed=3,
            shuffle_block=block,
            partitions=partitions,
            collate_fn=lambda rows: [int(row["n"]) for row in rows],
        )

    run = AllWorkers(made, (boxes, 1))
    read: dict[int, set[int]] = {node: set() for node in range(nodes)}
    while (rows := run.step_rows()) is not None:
        for box, own in enumerate(rows):
            read[box * nodes // boxes] |= set(np.searchsorted(np.cumsum(sizes), own, side="right").tolist())
    arguments = ["--batch", "20", "--boxes", str(boxes), "--nodes", str(nodes), "--seed", "3"]
    arguments += ["--shuffle-block", "all" if block is None else str(block), "--partitions", str(partitions)]
    found = plan(folder, *arguments)
    assert found["steps_of_an_epoch"] == ROWS // 20
    assert {node: found[f"node_{node}"]["epochs"][0]["shards"] for node in range(nodes)} == {
        node: len(shards) for node, shards in read.items()
    }
    again = plan(folder, *arguments, "--epochs", "2")
    assert all(again[f"node_{node}"]["epochs"][0] == found[f"node_{node}"]["epochs"][0] for node in range(nodes))
    assert sum(again[f"node_{node}"]["epochs"][1]["shards"] for node in range(nodes)) <= nodes * len(sizes)
    assert all(again[f"node_{node}"]["working_bytes"] <= again["bytes"] for node in range(nodes))
    dataset.close()


def test_converted_data_are_planned_by_their_own_shards(folder: Path, tmp_path: Path) -> None:
    """Their order is that of the source's shards."""
    convert_dataset(str(folder), str(tmp_path / "one"), "mds", size_limit=1 << 20)
    convert_dataset(str(tmp_path / "one"), str(tmp_path / "many"), "mds", size_limit=200)
    for name in ("one", "many"):
        found = plan(tmp_path / name, "--batch", "20", "--shuffle-block", "all")
        assert found["node_0"]["epochs"][0]["shards"] == found["shards"]
        assert found["node_0"]["epochs"][0]["bytes"] == found["bytes"]


def test_a_small_cache_fetches_again(folder: Path) -> None:
    arguments = ["--batch", "8", "--shuffle-block", "all", "--predownload", "16"]
    whole = plan(folder, *arguments)["node_0"]
    assert whole["epochs"][0]["again"] == 0
    small = plan(folder, *arguments, "--cache-limit", str(whole["working_bytes"] // 3))["node_0"]
    assert small["epochs"][0]["again"] > 0
    assert small["peak_bytes"] <= whole["working_bytes"] // 3
    assert plan(folder, *arguments, "--cache-limit", str(whole["working_bytes"]))["node_0"]["epochs"][0]["again"] == 0


def test_bandwidth_tells_when_steps_wait(folder: Path) -> None:
    dataset = StreamingDataset(local=folder)
    order = StreamingLoader(dataset, global_batch_size=20).order
    sizes = dataset.sizes[0]
    fetches = Fetches(np.cumsum(sizes) - sizes, *([np.full(len(sizes), 100)] * 2))
    counts = Counter[int]()
    for bandwidth in (10.0, 1e9):
        (node,) = planned(PlannedRun(20, 1, 1, 1, predownload=40, bandwidth=bandwidth, step_s=1.0), order, fetches)
        counts[int(bandwidth)] = node.epochs[0].waiting_steps
        total = node.epochs[0].bytes / bandwidth
        assert total - ROWS // 20 <= node.epochs[0].wait_s <= total
    assert counts[10] > counts[int(1e9)]
    dataset.close()


def test_wrong_arguments_are_errors(folder: Path) -> None:
    done = CliRunner().invoke(app, ["data", "plan", str(folder), "--batch", "8", "--nodes", "2"])
    assert done.exit_code != 0
    assert "--nodes must be at most the number of boxes, which is 1, got 2" in done.output
    done = CliRunner().invoke(app, ["data", "plan", str(folder), "--batch", "8", "--in-order", "--shuffle"])
    assert (done.exit_code, "one of --shuffle and --in-order must be given, got both" in done.output) == (2, True)
    shown = CliRunner().invoke(app, ["data", "plan", str(folder), "--batch", "8"])
    assert "node 0:" in shown.output
    assert "before the first batches: " in shown.output
