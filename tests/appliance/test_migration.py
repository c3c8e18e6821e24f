"""Slots that go to another worker in good order, on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_cluster import FakeBox, FakeCluster, FakeWorker, limited

from penstock.appliance.journal.journal import StateDir
from penstock.appliance.limits import Limits
from penstock.proto.errors import SupersededError, UnknownWorkerError
from penstock.proto.v1 import coordinator_pb2 as pb

LIMITS = Limits(balance_after_s=0.0)


@pytest.fixture(autouse=True)
def _limits() -> Iterator[None]:
    with limited(target_ready_s=4.0, migration_s=5.0, left_alone_s=3.0):
        yield


@pytest.fixture
def world() -> FakeCluster:
    return FakeCluster(LIMITS)


def two(world: FakeCluster, slots: int = 2) -> tuple[FakeWorker, FakeBox, FakeWorker]:
    """A box whose slots are all with `old`, and another worker with room for them."""
    old, box = world.worker("old", slots), world.open()
    old.ready()
    return old, box, world.worker("new", slots)


def drain(world: FakeCluster, worker: str, *, undo: bool = False) -> tuple[int, int]:
    reply = world.state_machine.workers.drain_worker(pb.DrainWorkerRequest(worker=worker, undo=undo))
    return reply.slots, reply.stuck


def prepare_migration(worker: FakeWorker, slot: int, *, delivered: int = 0, produced: int = 0, **rates: float) -> None:
    """Report that what the target needs is durable, or that the target has replayed."""
    report = worker.slot_report(worker.of(slot), pb.READY)
    report.migrated, report.delivered, report.produced = True, delivered, produced
    report.batch_s, report.batches_per_s = rates.get("batch_s", 0.0), rates.get("batches_per_s", 0.0)
    worker.heartbeat(report)


def test_loop_that_waits_is_shadowed(world: FakeCluster) -> None:
    """The target is close behind the loop, and gets the slot once the loop has passed where it was compared."""
    old, box, new = two(world)
    drain(world, "old")
    new.heartbeat(new.slot_report(new.of(0), pb.READY))
    prepare_migration(old, 0, delivered=7, batch_s=0.02, batches_per_s=50)
    assert new.of(0).loop_waits
    prepare_migration(new, 0, produced=80)
    assert (old.of(0).migration_total, box.watch().slots[0].worker) == (80, "old")
    prepare_migration(old, 0, delivered=79)
    assert box.watch().slots[0].worker == "old"
    prepare_migration(old, 0, delivered=80)
    assert box.watch().slots[0].worker == "new"


@pytest.mark.parametrize("methods", [0, 2])
def test_no_second_instance_of_a_loader_without_states(world: FakeCluster, methods: int) -> None:
    """It may be a queue: its slot leaves the worker before another one may make it."""
    old, box, new = two(world)
    report = old.slot_report(old.of(0), pb.READY)
    report.capabilities.state_methods = methods
    old.heartbeat(report)
    drain(world, "old")
    world.run_for(0.1, (old, box, new))
    assert new.of(0).is_target == (methods > 0)
    assert [assignment.slot for assignment in old.heartbeat().assignments] == ([0, 1] if methods else [1])
    assert box.watch().slots[0].migrated == (not methods)


def test_slow_durability_ends_in_a_replay(world: FakeCluster) -> None:
    old, box, new = two(world)
    drain(world, "old")
    new.heartbeat(new.slot_report(new.of(0), pb.READY))
    world.run_for(4.5, (old, box, new))
    assert box.watch().slots[0].worker == "old"
    world.run_for(1.0, (old, box, new))
    assert box.watch().slots[0].worker == "new"


def test_target_takes_over_from_dead_runner(world: FakeCluster) -> None:
    old, box, _new = two(world)
    drain(world, "old")
    old.lose(old.of(1))
    assert [(view.worker, view.generation) for view in box.watch().slots] == [("old", 1), ("new", 2)]
    assert len(world.slots()[1].losses) == 1


@pytest.mark.parametrize("how", ["dies", "fails", "is never ready"])
def test_failed_target_leaves_the_slot(world: FakeCluster, how: str) -> None:
    old, box, new = two(world)
    drain(world, "old")
    if how == "dies":
        world.run_for(4.0, (old, box))
    elif how == "fails":
        for slot in (0, 1):
            report = new.slot_report(new.of(slot), pb.FAILED)
            report.error.message = "no such module"
            new.heartbeat(report)
    else:
        world.run_for(4.5, (old, box, new))
    assert [(view.worker, view.generation, view.target_worker) for view in box.watch().slots] == [("old", 1, "")] * 2
    if how != "dies":
        assert new.heartbeat().assignments == []
        world.run_for(3.5, (old, box, new))  # and then it is tried again, under a generation that nobody had
        assert [new.of(slot).generation for slot in (0, 1)] == [3, 3]


def test_last_target_leaves_with_its_worker(world: FakeCluster) -> None:
    old, box, new = two(world)
    drain(world, "old")
    drain(world, "new")
    world.run_for(0.25, (old, box, new))
    assert {(view.worker, view.target_worker) for view in box.watch().slots} == {("old", "")}
    assert (old.heartbeat().stuck, new.heartbeat().stuck) == (2, 0)


def refuse(worker: FakeWorker, slot: int) -> None:
    """Report that the target cannot take the slot over."""
    report = worker.slot_report(worker.of(slot), pb.FAILED)
    report.error.message = "no such file: /data"
    worker.heartbeat(report)


def test_failed_target_is_replaced_at_once(world: FakeCluster) -> None:
    old, box, new = two(world)
    drain(world, "old")
    third = world.worker("third", 2)
    refuse(new, 0)
    assert old.heartbeat().stuck == 0  # else a worker that is to end would give up
    world.run_for(0.25, (old, box, new, third))
    assert third.of(0).is_target
    refuse(third, 0)
    assert old.heartbeat().stuck == 1
    world.run_for(2.0, (old, box, new, third))
    assert box.watch().slots[0].target_worker == ""
    world.run_for(1.25, (old, box, new, third))
    assert box.watch().slots[0].target_worker == "third"  # where it may have been mended


def test_slot_without_capacity_elsewhere_waits(world: FakeCluster) -> None:
    old, box = world.worker("old", 2), world.open()
    old.ready()
    assert drain(world, "old") == (2, 2)
    reply = old.heartbeat()
    assert (reply.draining, reply.stuck) == (True, 2)
    new = world.worker("new", 1)
    world.run_for(0.25, (old, box, new))
    assert len(new.heartbeat().assignments) == 1
    assert old.heartbeat().stuck == 1


def test_drained_worker_gets_slots_after_undo(world: FakeCluster) -> None:
    old, box, _new = two(world)
    drain(world, "old")
    other = world.open(job="other", client_id="other")
    assert {view.worker for view in other.watch().slots} == {""}  # new has no place left, old takes none
    assert drain(world, "old", undo=True) == (2, 0)
    assert {view.target_worker for view in box.watch().slots} == {""}
    assert {view.worker for view in other.watch().slots} == {"new"}
    assert not old.heartbeat().draining


def test_a_worker_asks_to_be_drained_by_itself(world: FakeCluster) -> None:
    _old, _box, new = two(world)
    request = pb.HeartbeatRequest(worker="old", session="old-1", leaving=True)
    assert world.heartbeat(request).draining
    assert len(new.heartbeat().assignments) == 2


def test_slot_without_batches_just_restarts(world: FakeCluster) -> None:
    _old, box, _new = world.worker("old", 2), world.open(), world.worker("new", 2)
    drain(world, "old")
    assert [(view.worker, view.phase, view.generation) for view in box.watch().slots] == [("new", pb.STARTING, 2)] * 2


def test_failed_slot_keeps_worker_loses_target(world: FakeCluster) -> None:
    old, box, new = two(world)
    drain(world, "old")
    report = old.slot_report(old.of(0), pb.FAILED)
    report.error.message = "the loader raised"
    old.heartbeat(report)
    assert (box.watch().slots[0].phase, box.watch().slots[0].target_worker) == (pb.FAILED, "")
    assert [assignment.slot for assignment in new.heartbeat().assignments] == [1]


def test_worker_reports_its_drain_after_restart(tmp_path: Path) -> None:
    world = FakeCluster(LIMITS, StateDir(tmp_path))
    old, _box, _new = two(world)
    drain(world, "old")
    world.restart()
    request = pb.RegisterWorkerRequest(worker="old", session="old-1", host_id="host-a", slots=2, draining=True)
    world.state_machine.workers.register_worker(request)
    assert old.heartbeat().draining


def test_drain_is_unknown_until_worker_is_back(tmp_path: Path) -> None:
    world = FakeCluster(LIMITS, StateDir(tmp_path))
    old, _box, _new = two(world)
    drain(world, "old")
    world.restart()
    look = pb.DrainWorkerRequest(worker="old", look=True)
    assert world.state_machine.workers.drain_worker(
        look
    ).draining  # who waits for it must not hear that it was taken back
    with pytest.raises(UnknownWorkerError, match="worker 'old' has not reported since the coordinator started"):
        drain(world, "old", undo=True)
    old.register()
    assert not world.state_machine.workers.drain_worker(look).draining


def test_slot_stays_until_its_target_is_ready(world: FakeCluster) -> None:
    old, box, new = two(world)
    assert drain(world, "old") == (2, 0)
    waits = new.of(0)
    assert (waits.generation, waits.recovery, waits.is_target, waits.prepare_migration) == (2, True, True, False)
    has = old.of(0)
    assert (has.generation, has.is_target, has.prepare_migration) == (1, False, False)
    assert box.phases() == ["READY", "READY"]
    assert {view.target_worker for view in box.watch().slots} == {"new"}

    assert not new.heartbeat(new.slot_report(waits, pb.READY)).taken
    assert old.of(0).prepare_migration
    assert box.watch().slots[0].generation == 1
    assert not new.of(0).prepare_migration
    prepare_migration(old, 0, delivered=7)
    assert box.watch().slots[0].generation == 1
    asked = new.of(0)
    assert (asked.is_target, asked.prepare_migration, asked.migration_total, asked.loop_waits) == (True, True, 7, False)
    prepare_migration(new, 0, produced=7)
    view = box.watch().slots[0]
    assert (view.generation, view.worker, view.phase, view.note) == (2, "new", pb.READY, "worker old drains")
    assert view.migrated
    assert [assignment.slot for assignment in old.heartbeat().assignments] == [1]
    now = new.of(0)
    assert (now.generation, now.recovery, now.is_target) == (2, True, False)


def test_old_and_new_have_lanes_of_their_own(world: FakeCluster) -> None:
    old, _box, new = two(world)
    drain(world, "old")
    assert old.of(0).lane_key != new.of(0).lane_key
    for worker in (old, new):
        world.state_machine.slot_to_recover(world.slots()[0].key, worker.of(0).generation)
    with pytest.raises(SupersededError):
        world.state_machine.slot_to_recover(world.slots()[0].key, 3)
    with pytest.raises(SupersededError):  # it may read, and write nothing yet
        world.state_machine.slot_of_generation(world.slots()[0].key, 2)
