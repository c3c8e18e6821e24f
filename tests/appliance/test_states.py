"""States at a step: planning, rounds, sharing, windows and failures, without sockets or time."""

from __future__ import annotations

import pytest
from fake_cluster import FakeBox, FakeCluster, FakeWorker, limited
from queries import ask, failure, respond, result, values

from penstock.proto.errors import (
    InputFnError,
    ProtocolError,
    StateUnavailableError,
    SupersededError,
)
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2


@pytest.fixture
def world() -> FakeCluster:
    return FakeCluster()


def two_boxes(world: FakeCluster) -> tuple[list[FakeBox], FakeWorker]:
    """Return two boxes with a slot each, which took three steps, and their worker."""
    boxes = [world.open(number, num_boxes=2, num_workers_per_box=1) for number in range(2)]
    worker = world.worker("w")
    worker.ready()
    for box in boxes:
        box.deliver(3)
    return boxes, worker


def test_earlier_end_replans_and_keeps_answers(world: FakeCluster) -> None:
    asker, _ = (world.open(number, num_boxes=2, num_workers_per_box=3) for number in range(2))
    worker = world.worker("w")
    worker.ready()
    asker.deliver(10)
    query = ask(asker, 10)  # box 1 has not reported anything: its record is planned from its start
    respond(worker, only=0)  # 4 of 10, and stays so
    starts = {(1, 1): 2}
    for request in list(worker.heartbeat().state_requests):
        if request.box == 0:
            respond(worker, only=request.slot, box=0)
    respond(worker, starts=starts)
    assert not query.done
    # Slot 1 had 2, the other two shared the rest; slot 0 stays at 4, and is not asked again.
    asked = {(request.box, request.slot, request.position.total) for request in worker.heartbeat().state_requests}
    assert asked == {(1, 1, 2), (1, 2, 4)}
    respond(worker, starts=starts)
    assert values(query)[3:] == ["1.0:0.4", "1.1:0.2", "1.2:0.4"]
    found = result(query)
    assert found is not None
    assert list(found.positions[1].live) == [0, 2]


def test_requests_end_with_the_last_caller(world: FakeCluster) -> None:
    box, worker = world.open(), world.worker("w")
    worker.ready()
    box.deliver(4)
    queries = [ask(box, 4), ask(box, 4)]
    version = worker.heartbeat().version
    world.state_machine.state_queries.end(queries[0])
    assert len(worker.heartbeat().state_requests) == 2
    world.state_machine.state_queries.end(queries[1])
    reply = worker.heartbeat()
    assert (list(reply.state_requests), reply.version > version) == ([], True)
    assert not ask(box, 4).done


def test_lost_box_is_waited_for(world: FakeCluster) -> None:
    """A training process that was stopped for 11 s ended a job whose processes all lived: a save failed meanwhile."""
    boxes, worker = two_boxes(world)
    queries = [ask(boxes[0], 2)]
    assert not queries[0].done
    world.run_for(11, [boxes[0], worker])
    queries.append(ask(boxes[0], 3))
    for query in queries:
        assert "box 1 (its training process has stopped reporting" in query.waits_for()
    boxes[1].watch()
    worker.ready()
    respond(worker)
    assert all(result(query) is not None for query in queries)


def test_run_whose_boxes_are_lost_has_no_state(world: FakeCluster) -> None:
    boxes, worker = two_boxes(world)
    world.run_for(11, [boxes[0], worker])
    waiting = ask(boxes[0], 2)
    respond(worker)
    assert not waiting.done
    world.run_for(11, [worker])
    late = world.state_machine.begin_state(pb.FetchStateRequest(run="job/0", deadline_s=30, newest=True))
    for query in (waiting, late):
        assert isinstance(failure(query), StateUnavailableError)
        assert "its training processes have stopped reporting" in failure(query).message


def test_closed_box_answers_with_final_state(world: FakeCluster) -> None:
    boxes, worker = two_boxes(world)
    boxes[1].close()
    query = ask(boxes[0], 3)
    respond(worker)
    found = result(query)
    assert found is not None
    world.run_for(61, [boxes[0]])
    assert isinstance(failure(ask(boxes[0], 2)), StateUnavailableError)


