"""Slots, generations and leases, on a virtual clock."""

from __future__ import annotations

import pytest
from fake_cluster import FakeCluster, FakeWorker, limited

from penstock.appliance.core.workers import HUNG_UP_S
from penstock.appliance.journal.snapshot_index import DropAttempt, DropSnapshot, DurableSnapshot, SlotKey
from penstock.appliance.limits import Limits
from penstock.proto.errors import InvalidArgumentError, SupersededError
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2


@pytest.fixture
def world() -> FakeCluster:
    return FakeCluster()


def generations(worker: FakeWorker) -> dict[int, int]:
    return {assignment.slot: assignment.generation for assignment in worker.heartbeat().assignments}


def test_slots_prefer_own_host_then_least_loaded(world: FakeCluster) -> None:
    near, far, farther = (
        world.worker("z-near", 2, host="host-a"),
        world.worker("b-far", 4, host="host-b"),
        world.worker("c-far", 4, host="host-c"),
    )
    world.open(num_workers_per_box=6)
    assert [len(worker.heartbeat().assignments) for worker in (near, far, farther)] == [2, 2, 2]
    assert generations(near) == {0: 1, 1: 1}


def test_waiting_slots_are_counted_as_missing(world: FakeCluster) -> None:
    box = world.open(num_workers_per_box=3)
    assert box.watch().missing_slots == 3
    seen = box.watch().version
    worker = world.worker("w", 2)
    gone = world.worker("v", 1)
    reply = box.watch()
    assert (reply.missing_slots, box.phases()) == (0, ["STARTING"] * 3)
    assert reply.version > seen
    assert world.topics[-1] == ("box", "job/0", 1, 0)
    assert len(worker.heartbeat().assignments) == 2
    lost = gone.heartbeat().assignments[0].slot
    world.run_for(4.0, [worker, box])
    assert box.watch().missing_slots == 1
    assert box.phases()[lost] == "WAITING"


def test_place_in_the_queue_of_starts_is_told(world: FakeCluster) -> None:
    box, worker = world.open(), world.worker("w")
    report = worker.slot_report(worker.of(0), pb.STARTING)
    report.start_queue_position, report.start_queue_length = 3, 7
    worker.heartbeat(report)
    slot = box.watch().slots[0]
    assert (slot.start_queue_position, slot.start_queue_length) == (3, 7)
    seen = box.watch().version
    worker.heartbeat(report)
    assert box.watch().version == seen
    world.topics.clear()
    report.start_queue_position = 2
    worker.heartbeat(report)
    assert not [topic for topic in world.topics if topic[0] == "box"], (
        "each start would wake the boxes of all that wait"
    )
    assert box.watch().slots[0].start_queue_position == 2
    worker.lose(worker.of(0))
    assert box.watch().slots[0].start_queue_position == 0


def test_a_slot_that_never_ran_just_starts_again(world: FakeCluster) -> None:
    world.open()
    worker = world.worker("w")
    worker.lose(worker.of(0))
    assert (worker.of(0).generation, worker.of(0).recovery) == (2, False)


def test_slot_recovers_without_its_ready_report(world: FakeCluster) -> None:
    world.open()
    worker = world.worker("w")
    world.state_machine.snapshot_stored(pb.SnapshotHeader(run="job/0", attempt=1, generation=1, size=3))
    worker.lose(worker.of(0))
    assert worker.of(0).recovery


def test_losses_without_progress_are_final(world: FakeCluster) -> None:
    box, worker = world.open(), world.worker("w")
    worker.ready()
    for number in range(3):
        worker.lose(worker.of(0), f"death {number}")
        world.run_for(1, [worker, box])
    assert box.phases()[0] == "STARTING"
    worker.lose(worker.of(0), "death 3")
    view = box.watch().slots[0]
    assert (view.phase, view.error.name) == (pb.FAILED, "WorkerLostError")
    assert view.error.message == (
        "box 0 slot 0 of run job/0 lost its runner 4 times within 60 s without a batch delivered in between (after "
        "batch 0 of the slot). Remove the causes and start the job again: "
        + "; ".join(f"runner of box 0 slot 0 on worker w died: death {number}" for number in range(4))
    )
    assert generations(worker) == {1: 1}


@pytest.mark.parametrize("relief", ["progress", "time"])
def test_progress_or_time_forgives_losses(world: FakeCluster, relief: str) -> None:
    box, worker = world.open(), world.worker("w")
    worker.ready()
    for _ in range(12):
        worker.lose(worker.of(0))
        if relief == "progress":
            box.deliver(2)
        else:
            world.run_for(21, [worker, box])
    assert box.phases()[0] == "STARTING"


