"""Heartbeat intervals, and the leases that go with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cluster import FakeCluster, limited

from penstock.appliance.core.leases import (
    LEASE_MAX_S,
    MOST_LOAD_FACTOR,
    SHRINKS_AFTER_S,
    SNAPSHOT_BYTES_PER_S,
    SNAPSHOTS_PER_S,
    LeasePolicy,
    PromisedLease,
    lease_policy,
    share,
    updated_load_factor,
)
from penstock.appliance.journal.journal import Journal, StateDir
from penstock.appliance.limits import MIB, Limits
from penstock.proto.v1 import coordinator_pb2 as pb

crowded = limited(heartbeats_per_s=1.0, watches_per_s=0.25)
"""Limits in which a fleet of 10 is a large one."""


@pytest.mark.parametrize(
    ("shortest_s", "peers", "calls_per_s", "heartbeat_s", "lease_s"),
    [
        (3, 2_000, 2000, 1, 3),
        (3, 10_000, 2000, 5, 15),
        (10, 200, 200, 1, 10),
        (0.6, 3, 2000, 0.2, 0.6),
    ],
)
def test_interval_and_lease_follow_fleet(
    shortest_s: float, peers: int, calls_per_s: float, heartbeat_s: float, lease_s: float
) -> None:
    policy = lease_policy(shortest_s, peers, calls_per_s)
    assert [policy.heartbeat_s, policy.lease_s] == pytest.approx([heartbeat_s, lease_s])


def test_load_factor_follows_late_ticks() -> None:
    load_factor = 1.0
    for _ in range(20):
        load_factor = updated_load_factor(load_factor, 0.7, 0.3)
    assert load_factor == MOST_LOAD_FACTOR
    for _ in range(35):
        load_factor = updated_load_factor(load_factor, 0.31, 0.3)
    assert load_factor == pytest.approx(MOST_LOAD_FACTOR / 2, rel=0.02)
    for _ in range(200):
        load_factor = updated_load_factor(load_factor, 0.31, 0.3)
    assert load_factor == 1.0


def test_polls_are_spread_over_the_interval() -> None:
    lease_policy = LeasePolicy(5.0, 15.0, 5.0)
    left = [lease_policy.left(1000.0, f"worker-{number}", is_idle=False) for number in range(1000)]
    assert min(left) > 0
    assert max(left) <= 5
    assert all(150 < sum(second <= one < second + 1 for one in left) < 250 for second in range(5))
    # Who comes back right after his moment is held for a whole beat.
    assert lease_policy.left(1000.0 + left[7] + 1e-6, "worker-7", is_idle=True) == pytest.approx(5, abs=1e-3)


def test_slot_quota_keeps_fleet_within_budget() -> None:
    for slots in (1, 10, 100, 1_000, 10_000):
        part = share(slots, 0)
        assert slots * part.bytes_per_s <= SNAPSHOT_BYTES_PER_S
        assert slots / part.every_s <= SNAPSHOTS_PER_S
    assert (share(1, 0).every_s, share(1, 0).bytes_per_s) == (1.0, 4 * MIB)
    assert share(10_000, 0).every_s == 25


def test_snapshots_take_what_heartbeats_leave() -> None:
    for slots, calls_per_s, per_s in ((1_000, 1_100, 400), (10_000, 2_200, 400 / 3), (10_000, 2_600, 50)):
        assert slots / share(slots, calls_per_s).every_s == pytest.approx(per_s)


@crowded
def test_lease_is_never_shorter_than_promised() -> None:
    world = FakeCluster()
    workers = [world.worker(f"w{number}", 1) for number in range(10)]
    slow = workers[0]
    for worker in workers[1:]:
        world.state_machine.workers.deregister_worker(
            pb.DeregisterWorkerRequest(worker=worker.name, session=worker.session)
        )
    world.run_for(SHRINKS_AFTER_S + 32, [slow])
    assert list(world.state_machine.cluster.workers) == ["w0"]
    assert slow.heartbeat().lease_s == 3  # told now; but this reply is lost, and the worker goes on with what it knew
    request = pb.HeartbeatRequest(worker=slow.name, session=slow.session, lease_s=30)
    world.heartbeat(request)
    world.run_for(29)
    assert "w0" in world.state_machine.cluster.workers
    world.run_for(2)
    assert "w0" not in world.state_machine.cluster.workers


def test_claimed_lease_is_bounded() -> None:
    world = FakeCluster()
    worker = world.worker("w")
    world.heartbeat(pb.HeartbeatRequest(worker=worker.name, session=worker.session, lease_s=1e9))
    assert world.state_machine.cluster.workers["w"].lease_until == world.now + LEASE_MAX_S


@crowded
def test_policy_of_shrinking_fleet_lags() -> None:
    world = FakeCluster()
    workers = [world.worker(f"w{number}", 1) for number in range(10)]
    world.run_for(35, workers[:2])
    assert len(world.state_machine.cluster.workers) == 2
    assert workers[0].heartbeat().heartbeat_s == 10
    world.run_for(SHRINKS_AFTER_S, workers[:2])
    assert workers[0].heartbeat().heartbeat_s == 2


@crowded
def test_a_box_has_the_lease_that_it_was_told() -> None:
    world = FakeCluster()
    boxes = [world.open(number, num_boxes=4) for number in range(4)]
    assert (boxes[3].reply.heartbeat_s, boxes[3].reply.lease_s) == (16, 48)
    told = boxes[0].watch().lease_s
    assert told == 48
    world.run_for(47, boxes[1:])
    assert world.state_machine.cluster.live_boxes == 4
    world.run_for(2, boxes[1:])
    assert world.state_machine.cluster.live_boxes == 3


@crowded
def test_leases_after_restart_are_as_promised(tmp_path: Path) -> None:
    directory = StateDir(tmp_path)
    world = FakeCluster(directory=directory)
    workers = [world.worker(f"w{number}", 1) for number in range(10)]
    box = world.open(num_workers_per_box=1)  # the journal will know of one worker only
    holder = next(worker for worker in workers if worker.heartbeat().assignments)
    world.restart()
    world.run_for(29, [box])
    assert holder.name in world.state_machine.cluster.workers
    world.run_for(10, [box])
    assert holder.name not in world.state_machine.cluster.workers
    world.journal.close()
    directory.close()


def test_promise_has_margin_and_is_taken_back(tmp_path: Path) -> None:
    directory = StateDir(tmp_path)
    journal = Journal(directory)
    promise = PromisedLease(journal, "lease", 3.0, 0.0)
    promise.keep(3.0, 0.0)
    assert not journal.pending  # the usual lease needs no note
    promise.keep(8.0, 1.0)
    assert promise.lease_s == 10
    promise.keep(9.0, 2.0)
    journal.commit()
    promise.shorten(4.0, 11.9)
    assert promise.lease_s == 10
    journal.close()
    journal = Journal(directory)
    again = PromisedLease(journal, "lease", 3.0, 20.0)
    assert again.lease_s == 10
    again.shorten(4.0, 30.5)
    assert again.lease_s == 4
    journal.close()
    directory.close()


def test_queued_calls_keep_leases_open() -> None:
    world = FakeCluster()
    world.worker("w")
    for tick in range(30):  # in time, 9 s long; but a call of its own has been waiting from the beginning
        world.now += 0.3
        world.state_machine.tick(unreceived_s=0.3 * (tick + 1))
    assert "w" in world.state_machine.cluster.workers
    for _ in range(40):
        world.now += 0.3
        world.state_machine.tick(unreceived_s=0.3)
    assert "w" not in world.state_machine.cluster.workers


def test_a_normal_delay_of_calls_adds_nothing() -> None:
    world = FakeCluster()
    world.worker("w")
    for _ in range(11):
        world.now += 0.3
        world.state_machine.tick(unreceived_s=0.5)
    assert "w" not in world.state_machine.cluster.workers


def test_a_reply_repeats_nothing_that_was_seen() -> None:
    world = FakeCluster()
    box, worker = world.open(), world.worker("w")
    reply = worker.heartbeat()
    assert len(reply.assignments) == 2
    assert not reply.unchanged
    request = pb.HeartbeatRequest(worker="w", session=worker.session, seen_version=reply.version)
    seen = world.heartbeat(request)
    assert (seen.unchanged, len(seen.assignments), seen.version) == (True, 0, reply.version)
    worker.lose(reply.assignments[0])
    assert len(world.heartbeat(request).assignments) == 2
    first = box.watch()
    watch = box.progress()
    watch.seen_version = first.version
    assert (len(first.slots), len(world.watch(watch).slots)) == (2, 0)


def test_the_share_in_snapshots_follows_the_slots() -> None:
    world = FakeCluster()
    worker = world.worker("w", 1000)
    assert worker.heartbeat().snapshot_every_s == 1
    for job in range(8):
        world.open(job=f"job{job}", num_workers_per_box=100)
    reply = worker.heartbeat()
    assert world.state_machine.cluster.placed == 800
    assert (reply.snapshot_every_s, reply.snapshot_bytes_per_s) == (2, 32 * MIB / 800)


def test_idle_peers_are_held_longer_and_are_asked_for_a_status() -> None:
    world = FakeCluster(Limits(worker_lease_s=30.0, idle_report_s=10.0))
    box, worker = world.open(), world.worker("w")
    machine = world.state_machine

    def holds() -> list[float]:
        asked = box.progress()
        asked.hold_s = 60.0
        request = pb.HeartbeatRequest(worker="w", session=worker.session, hold_s=60.0)
        return [machine.attempts.box_hold(asked), machine.workers.worker_hold(request)]

    for _ in range(2):
        replies = box.watch(), worker.ready()
    assert [reply.heartbeat_s for reply in replies] == pytest.approx([10 / 3, 10])
    assert holds() == pytest.approx([10 / 3, 10])
    box.deliver(1)
    report = worker.slot_report(worker.of(0), pb.READY)
    report.produced += 3
    worker.heartbeat(report)
    assert max(holds()) <= 1  # both have done something since their last report
    world.now += 2.0
    assert len(machine.ask_silent(world.now - 1.0)) == 2
    assert not worker.heartbeat().unchanged
    box.watch()
    assert machine.ask_silent(world.now - 1.0) == []


def test_a_peer_is_missed_after_half_its_lease() -> None:
    world = FakeCluster()
    box, worker = world.open(), world.worker("w")
    missed = []
    for second in range(8):
        worker.heartbeat()
        if second < 2:
            box.watch()
        missed.append(world.state_machine.misses_peers())
        world.now += 1.0
    assert missed == [False] * 7 + [True]


def test_a_box_whose_socket_ended_has_no_long_lease() -> None:
    world = FakeCluster(Limits(client_lease_s=30.0, hung_up_s=10.0))
    boxes = [world.open(number, num_boxes=2) for number in range(2)]
    world.state_machine.attempts.box_hung_up(boxes[0].progress())
    live = world.state_machine.cluster.open_attempts()[0].live
    world.run_for(9)
    assert set(live) == {0, 1}
    world.run_for(2)
    assert set(live) == {1}
    world.run_for(20)
    assert not world.state_machine.cluster.live_boxes
