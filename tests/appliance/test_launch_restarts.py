"""All slots of a run with four methods restart from a saved state, on a virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cluster import FakeBox, FakeCluster, FakeWorker
from queries import values

from penstock.appliance.journal.journal import StateDir
from penstock.proto.errors import InvalidArgumentError, StateUnavailableError, SupersededError
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

BOXES = 2


@pytest.fixture
def world(tmp_path: Path) -> FakeCluster:
    return FakeCluster(directory=StateDir(tmp_path))


def begun(world: FakeCluster, steps: int = 10) -> tuple[FakeWorker, list[FakeBox]]:
    """Two boxes of two slots on one worker, which have delivered `steps` batches each."""
    worker = world.worker("w")
    boxes = [world.open(box, num_boxes=BOXES) for box in range(BOXES)]
    worker.ready()
    for box in boxes:
        box.deliver(steps)
    return worker, boxes


def at(step: int) -> Position:
    position = Position.start(2)
    for _ in range(step):
        position.deliver()
    return position


def offer(world: FakeCluster, box: FakeBox, step: int, count: int = BOXES, blob: str = "") -> None:
    """Report a saved state of `count` boxes, whose blobs the coordinator has."""
    request = box.progress()
    for number in range(count):
        resume = records_pb2.Resume(blob=blob or f"state-{step}-{number}", same_topology=True)
        if not blob:
            world.snapshot_index.add_blob(resume.blob, 3, world.now)
        request.restarts.append(records_pb2.Restart(start=at(step).to_proto(), resume=resume))
    world.watch(request)


def lose(worker: FakeWorker, slot: int, box: int, worked_s: float) -> None:
    report = worker.slot_report(worker.of(slot, box), pb.FAILED)
    report.lost, report.worked_s = True, worked_s
    worker.heartbeat(report)


def starts(worker: FakeWorker) -> set[tuple[int, int, str]]:
    """Generation, step and blob of all assignments, with the box's number out of the blob."""
    found = worker.heartbeat().assignments
    assert len(found) == 2 * BOXES
    assert {a.resume.blob.rpartition("-")[2] or str(a.box) for a in found} == {"0", "1"}
    return {(a.generation, a.start.step, a.resume.blob.rpartition("-")[0]) for a in found}


def test_all_slots_of_all_boxes_restart(world: FakeCluster) -> None:
    worker, boxes = begun(world)
    offer(world, boxes[0], 4)
    offer(world, boxes[0], 8)
    offer(world, boxes[0], 6)  # is older
    offer(world, boxes[0], 9)  # slot 1 would be next
    offer(world, boxes[0], 10, blob="unknown")
    lose(worker, 0, 1, 30.0)
    assert starts(worker) == {(1, 0, ""), (2, 0, "")}, "one slot replays alone"
    lose(worker, 0, 1, 31.0)
    assert starts(worker) == {(2, 8, "state-8"), (3, 8, "state-8")}
    assert all(assignment.recovery for assignment in worker.heartbeat().assignments)
    assert {view.migrated for view in boxes[0].watch().slots} == {True}
    world.restart(worker)
    assert starts(worker) == {(2, 8, "state-8"), (3, 8, "state-8")}, "also after a restart of the coordinator"
    for box in boxes:
        box.watch()
    lose(worker, 1, 0, 5.0)
    assert starts(worker) == {(2, 8, "state-8"), (3, 8, "state-8")}, "a replay from there is short"
    offer(world, boxes[0], 8)
    lose(worker, 1, 0, 40.0)
    assert {step for _, step, _ in starts(worker)} == {8}
    offer(world, boxes[0], 10)
    lose(worker, 1, 0, 40.0)
    assert {step for _, step, _ in starts(worker)} == {10}


def test_who_offers_what(world: FakeCluster) -> None:
    _, boxes = begun(world)
    for box, count in ((boxes[1], 2), (boxes[0], 1), (boxes[0], 3)):
        with pytest.raises(InvalidArgumentError, match="box 0 must send states of one step"):
            offer(world, box, 8, count)


def test_no_box_may_be_before_the_state_or_have_left_an_epoch_there(world: FakeCluster) -> None:
    worker, boxes = begun(world, 8)
    boxes[1].deliver(2)
    offer(world, boxes[0], 10)
    lose(worker, 0, 0, 40.0)
    assert {step for _, step, _ in starts(worker)} == {0}
    boxes[0].deliver(2)
    boxes[0].abandon_epoch()
    lose(worker, 0, 1, 40.0)
    assert {step for _, step, _ in starts(worker)} == {0}


