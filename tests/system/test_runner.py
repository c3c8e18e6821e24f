"""The process that user code runs in: what it finds there, and that nothing of it outlives its slot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import streams
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.worker import current_assignment


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Return what a runner finds on an appliance of its own, with seed 8, in a training job that torchrun has started.
    The appliance is closed afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "0" if "RANK" in name else "1")
        patch.setenv("MASTER_PORT", "29500")
        with Appliance(num_workers_per_box=1, num_boxes=1, box=0, seed=8) as appliance:
            (seen,) = look(appliance)
            assert Path(f"/proc/{seen['parent']}").exists()  # the slot's process, which forks one for each epoch
    return seen


def look(appliance: Appliance) -> list[dict[str, Any]]:
    return list(DataExecutor(DataLoader(streams.surroundings), appliance=appliance))


def test_seeds_follow_from_run_seed_and_slot(appliance: Appliance, alone: dict[str, Any]) -> None:
    one, two = look(appliance), look(appliance)
    assert [seen["place"] for seen in one] == [[0, 1, 0, 2, 7, 1], [0, 1, 1, 2, 7, 1]]
    assert [seen["numbers"] for seen in one] == [seen["numbers"] for seen in two]
    assert one[0]["numbers"] != one[1]["numbers"]
    assert one[0]["hash"] == one[1]["hash"] == two[0]["hash"]
    assert alone["numbers"] != one[0]["numbers"]
    assert alone["hash"] == one[0]["hash"]


def test_a_start_reports_what_it_waits_for(appliance: Appliance, tmp_path: Path) -> None:
    marker = tmp_path / "go"

    def begins() -> range:
        while not marker.exists():
            time.sleep(0.01)
        current_assignment()
        return range(3)

    steps = iter(DataExecutor(DataLoader(begins), appliance=appliance))
    run: Any = appliance._runs[-1]
    until(lambda: {view.start_stage for view in run.views} == {pb.INPUT_FN}, what="both slots wait for input_fn")
    marker.touch()
    assert int(next(steps)) == 0
    until(lambda: not any(view.start_stage for view in run.views), what="no slot starts any more")


def test_no_threads_no_grpc_no_cuda_no_secrets(alone: dict[str, Any]) -> None:
    assert alone["threads"] == 1
    assert alone["torch_threads"] == 1
    assert not alone["grpc"]
    assert alone["cuda"] == ""
    assert alone["leads_group"]
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "PENSTOCK_TOKEN"} & set(alone["environment"])


def test_runners_end_with_their_appliance(alone: dict[str, Any]) -> None:
    assert not Path(f"/proc/{alone['parent']}").exists()
