"""The process that user code runs in: what it finds there, and that nothing of it outlives its slot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import streams
from neighbours import beside
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.lane.ring import MAX_ENTRIES
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
            assert Path(f"/proc/{seen['pid']}").exists()
    return seen


def look(appliance: Appliance) -> list[dict[str, Any]]:
    return list(DataExecutor(DataLoader(streams.surroundings), appliance=appliance))


def test_seeds_follow_from_run_seed_and_slot(appliance: Appliance, alone: dict[str, Any]) -> None:
    one, two = look(appliance), look(appliance)
    assert [seen["numbers"] for seen in one] == [seen["numbers"] for seen in two]
    assert one[0]["numbers"] != one[1]["numbers"]
    assert one[0]["hash"] == one[1]["hash"] == two[0]["hash"]
    assert alone["numbers"] != one[0]["numbers"]
    assert alone["hash"] == one[0]["hash"]


def test_one_fork_server_serves_all_runs(appliance: Appliance) -> None:
    """Start a run of another job and another seed without the seconds that an interpreter with torch takes."""
    with beside(appliance, seed=99, num_workers_per_box=2) as other:
        assert {seen["parent"] for seen in look(other)} == {look(appliance)[0]["parent"]}


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


def test_the_place_of_each_worker(appliance: Appliance) -> None:
    assert [seen["place"] for seen in look(appliance)] == [[0, 1, 0, 2, 7, 1], [0, 1, 1, 2, 7, 1]]
    outside = current_assignment()
    assert (outside.global_worker_id, outside.total_num_workers) == (0, 1)


def test_no_threads_no_grpc_no_cuda_no_secrets(alone: dict[str, Any]) -> None:
    assert alone["threads"] == 1
    assert alone["torch_threads"] == 1
    assert not alone["grpc"]
    assert alone["cuda"] == ""
    assert alone["leads_group"]
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "PENSTOCK_TOKEN"} & set(alone["environment"])


def test_forks_of_user_code_die_with_the_runner(appliance: Appliance, tmp_path: Path) -> None:
    """The forked child keeps the lane's socket open: its end of file is no sign of life or death."""
    marker = tmp_path / "child"
    executor = DataExecutor(DataLoader(streams.forks_and_dies, str(marker)), appliance=appliance)
    with pytest.warns(UserWarning, match="SIGKILL"):
        got = [int(batch) for batch in executor]
    assert got == [number for number in range(10) for _ in range(2)]
    assert not Path(f"/proc/{marker.read_text()}").exists()


def test_runners_end_with_their_appliance(alone: dict[str, Any]) -> None:
    assert not Path(f"/proc/{alone['pid']}").exists()


def test_every_checkpoint_step_has_its_snapshot(appliance: Appliance, tmp_path: Path) -> None:
    """The worker is a ring ahead of the loop, which takes its time: it has to hear of each step before that. Only what
    it produced before there was a lane, a ring's worth, it cannot have heard of."""
    taken = tmp_path / "taken"
    with beside(appliance) as alone:
        loader = DataLoader(streams.noting, str(taken), 1000)
        for _ in DataExecutor(loader, num_steps=300, checkpoint_steps=1, appliance=alone):
            time.sleep(0.0005)
    assert set(range(MAX_ENTRIES + 1, 301)) <= set(map(int, taken.read_text().split()))