def test_user_error_is_final_and_keeps_the_lane(world: FakeCluster) -> None:
    box, worker = world.open(), world.worker("w")
    worker.ready()
    report = worker.slot_report(worker.of(0), pb.FAILED)
    report.error.CopyFrom(records_pb2.ErrorDetail(name="InputFnError", message="boom", remote_traceback="T" * 100_000))
    worker.heartbeat(report)
    worker.heartbeat(report)
    view = box.watch().slots[0]
    assert (view.phase, view.error.name, view.error.message) == (pb.FAILED, "InputFnError", "boom")
    assert view.ticket  # what was produced before the error is still to be delivered
    assert len(view.error.remote_traceback) < 30_000
    assert generations(worker) == {0: 1, 1: 1}
    worker.ready()
    assert box.phases()[0] == "FAILED"
    world.run_for(4, [box])  # the worker dies: the error stays what it is
    view = box.watch().slots[0]
    assert (view.phase, view.error.name, view.ticket) == (pb.FAILED, "InputFnError", "")


def test_stack_is_that_of_the_last_loss(world: FakeCluster) -> None:
    box, worker = world.open(), world.worker("w")
    worker.ready()
    report = worker.slot_report(worker.of(0), pb.FAILED)
    report.lost, report.error.remote_traceback = True, "in f"
    worker.heartbeat(report)
    assert box.watch().slots[0].stack == "in f"
    worker.ready()
    world.run_for(4, [box])  # the worker is lost: this is not the death in f
    assert (box.watch().slots[0].restarts, box.watch().slots[0].stack) == (2, "")


def test_ended_connection_shortens_the_lease(world: FakeCluster) -> None:
    gone, back, other = world.worker("gone"), world.worker("back"), world.worker("other")
    for worker in (gone, back):
        world.state_machine.workers.worker_hung_up(worker.name, worker.session)
    world.state_machine.workers.worker_hung_up(other.name, "another session")
    back.report()
    world.run_for(HUNG_UP_S)
    assert set(world.state_machine.cluster.workers) == {"back", "other"}


@limited(abandoned_s=60)
def test_abandoned_attempt_is_closed() -> None:
    world = FakeCluster()
    box, worker = world.open(), world.worker("w")
    world.run_for(75, [worker])
    assert "no box of attempt 1 of run job/0 has reported for 60 s" in box.refused().message


def put(world: FakeCluster, total: int, *, generation: int = 1, size: int = 10, epoch: int = 0) -> None:
    header = pb.SnapshotHeader(run="job/0", attempt=1, box=0, slot=0, generation=generation)
    header.total, header.size, header.epoch = total, size, epoch
    world.state_machine.snapshot_stored(header)


KEY = SlotKey("job/0", 1, 0, 0)


def totals(world: FakeCluster) -> list[int]:
    return [kept.total for kept in world.snapshot_index.snapshots(KEY)]


def test_snapshot_after_its_attempt_is_removed(world: FakeCluster) -> None:
    world.open(client_id="a")
    world.worker("w").ready()
    put(world, 4)
    world.open(client_id="b")
    assert world.snapshot_index.take_drops() == [DropAttempt("job/0", 1)]
    with pytest.raises(SupersededError, match="superseded by attempt 2"):
        put(world, 5)
    assert world.snapshot_index.take_drops() == [DropSnapshot(KEY, 5, 0)]
    assert world.snapshot_index.used == 0


@limited(replay_share=0.5, value_max=900)
def test_budget_refuses_and_keeps_the_rest() -> None:
    world = FakeCluster(Limits(budget=1000))
    world.open()
    world.worker("w").ready()
    snapshot_index = world.snapshot_index
    assert "at most 900 bytes, got 901" in snapshot_index.why_refused(KEY, 901)
    assert snapshot_index.why_refused(KEY, 800) == ""  # the first of a slot may use it all
    put(world, 0, size=450)
    assert "does not fit into the budget: 450 of 500 bytes" in snapshot_index.why_refused(KEY, 51)
    assert snapshot_index.why_refused(KEY, 50) == ""
    with snapshot_index.expecting(50):
        assert "in use" in snapshot_index.why_refused(KEY, 1)
        assert snapshot_index.free == 500
    put(world, 0, size=400)  # the same position again replaces
    assert (totals(world), snapshot_index.used) == ([0], 400)
    assert snapshot_index.why_blob_refused(600) == ""
    assert "do not fit into the budget: 400 of 1000 bytes" in snapshot_index.why_blob_refused(601)


@limited(blob_idle_s=30)
def test_blobs_stay_while_an_attempt_names_them() -> None:
    world = FakeCluster()
    for name in ("named", "idle"):
        world.snapshot_index.add_blob(name, 5, world.now)
    box = world.open(resume=records_pb2.Resume(blob="named"))
    world.run_for(40, [box])
    assert [world.snapshot_index.has_blob(name) for name in ("named", "idle")] == [True, False]
    assert world.snapshot_index.used == 5
    box.close()
    world.run_for(40)
    assert not world.snapshot_index.has_blob("named")


