"""Slots that go to another worker in good order, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.appliance.model.limits import Limits
from penstock.appliance.storage.journal import StateDir
from penstock.appliance.testing import FakeBox, FakeCluster, FakeWorker
from penstock.proto.errors import SupersededError, UnknownWorkerError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

LIMITS = replace(Limits(), target_ready_s=4.0, migration_s=5.0, left_alone_s=3.0, balance_after_s=0.0)
FOUR = records_pb2.LoaderCapabilities(state_methods=4)


@pytest.fixture
def world() -> FakeCluster:
    return FakeCluster(LIMITS)


def two(world: FakeCluster, slots: int = 2) -> tuple[FakeWorker, FakeBox, FakeWorker]:
    """A box whose slots are all with `old`, and another worker with room for them."""
    old, box = world.worker("old", slots), world.open()
    old.ready()
    return old, box, world.worker("new", slots)


def drain(world: FakeCluster, worker: str, *, undo: bool = False) -> tuple[int, int]:
    reply = world.registry.drain_worker(pb.DrainWorkerRequest(worker=worker, undo=undo))
    return reply.slots, reply.stuck


def prepare_migration(worker: FakeWorker, slot: int) -> None:
    """What a successor needs is durable, the worker says."""
    report = worker.tell(worker.of(slot), pb.READY)
    report.migrated = True
    worker.beat(report)


def test_a_slot_stays_where_it_is_until_its_successor_is_ready_and_all_is_durable(world: FakeCluster) -> None:
    old, box, new = two(world)
    assert drain(world, "old") == (2, 0)
    waits = new.of(0)
    assert (waits.generation, waits.recovery, waits.target, waits.prepare_migration) == (2, True, True, False)
    has = old.of(0)
    assert (has.generation, has.target, has.prepare_migration) == (1, False, False)
    assert box.phases() == ["READY", "READY"]
    assert {view.target for view in box.watch().slots} == {"new"}

    new.beat(new.tell(waits, pb.READY))
    assert old.of(0).prepare_migration
    assert box.watch().slots[0].generation == 1
    prepare_migration(old, 0)
    view = box.watch().slots[0]
    assert (view.generation, view.worker, view.phase, view.note) == (2, "new", pb.READY, "worker old drains")
    assert view.migrated
    assert [assignment.slot for assignment in old.beat().assignments] == [1]
    now = new.of(0)
    assert (now.generation, now.recovery, now.target) == (2, True, False)


def test_old_and_new_have_lanes_of_their_own(world: FakeCluster) -> None:
    old, _box, new = two(world)
    drain(world, "old")
    assert old.of(0).lane_key != new.of(0).lane_key
    for worker in (old, new):
        world.registry.slot_to_recover(world.slots()[0].key, worker.of(0).generation)
    with pytest.raises(SupersededError):
        world.registry.slot_to_recover(world.slots()[0].key, 3)
    with pytest.raises(SupersededError):  # it may read, and write nothing yet
        world.registry.slot_of_generation(world.slots()[0].key, 2)


def test_what_takes_too_long_to_become_durable_is_replayed(world: FakeCluster) -> None:
    old, box, new = two(world)
    drain(world, "old")
    new.beat(new.tell(new.of(0), pb.READY))
    world.run_for(4.5, (old, box, new))
    assert box.watch().slots[0].worker == "old"
    world.run_for(1.0, (old, box, new))
    assert box.watch().slots[0].worker == "new"


def test_a_worker_that_dies_meanwhile_is_succeeded_at_once(world: FakeCluster) -> None:
    _old, box, new = two(world)
    drain(world, "old")
    new.beat(new.tell(new.of(0), pb.READY))
    world.run_for(4.0, (box, new))
    views = box.watch().slots
    assert [(view.worker, view.generation, view.phase) for view in views] == [
        ("new", 2, pb.READY),
        ("new", 2, pb.STARTING),
    ]
    assert not views[0].migrated
    assert [assignment.recovery for assignment in new.beat().assignments] == [True, True]


def test_a_runner_that_dies_meanwhile_is_succeeded_and_counts_as_a_loss(world: FakeCluster) -> None:
    old, box, _new = two(world)
    drain(world, "old")
    old.lose(old.of(1))
    assert [(view.worker, view.generation) for view in box.watch().slots] == [("old", 1), ("new", 2)]
    assert len(world.slots()[1].losses) == 1


@pytest.mark.parametrize("how", ["dies", "fails", "is never ready"])
def test_a_successor_that_comes_to_nothing_leaves_the_slot_where_it_is(world: FakeCluster, how: str) -> None:
    old, box, new = two(world)
    drain(world, "old")
    if how == "dies":
        world.run_for(4.0, (old, box))
    elif how == "fails":
        for slot in (0, 1):
            report = new.tell(new.of(slot), pb.FAILED)
            report.error.message = "no such module"
            new.beat(report)
    else:
        world.run_for(4.5, (old, box, new))
    assert [(view.worker, view.generation, view.target) for view in box.watch().slots] == [("old", 1, "")] * 2
    if how != "dies":
        assert new.beat().assignments == []
        world.run_for(3.5, (old, box, new))  # and then it is tried again, under a generation that nobody had
        assert [new.of(slot).generation for slot in (0, 1)] == [3, 3]


def test_a_successor_whose_own_worker_drains_is_replaced_by_another(world: FakeCluster) -> None:
    """Else the slot went there, and from there elsewhere: the loop would wait for it twice."""
    old, box, new = two(world)
    drain(world, "old")
    new.beat(new.tell(new.of(0), pb.READY))
    third = world.worker("third", 2)
    assert drain(world, "new") == (0, 0)
    assert new.beat().assignments == []
    assert {view.worker for view in box.watch().slots} == {"old"}
    world.run_for(0.25, (old, box, new, third))
    assert {view.target for view in box.watch().slots} == {"third"}


def test_a_successor_that_has_nobody_else_to_replace_it_goes_with_its_worker(world: FakeCluster) -> None:
    old, box, new = two(world)
    drain(world, "old")
    drain(world, "new")
    world.run_for(0.25, (old, box, new))
    assert {(view.worker, view.target) for view in box.watch().slots} == {("old", "")}
    assert (old.beat().stuck, new.beat().stuck) == (2, 0)


def refuse(worker: FakeWorker, slot: int) -> None:
    """It cannot take the slot over, it says."""
    report = worker.tell(worker.of(slot), pb.FAILED)
    report.error.message = "no such file: /data"
    worker.beat(report)


def test_what_one_worker_could_not_take_over_goes_to_another_at_once(world: FakeCluster) -> None:
    old, box, new = two(world)
    drain(world, "old")
    third = world.worker("third", 2)
    refuse(new, 0)
    assert old.beat().stuck == 0  # else a worker that is to end would give up
    world.run_for(0.25, (old, box, new, third))
    assert third.of(0).target
    refuse(third, 0)
    assert old.beat().stuck == 1
    world.run_for(2.0, (old, box, new, third))
    assert box.watch().slots[0].target == ""
    world.run_for(1.25, (old, box, new, third))
    assert box.watch().slots[0].target == "third"  # where it may have been mended


def test_a_successor_that_is_lost_is_no_reason_to_give_up_while_others_have_room(world: FakeCluster) -> None:
    old, box, new = two(world)
    drain(world, "old")
    third = world.worker("third", 2)
    world.run_for(2.0, (old, box, third))
    world.now += 2.0
    for alive in (old, third):
        alive.report()
    world.registry.cluster.drop_silent(world.now)
    assert "new" not in world.registry.cluster.workers
    assert old.beat().stuck == 0
    world.run_for(0.25, (old, box, third))
    assert [third.of(slot).target for slot in (0, 1)] == [True, True]
    assert new.beat().register_again


def test_a_slot_without_a_place_elsewhere_stays_and_goes_when_there_is_one(world: FakeCluster) -> None:
    old, box = world.worker("old", 2), world.open()
    old.ready()
    assert drain(world, "old") == (2, 2)
    reply = old.beat()
    assert (reply.draining, reply.stuck) == (True, 2)
    new = world.worker("new", 1)
    world.run_for(0.25, (old, box, new))
    assert len(new.beat().assignments) == 1
    assert old.beat().stuck == 1


def test_a_drained_worker_gets_nothing_and_takes_slots_again_when_it_is_taken_back(world: FakeCluster) -> None:
    old, box, _new = two(world)
    drain(world, "old")
    other = world.open(job="other", client_id="other")
    assert {view.worker for view in other.watch().slots} == {""}  # new has no place left, old takes none
    assert drain(world, "old", undo=True) == (2, 0)
    assert {view.target for view in box.watch().slots} == {""}
    assert {view.worker for view in other.watch().slots} == {"new"}
    assert not old.beat().draining


def test_a_worker_asks_to_be_drained_by_itself(world: FakeCluster) -> None:
    _old, _box, new = two(world)
    request = pb.HeartbeatRequest(worker="old", session="old-1", leaving=True)
    assert world.registry.heartbeat(request).draining
    assert len(new.beat().assignments) == 2


def test_a_slot_that_has_given_out_nothing_is_just_started_elsewhere(world: FakeCluster) -> None:
    _old, box, _new = world.worker("old", 2), world.open(), world.worker("new", 2)
    drain(world, "old")
    assert [(view.worker, view.phase, view.generation) for view in box.watch().slots] == [("new", pb.STARTING, 2)] * 2


def test_successors_are_dismissed_when_the_run_ends_or_its_box_is_gone(world: FakeCluster) -> None:
    old, box, new = two(world)
    drain(world, "old")
    world.run_for(LIMITS.client_lease_s + 1, (old, new))
    assert not world.registry.cluster.appointed
    assert new.beat().assignments == []
    box.close()
    assert world.registry.cluster.placed == 0


def test_a_failed_slot_keeps_its_worker_and_loses_its_successor(world: FakeCluster) -> None:
    old, box, new = two(world)
    drain(world, "old")
    report = old.tell(old.of(0), pb.FAILED)
    report.error.message = "the loader raised"
    old.beat(report)
    assert (box.watch().slots[0].phase, box.watch().slots[0].target) == (pb.FAILED, "")
    assert [assignment.slot for assignment in new.beat().assignments] == [1]


def test_a_generation_given_to_a_successor_is_given_to_nobody_else_after_a_restart(tmp_path: Path) -> None:
    world = FakeCluster(LIMITS, StateDir(tmp_path))
    old, box, new = two(world)
    drain(world, "old")
    assert new.of(0).generation == 2
    world.restart(old, new)
    assert new.beat().assignments == []  # nobody is getting ready any more
    box.watch()
    old.lose(old.of(0))
    assert box.watch().slots[0].generation == 3


def test_a_worker_tells_a_coordinator_that_was_started_anew_that_it_drains(tmp_path: Path) -> None:
    world = FakeCluster(LIMITS, StateDir(tmp_path))
    old, _box, _new = two(world)
    drain(world, "old")
    world.restart()
    request = pb.RegisterWorkerRequest(worker="old", session="old-1", host_id="host-a", slots=2, draining=True)
    world.registry.register_worker(request)
    assert old.beat().draining


def test_before_a_worker_is_back_after_a_restart_its_drain_is_neither_denied_nor_taken_back(tmp_path: Path) -> None:
    world = FakeCluster(LIMITS, StateDir(tmp_path))
    old, _box, _new = two(world)
    drain(world, "old")
    world.restart()
    look = pb.DrainWorkerRequest(worker="old", look=True)
    assert world.registry.drain_worker(look).draining  # who waits for it must not hear that it was taken back
    with pytest.raises(UnknownWorkerError, match="worker 'old' was not heard of since the coordinator was started"):
        drain(world, "old", undo=True)
    old.register()
    assert not world.registry.drain_worker(look).draining


def test_an_unknown_worker_is_named(world: FakeCluster) -> None:
    world.worker("w1")
    with pytest.raises(UnknownWorkerError, match="no worker 'w2'; there are: w1"):
        drain(world, "w2")


def test_a_worker_that_has_left_is_not_lost(world: FakeCluster) -> None:
    world.worker("stays"), world.worker("goes")
    world.registry.deregister_worker(pb.DeregisterWorkerRequest(worker="goes", session="goes-1"))
    world.run_for(4.0)
    told = [(event.kind, event.worker) for event in world.registry.status().events if event.worker]
    assert told[2:] == [("worker left", "goes"), ("worker lost", "stays")]
