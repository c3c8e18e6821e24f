"""Rules of the simulation's truth, without a history: refusals that it accepts, and reports that it checks."""

from __future__ import annotations

import pytest
from fake_cluster import FakeCluster
from queries import ask
from simulated.disk import Disk
from simulated.reference import BoxPlan, RunPlan
from simulated.truth import Base, Truth
from simulated.virtual import Violation, World

from penstock.appliance.core.entities import client_of
from penstock.appliance.journal.snapshot_index import DurableSnapshot, SlotKey
from penstock.proto.errors import DeadlineError
from penstock.proto.v1 import coordinator_pb2 as pb

SIZE = 15


def truth_of(cluster: FakeCluster, *, retention: int = 64) -> Truth:
    plan = BoxPlan(0, 24, frozenset(), frozenset(), [[64] * 5] * 2)
    plan.play()
    run = RunPlan(0, 2, retention, [plan], 0.0, 0.0, collective=True)
    truth = Truth(World(0), Disk(), cluster.limits, {run.name: run})
    truth.state_machine = cluster.state_machine
    return truth


def test_box_unheard_since_the_last_fault_has_no_state() -> None:
    cluster = FakeCluster()
    truth = truth_of(cluster)
    boxes = [cluster.open(number, num_boxes=2) for number in range(2)]
    boxes[0].deliver(3)
    truth.arrived("WatchRun", boxes[1].progress())
    cluster.run_for(cluster.limits.client_lease_s + 1, [boxes[0]])
    refusal = DeadlineError(f"waited for {ask(boxes[0], 3).waits_for()}")
    truth.world.now = 14.0
    truth.heal()
    truth.not_saved(truth.plans["job/0"], 3, refusal, 14.5, set())
    truth.world.now = 15.0
    truth.arrived("WatchRun", boxes[1].progress())
    with pytest.raises(Violation, match=r"has stopped reporting.*although nothing was broken"):
        truth.not_saved(truth.plans["job/0"], 3, refusal, 14.5, set())


def test_each_call_of_a_box_is_a_sign_of_life() -> None:
    cluster = FakeCluster()
    truth = truth_of(cluster)
    box = cluster.open()
    calls = {
        "OpenRun": box.request,
        "WatchRun": box.progress(),
        "FetchState": pb.FetchStateRequest(run="job/0", progress=box.progress()),
        "CloseRun": pb.CloseRunRequest(run="job/0", progress=box.progress()),
    }
    for number, (method, request) in enumerate(calls.items()):
        truth.world.now = float(number)
        truth.arrived(method, request)
        assert truth.before.heard_box == {("job/0", 0, client_of(box.request.client_id)): number}


def test_reports_count_without_more_bytes() -> None:
    cluster = FakeCluster()
    truth = truth_of(cluster, retention=2)
    box = cluster.open(retention=2)
    key = SlotKey("job/0", 1, 0, 0)

    def stored(total: int) -> None:
        truth.disk.snapshots[key, total, 0] = b"", b"x" * SIZE
        cluster.snapshot_index.add(key, DurableSnapshot(total, 0, SIZE))

    stored(0)
    truth.acknowledged((*key, 1), Base(0, 0, 0))
    truth.changed(wrote=False)
    stored(6)
    for steps in (17, 3):
        box.deliver(steps)
    assert cluster.snapshot_index.used == SIZE, "the report drops what the snapshot has brought"
    truth.changed(wrote=False)
    # As after a restart: the coordinator knows the box's start and no later position.
    cluster.state_machine.cluster.runs["job/0"].current.boxes[0].delivered.Clear()  # type: ignore[union-attr]
    truth.booted(cluster.state_machine)
    truth.changed(wrote=False)