def test_ended_box_answers_with_final_state(world: FakeCluster) -> None:
    boxes = [world.open(number, num_boxes=2, num_workers_per_box=1) for number in range(2)]
    worker = world.worker("w")
    worker.ready()
    boxes[0].deliver(9)
    boxes[1].deliver(6)
    query = ask(boxes[0], 9)
    assert {(r.box, r.position.total) for r in worker.heartbeat().state_requests} == {(0, 9), (1, 9)}
    boxes[1].epoch_ended = True
    boxes[1].watch()
    assert {(r.box, r.position.total) for r in worker.heartbeat().state_requests} == {(0, 9), (1, 6)}
    respond(worker)
    assert values(query) == ["0.0:0.9", "1.0:0.6"]
    found = result(query)
    assert found is not None
    assert (found.positions[1].step, found.records[1][0].step) == (6, 9)
    world.state_machine.state_queries.end(query)
    # Once the box has gone on, its state at 9 is another one: the old answer must not be served.
    boxes[1].epoch_ended = False
    boxes[1].deliver(3)
    assert not ask(boxes[1], 9).done


def test_steps_outside_the_window_are_refused(world: FakeCluster) -> None:
    start = Position.start(2, step=10).to_proto()
    world.snapshot_index.add_blob("blob", 3, world.now)
    box = world.open(retention=20, start=start, resume=records_pb2.Resume(blob="blob"))
    world.worker("w").ready()
    box.deliver(15)
    with pytest.raises(StateUnavailableError) as caught:
        ask(box, 26)
    assert caught.value.message == (
        "step must be 10 to 25 for run job/0, got 26: this launch began at step 10 and keeps the "
        "states of the last retention_steps=20 steps"
    )
    box.deliver(15)
    with pytest.raises(StateUnavailableError, match="step must be 20 to 40 for run job/0, got 19"):
        ask(box, 19)
    assert not ask(box, 20).done
    operator = pb.FetchStateRequest(run="job/0", step=41)
    with pytest.raises(StateUnavailableError, match="step must be 20 to 40"):
        world.state_machine.begin_state(operator)
    # A member without a report of its own may ask beyond what was reported: its step is produced, or a deadline passes.
    assert not world.state_machine.begin_state(pb.FetchStateRequest(run="job/0", attempt=1, step=41)).done


def test_newest_is_the_last_step_of_all_boxes(world: FakeCluster) -> None:
    boxes = [world.open(number, num_boxes=3) for number in range(3)]
    world.worker("w").ready()
    for box, steps in zip(boxes, (7, 5, 2), strict=True):
        box.deliver(steps)
    newest = pb.FetchStateRequest(run="job/0", newest=True)
    assert world.state_machine.begin_state(newest).step == 2
    boxes[2].epoch_ended = True
    boxes[2].watch()
    assert world.state_machine.begin_state(newest).step == 5


def test_worker_error_reaches_the_caller(world: FakeCluster) -> None:
    box, worker = world.open(), world.worker("w")
    worker.ready()
    box.deliver(2)
    query = ask(box, 2)
    request = worker.heartbeat().state_requests[1]
    answer = pb.StateAnswer(request=request.request, worker="w", session="w-1")
    answer.error.CopyFrom(records_pb2.ErrorDetail(name="InputFnError", message="boom", remote_traceback="far away"))
    world.state_machine.answer_state(answer, b"")
    error = failure(query)
    assert isinstance(error, InputFnError)
    assert error.message == "state of run job/0 at step 2: box 0 slot 1 on worker w: boom"
    assert error.remote_traceback == "far away"
    assert not ask(box, 2).done  # the next asker tries again


def test_a_slot_that_has_failed_fails_the_state(world: FakeCluster) -> None:
    box, worker = world.open(), world.worker("w")
    worker.ready()
    box.deliver(2)
    query = ask(box, 2)
    report = worker.slot_report(worker.of(0), pb.FAILED)
    report.error.CopyFrom(records_pb2.ErrorDetail(name="InputFnError", message="boom"))
    worker.heartbeat(report)
    assert failure(query).message == "state of run job/0 at step 2: box 0 slot 0 on worker w: boom"


