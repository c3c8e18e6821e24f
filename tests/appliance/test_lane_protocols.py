"""Workers and jobs of releases whose lanes differ, beside each other on one coordinator, on a virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cluster import FakeBox, FakeCluster, FakeWorker

from penstock.appliance.core.entities import UNNAMED_LANE_PROTOCOL
from penstock.appliance.journal.journal import StateDir
from penstock.proto.v1 import coordinator_pb2 as pb

NEXT = UNNAMED_LANE_PROTOCOL + 1
NEWER_IS_THERE = f"1 worker speaks lane protocol {NEXT}, this job 8: upgrade the job, or keep workers of its release"


@pytest.fixture
def world(tmp_path: Path) -> FakeCluster:
    return FakeCluster(directory=StateDir(tmp_path))


def drain(world: FakeCluster, worker: str) -> pb.DrainWorkerReply:
    return world.state_machine.workers.drain_worker(pb.DrainWorkerRequest(worker=worker))


def runs_of(worker: FakeWorker) -> list[str]:
    return [assignment.run for assignment in worker.heartbeat().assignments]


@pytest.mark.parametrize("spoken", [0, UNNAMED_LANE_PROTOCOL], ids=["unnamed", "named"])
def test_no_slot_goes_to_a_worker_of_other_lanes(world: FakeCluster, spoken: int) -> None:
    """Neither from a worker that drains, nor from one that leaves, nor by a coordinator that was started again. A
    release that does not name its lanes is served by one that names the same."""
    old, newer = world.worker("old", 2), world.worker("newer", 8, lanes=NEXT)
    box = world.open(lane_protocol=spoken)
    old.ready()
    world.run_for(0.5, (old, newer, box))
    left = drain(world, "old")
    assert (left.slots, left.stuck, left.stuck_because) == (2, 2, NEWER_IS_THERE)
    world.restart(old, newer)
    world.run_for(0.5, (old, newer, box))
    assert (len(runs_of(old)), runs_of(newer)) == (2, [])
    assert box.watch().unplaced_because == "", "its slots have workers"
    leaving = pb.DeregisterWorkerRequest(worker="old", session="old-1")
    world.state_machine.workers.deregister_worker(leaving)
    world.run_for(0.5, (newer, box))
    assert (box.phases(), runs_of(newer)) == (["WAITING", "WAITING"], [])
    assert box.watch().unplaced_because == NEWER_IS_THERE
    (run,) = world.status().runs
    assert run.bottleneck.text.endswith(f"or workers with more slots. {NEWER_IS_THERE}.")
    drain(world, "newer")
    world.run_for(0.5, (newer, box))
    assert box.watch().unplaced_because == "", "the newer one takes no slot of any job"
    back = world.worker("back", 2, lanes=UNNAMED_LANE_PROTOCOL)
    assert (runs_of(back), box.watch().unplaced_because) == (["job/0", "job/0"], "")


def test_a_worker_that_was_upgraded_in_place_gives_its_slots_back(world: FakeCluster) -> None:
    world.worker("w", 2)
    box = world.open()
    again = world.worker("w", 2, session="w-2", lanes=NEXT)
    assert (box.phases(), runs_of(again)) == (["WAITING", "WAITING"], [])


def test_jobs_of_two_releases_share_a_coordinator(world: FakeCluster) -> None:
    """A job that waits for workers of its lanes does not hold up another with the same input_fn."""
    newer = world.worker("newer", 8, lanes=NEXT)
    older_job, newer_job = world.open(), world.open(job="newer", lane_protocol=NEXT)
    world.run_for(0.5, (newer, older_job, newer_job))
    assert (older_job.phases(), set(runs_of(newer))) == (["WAITING", "WAITING"], {"newer/0"})
    old = world.worker("old", 8)
    assert set(runs_of(old)) == {"job/0"}
    drain(world, "newer")
    world.run_for(0.5, (old, newer, older_job, newer_job))
    assert (drain(world, "newer").stuck_because, set(runs_of(old))) == (
        f"1 worker speaks lane protocol 8, this job {NEXT}: upgrade the workers",
        {"job/0"},
    )


def test_a_job_that_was_upgraded_leaves_the_older_workers(world: FakeCluster) -> None:
    old, newer = world.worker("old", 2), world.worker("newer", 2, lanes=NEXT)
    opened: FakeBox = world.open()
    assert (len(runs_of(old)), len(runs_of(newer))) == (2, 0)
    opened.close()
    world.open(lane_protocol=NEXT, client_id="the next launch")
    assert (len(runs_of(old)), len(runs_of(newer))) == (0, 2)