@pytest.mark.parametrize(("phase", "name"), [(pb.READY, "ReplayMismatchError"), (pb.STARTING, "InputFnError")])
def test_restart_that_is_not_exact_is_taken_back(world: FakeCluster, phase: pb.SlotPhase.ValueType, name: str) -> None:
    worker, boxes = begun(world)
    offer(world, boxes[0], 8)
    lose(worker, 0, 0, 40.0)
    report = worker.slot_report(worker.of(1, 1), phase)
    worker.heartbeat(report)
    report.phase = pb.FAILED
    report.error.name = name
    worker.heartbeat(report)
    assert starts(worker) == {(3, 0, "")}
    offer(world, boxes[0], 10)
    lose(worker, 0, 0, 40.0)
    assert {step for _, step, _ in starts(worker)} == {0}
    report = worker.slot_report(worker.of(1, 1), pb.FAILED)
    report.error.name = name
    worker.heartbeat(report)
    assert boxes[1].phases()[1] == "FAILED", "there is no further way"


def test_drained_slot_restarts_all(world: FakeCluster) -> None:
    worker, boxes = begun(world)
    other = world.worker("other", 2)
    offer(world, boxes[0], 8)
    worker.heartbeat(*(_worked(worker, assignment) for assignment in worker.heartbeat().assignments))
    world.state_machine.workers.drain_worker(pb.DrainWorkerRequest(worker="w"))
    assert not any(a.start.step for a in (*worker.heartbeat().assignments, *other.heartbeat().assignments)), "no room"
    world.worker("newer", 4, lanes=9)
    drain_again(world)
    assert [a.start.step for a in worker.heartbeat().assignments] == [0] * 4, "no room where the job's lanes are spoken"
    more = world.worker("more", 2)
    drain_again(world)
    assert not worker.heartbeat().assignments
    assigned = [*other.heartbeat().assignments, *more.heartbeat().assignments]
    assert [(a.start.step, a.is_target) for a in assigned] == [(8, False)] * 4


def drain_again(world: FakeCluster) -> None:
    world.state_machine.workers.drain_worker(pb.DrainWorkerRequest(worker="w", undo=True))
    world.state_machine.workers.drain_worker(pb.DrainWorkerRequest(worker="w"))


def _worked(worker: FakeWorker, assignment: records_pb2.WorkerAssignment) -> pb.SlotReport:
    report = worker.slot_report(assignment, pb.READY)
    report.worked_s = 40.0
    return report


def test_snapshots_from_before_are_dropped(world: FakeCluster) -> None:
    worker, boxes = begun(world)
    slot = world.slots()[0]
    before = worker.of(0, 0)
    header = pb.SnapshotHeader(run="job/0", attempt=1, generation=before.generation, total=3, size=2)
    world.state_machine.snapshot_stored(header)
    offer(world, boxes[0], 8)
    lose(worker, 1, 1, 40.0)
    assert not world.snapshot_index.snapshots(slot.key)
    with pytest.raises(SupersededError, match="generation of box 0 slot 0"):
        world.state_machine.snapshot_stored(header)
    assert not world.snapshot_index.snapshots(slot.key)


def answer(worker: FakeWorker, data: bytes) -> None:
    for request in worker.heartbeat().state_requests:
        if request.request not in worker.answered:
            worker.answered.add(request.request)
            world = worker.world.state_machine
            world.answer_state(pb.StateAnswer(request=request.request, worker=worker.name, digest=1), data)


def test_answers_of_two_starts_are_never_mixed(world: FakeCluster) -> None:
    worker, boxes = begun(world)
    offer(world, boxes[0], 8)
    ask = pb.FetchStateRequest(run="job/0", attempt=1, step=10, deadline_s=9, progress=boxes[0].progress())
    query = world.state_machine.begin_state(ask)
    first, *_ = worker.heartbeat().state_requests
    world.state_machine.answer_state(pb.StateAnswer(request=first.request, worker="w", digest=1), b"before")
    lose(worker, 1, 1, 40.0)
    worker.ready()
    answer(worker, b"after")
    assert set(values(query)) == {"after"}
    ask.step = 7
    with pytest.raises(StateUnavailableError, match=r"8 to 10 .* was restarted from the state of step 8"):
        world.state_machine.begin_state(ask)