def test_contradicting_worker_is_an_error(world: FakeCluster) -> None:
    box, worker = world.open(), world.worker("w")
    worker.ready()
    box.deliver(4)
    query = ask(box, 4)
    request = worker.heartbeat().state_requests[0]
    answer = pb.StateAnswer(request=request.request, worker="w", session="w-1", ended=True, ended_total=7)
    world.state_machine.answer_state(answer, b"")
    assert isinstance(failure(query), ProtocolError)
    assert "must end before batch 2 of epoch 0, got epoch 0 after batch 7" in failure(query).message


def test_only_the_owner_s_answer_counts(world: FakeCluster) -> None:
    box, worker = world.open(num_workers_per_box=1), world.worker("w")
    worker.ready()
    box.deliver(1)
    query = ask(box, 1)
    (request,) = worker.heartbeat().state_requests
    world.state_machine.answer_state(pb.StateAnswer(request=request.request, worker="other"), b"forged")
    assert not query.done
    respond(worker)
    assert values(query) == ["0.0:0.1"]


def test_a_superseded_attempt_s_askers_are_told(world: FakeCluster) -> None:
    box = world.open(client_id="a")
    box.deliver(1)
    query = ask(box, 1)
    world.open(client_id="b")
    assert isinstance(failure(query), SupersededError)


@limited(answers_max=20)
def test_results_are_kept_within_their_budget() -> None:
    world = FakeCluster()
    box, worker = world.open(), world.worker("w")
    worker.ready()
    for _ in range(3):
        box.deliver(2)
        query = ask(box, box.position.step if box.position else 0)
        respond(worker)
        assert query.done
        world.state_machine.state_queries.end(query)
    assert not ask(box, 2).done  # 14 bytes each: only the newest fits
    assert ask(box, 6).done


def test_no_result_outlives_its_attempt(world: FakeCluster) -> None:
    box, worker = world.open(client_id="a"), world.worker("w")
    worker.ready()
    box.deliver(2)
    query = ask(box, 2)
    respond(worker)
    world.state_machine.state_queries.end(query)
    world.open(client_id="b")
    assert world.state_machine.state_queries._finished == {}


def digest_of(box: int, slot: int, total: int) -> int:
    return 10_000 * box + 1_000 * slot + total


def fly(box: FakeBox, steps: int) -> None:
    """The loop takes batches whose digests it sees, and reports."""
    if box.position is None:
        box.position = Position.start(box.request.num_workers_per_box)
    for _ in range(steps):
        slot = box.position.turn
        box.position.deliver(digest_of(box.request.box, slot, box.position.total[slot] + 1))
    box.watch()


@pytest.mark.parametrize(("meanwhile", "history"), [(0, 64), (5, 10), (9, 64)])
def test_state_has_every_boxs_stream_digest(meanwhile: int, history: int) -> None:
    """Box 1 has not come to the step when it is asked for, and goes on while the workers answer; its report from before
    may be among the positions that the cluster state keeps, or not."""
    with limited(history_entries=history):
        world = FakeCluster()
        boxes = [world.open(number, num_boxes=2) for number in range(2)]
        worker = world.worker("w")
        worker.ready()
        fly(boxes[0], 8)
        fly(boxes[1], 3)
        query = ask(boxes[0], 8)
        requests = list(worker.heartbeat().state_requests)
        fly(boxes[1], meanwhile)
        for request in requests:
            answer = pb.StateAnswer(request=request.request, worker="w", digests_after=request.digests_after)
            totals = range(request.digests_after + 1, request.position.total + 1)
            answer.digests.extend(digest_of(request.box, request.slot, total) for total in totals)
            world.state_machine.answer_state(answer, b"")
        found = result(query)
        assert found is not None
        for number in range(2):
            truth = Position.start(2)
            for _ in range(8):
                truth.deliver(digest_of(number, truth.turn, truth.total[truth.turn] + 1))
            assert found.positions[number].chain == truth.chain