def test_sure_snapshot_before_epoch_start_is_kept(world: FakeCluster) -> None:
    snapshot_index = world.snapshot_index
    for kept in (
        DurableSnapshot(0, 0, 1, True),
        DurableSnapshot(3, 0, 1),
        DurableSnapshot(5, 0, 1),
        DurableSnapshot(5, 1, 1, True),
        DurableSnapshot(9, 1, 1),
    ):
        snapshot_index.add(KEY, kept)
    snapshot_index.trim(KEY, 7)
    assert snapshot_index.snapshots(KEY) == [
        DurableSnapshot(5, 0, 1),
        DurableSnapshot(5, 1, 1, True),
        DurableSnapshot(9, 1, 1),
    ]
    snapshot_index.trim(KEY, 10)
    assert snapshot_index.snapshots(KEY) == [DurableSnapshot(9, 1, 1)]
    assert snapshot_index.used == 1


def test_snapshots_past_abandoned_step_are_unused(world: FakeCluster) -> None:
    """A runner produces ahead: one of its snapshots may lie beyond the batch after which the loop left the epoch."""
    snapshot_index = world.snapshot_index
    for kept in (
        DurableSnapshot(0, 0, 1),
        DurableSnapshot(8, 0, 1),
        DurableSnapshot(5, 1, 1),
        DurableSnapshot(12, 1, 1),
    ):
        snapshot_index.add(KEY, kept)
    snapshot_index.trim(
        KEY, 9
    )  # the loop left pass 0 after batch 5: from batch 8 of that epoch nobody comes to batch 9
    assert snapshot_index.snapshots(KEY) == [DurableSnapshot(5, 1, 1), DurableSnapshot(12, 1, 1)]


def test_status_names_straggler_hides_tickets(world: FakeCluster) -> None:
    box, worker = world.open(loader={"title": "Photos, batch_size=2"}), world.worker("w")
    worker.ready()
    report = worker.slot_report(worker.of(0), pb.READY)
    report.batches_per_s = 12.5
    worker.heartbeat(report)
    box.deliver(1)
    for _ in range(4):
        world.now += 0.5
        box.deliver(10)
    request = box.progress()
    request.waiting_for, request.waited_s = 2, 1.5
    world.watch(request)
    status = world.status()
    (run,), (node,) = status.runs, status.workers
    assert (run.run, run.attempt, run.input_fn, run.open) == ("job/0", 1, "Photos, batch_size=2", True)
    (shown,) = run.boxes
    assert (shown.step, shown.live, shown.waiting_for, shown.waited_s) == (41, True, "worker w (slot 1)", 1.5)
    assert shown.steps_per_s == pytest.approx(20)
    assert [slot.ticket for slot in shown.slots] == ["", ""]
    assert (node.worker, node.slots, node.slots_used, node.batches_per_s) == ("w", 8, 2, 12.5)


def test_a_report_of_another_shape_is_refused(world: FakeCluster) -> None:
    box = world.open()
    box.position = Position.start(3)
    with pytest.raises(InvalidArgumentError, match="a reported position must have 2 entries, got 3"):
        box.watch()


def test_lost_runner_raises_the_generation(world: FakeCluster) -> None:
    box, worker = world.open(), world.worker("w")
    worker.ready()
    before = worker.of(1)
    worker.lose(before)
    after = worker.of(1)
    assert (after.generation, after.recovery) == (2, True)
    assert after.lane_key != before.lane_key
    view = box.watch().slots[1]
    assert (view.phase, view.restarts) == (pb.STARTING, 1)
    assert view.note == "runner of box 0 slot 1 on worker w died: killed by SIGKILL"
    reply = worker.heartbeat(worker.slot_report(before, pb.READY))  # late words of the old generation
    assert [(taken.slot, taken.generation, taken.why) for taken in reply.taken] == [
        (1, 1, "runner of box 0 slot 1 on worker w died: killed by SIGKILL; worker w has it")
    ]
    assert box.phases() == ["READY", "STARTING"]
    worker.lose(before)
    assert generations(worker) == {0: 1, 1: 2}


def test_snapshot_of_old_generation_is_refused(world: FakeCluster) -> None:
    world.open()
    worker = world.worker("w")
    worker.ready()
    worker.lose(worker.of(0))
    with pytest.raises(SupersededError, match=r"generation of box 0 slot 0 of run job/0 must be 2, got 1"):
        world.state_machine.slot_of_generation(KEY, 1)
    worker.ready()
    put(world, 4, generation=2)
    world.state_machine.placement.fail(world.slots()[1], records_pb2.ErrorDetail(name="PenstockError", message="x"))
    world.state_machine.placement.move(world.slots()[1], "lost", None)
    with pytest.raises(SupersededError, match=r"must be that of its runner \(it has none now\), got 1"):
        world.state_machine.slot_of_generation(KEY._replace(slot=1), 1)
    with pytest.raises(SupersededError):  # it was on its way to the disk when the slot moved: told, but as good
        put(world, 3, generation=1)
    assert totals(world) == [3, 4]


def test_late_report_does_not_turn_back(world: FakeCluster) -> None:
    box = world.open()
    box.deliver(5)
    late = box.progress()
    box.deliver(5)
    world.watch(late)
    assert world.status().runs[0].boxes[0].step == 10
