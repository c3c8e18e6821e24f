"""State queries of a fleet: box by box, so many at once, in bounded memory."""

from __future__ import annotations

import pytest
from fake_cluster import FakeBox, FakeCluster, FakeWorker, limited
from queries import ask, respond, values

from penstock.appliance.core.state_queries import ANSWERS_FREED
from penstock.appliance.journal.snapshot_index import SlotKey, SnapshotIndex
from penstock.proto.errors import OverloadedError
from penstock.proto.v1 import coordinator_pb2 as pb


def fleet(boxes: int) -> tuple[FakeCluster, list[FakeBox], FakeWorker]:
    """Boxes of two slots, all on one worker, four steps done."""
    world = FakeCluster()
    opened = [world.open(number, num_boxes=boxes) for number in range(boxes)]
    worker = world.worker("w", 2 * boxes)
    worker.ready()
    for box in opened:
        box.deliver(4)
    return world, opened, worker


def admitted(world: FakeCluster, answer: pb.StateAnswer) -> float | None:
    return world.state_machine.state_queries.admit(answer.request, answer.state_bytes, world.now)


def asked(worker: FakeWorker) -> set[int]:
    """The boxes that the worker is asked for now."""
    return {request.box for request in worker.heartbeat().state_requests}


def answer_of(worker: FakeWorker, box: int, slot: int, size: int) -> pb.StateAnswer:
    (request,) = (r for r in worker.heartbeat().state_requests if (r.box, r.slot) == (box, slot))
    return pb.StateAnswer(request=request.request, worker=worker.name, session=worker.session, state_bytes=size)


@limited(asked_at_once=4)
def test_slots_are_asked_in_batches_of_boxes() -> None:
    _, boxes, worker = fleet(5)
    query = ask(boxes[0], 4)
    assert asked(worker) == {0, 1}
    assert "3 boxes after these" in query.waits_for()
    respond(worker, box=1)
    assert (query.complete, asked(worker)) == (1, {0, 2})
    respond(worker, box=0, only=0)
    assert asked(worker) == {0, 2}  # three slots, and the next box has two
    for _ in range(4):
        respond(worker)
    assert values(query) == [f"{box}.{slot}:0.2" for box in range(5) for slot in range(2)]
    assert asked(worker) == set()


@limited(answers_max=20, asked_at_once=2)
def test_short_memory_releases_sent_records() -> None:
    world, boxes, worker = fleet(4)  # 14 bytes a box
    first, second = ask(boxes[0], 4), ask(boxes[1], 4)
    assert first is second
    for _ in range(2):
        respond(worker)
    world.state_machine.state_queries.sent(first, 0)
    assert sorted(first.boxes) == [0, 1]  # one asker has not been sent it
    for _ in range(2):
        world.state_machine.state_queries.sent(first, 1)
    assert sorted(first.boxes) == [0]
    world.state_machine.state_queries.sent(first, 0)
    assert sorted(first.boxes) == []
    late = ask(boxes[2], 4)
    assert late is not first  # it could not be told all any more
    for _ in range(8):
        respond(worker)
    assert first.done
    assert sorted(first.boxes) == [2, 3]
    assert late.done
    assert len(values(late)) == 8


@limited(answers_max=50, asked_at_once=2)
def test_an_asker_that_leaves_holds_nothing_back() -> None:
    world, boxes, worker = fleet(4)
    query = ask(boxes[0], 4)
    ask(boxes[1], 4)
    for _ in range(2):
        respond(worker)
    for box in (0, 1):
        world.state_machine.state_queries.sent(query, box)
    world.state_machine.state_queries.end(query, 0)
    world.state_machine.state_queries.sent(query, 1)
    assert 1 not in query.boxes


@limited(answers_max=100)
def test_answers_wait_except_of_the_next_box() -> None:
    world, boxes, worker = fleet(3)
    query = ask(boxes[0], 4)
    state_machine = world.state_machine
    assert admitted(world, answer_of(worker, 1, 0, 80)) is None
    late = answer_of(worker, 2, 0, 80)
    assert admitted(world, late) == 30
    assert admitted(world, answer_of(worker, 0, 0, 80)) is None  # else nothing would ever be sent
    assert query.held == 160
    world.topics.clear()
    state_machine.state_queries.lost(answer_of(worker, 1, 0, 80).request)
    assert ANSWERS_FREED in world.topics
    assert admitted(world, late) == 30
    state_machine.state_queries.lost(answer_of(worker, 0, 0, 80).request)
    assert admitted(world, late) is None
    assert query.held == 80
    state_machine.answer_state(late, bytes(80))
    assert query.held == 80
    state_machine.state_queries.end(query)
    assert state_machine.state_queries.held == 0


@limited(answers_max=1)
def test_unneeded_answer_does_not_wait() -> None:
    world, boxes, worker = fleet(1)
    query = ask(boxes[0], 4)
    answer = answer_of(worker, 0, 0, 80)
    assert world.state_machine.state_queries.wanted(answer.request)
    world.state_machine.state_queries.end(query)
    assert not world.state_machine.state_queries.wanted(answer.request)
    assert admitted(world, answer) is None


def test_repeated_request_has_a_new_id() -> None:
    """A worker answers each request once, and may not have seen that it was closed meanwhile."""
    world, boxes, worker = fleet(1)
    first = ask(boxes[0], 4)
    before = {request.request for request in worker.heartbeat().state_requests}
    world.state_machine.state_queries.end(first)
    ask(boxes[0], 4)
    assert before.isdisjoint(request.request for request in worker.heartbeat().state_requests)


@limited(answers_max=100)
def test_lost_answer_frees_its_budget() -> None:
    world, boxes, worker = fleet(3)
    query = ask(boxes[0], 4)
    assert admitted(world, answer_of(worker, 1, 0, 80)) is None
    late = answer_of(worker, 2, 0, 80)
    assert admitted(world, late) == 30
    world.topics.clear()
    worker.lose(worker.of(0, box=1))
    assert query.held == 0
    assert ANSWERS_FREED in world.topics
    assert admitted(world, late) is None


@limited(queries_max=1)
def test_queries_of_a_run_are_limited() -> None:
    world, (box,), _ = fleet(1)
    asked = [ask(box, step) for step in (1, 2, 3)]
    assert ask(box, 3) is asked[2]
    with pytest.raises(OverloadedError, match="at most 3 states of run job/0"):
        ask(box, 4)
    world.state_machine.state_queries.end(asked[0])
    ask(box, 4)


def test_blobs_leave_room_for_snapshots() -> None:
    """Blobs that nobody names filled the budget, and no run could start: each slot has a first snapshot."""
    snapshot_index = SnapshotIndex(1000)
    snapshot_index.add_blob("large", 880, 0.0)
    assert "880 of 900 bytes of the coordinator's budget for such values" in snapshot_index.why_blob_refused(21)
    assert not snapshot_index.why_blob_refused(20)
    assert not snapshot_index.why_refused(SlotKey("job/0", 1, 0, 0), 120)
