"""States where epochs end: on their own, unevenly, by a break of the loop, and after a restart of the coordinator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_cluster import FakeBox, FakeCluster, FakeWorker
from queries import ask, failure, respond, result, values

from penstock.appliance.core.state_query import EPOCHS_SENT
from penstock.appliance.journal.journal import StateDir
from penstock.proto.errors import InvalidArgumentError, ProtocolError, StateUnavailableError
from penstock.proto.state.position import Position


@pytest.fixture
def world() -> FakeCluster:
    return FakeCluster()


@pytest.mark.parametrize("tells_all", [False, True])
@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_record_equals_the_loops_for_all_ends(seed: int, reports: bool, tells_all: bool) -> None:
    """Against the round robin itself, with random passes, breaks, reports and orders of answers.

    Workers that tell one end at a time may not get to the bottom of epochs that were left; then it is an error, and
    never another record.
    """
    rng = random.Random(seed)
    world = FakeCluster()
    count = rng.randint(1, 4)
    lengths = {(slot, epoch): rng.randint(0, 6) + (slot == 0) for slot in range(count) for epoch in range(40)}
    box = world.open(num_workers_per_box=count)
    worker = world.worker("w")
    worker.ready()

    loop = Position.start(count)
    starts: dict[tuple[int, int], int] = {}
    records = [loop.copy()]

    def begin_pass() -> None:
        starts.update({(slot, loop.epoch): loop.total[slot] for slot in range(count)})

    begin_pass()
    while loop.step < 40:
        slot = loop.turn
        if loop.delivered[slot] == lengths[slot, loop.epoch]:
            if loop.exhaust():
                begin_pass()
            continue
        loop.deliver()
        records.append(loop.copy())
        if reports and rng.random() < 0.2:
            box.position = loop.copy()
            box.watch()
        if rng.random() < 0.05:
            box.abandoned[loop.epoch] = loop.step
            loop.abandon_epoch()
            begin_pass()
    box.position = records[-1]
    for step in rng.sample(range(41), 8):
        query = ask(box, step)
        for _ in range(300):
            if query.done:
                break
            respond(worker, starts=starts, only=rng.choice([None, *range(count)]), tells_all=tells_all)
        if result(query) is None and not tells_all:
            assert isinstance(failure(query), ProtocolError)
            world.state_machine.state_queries.end(query)
            continue
        assert values(query) == [
            f"0.{slot}:{records[step].epoch}.{total}" for slot, total in enumerate(records[step].total)
        ]
        found = result(query)
        assert found is not None
        assert Position.from_proto(found.positions[0]).to_proto() == records[step].to_proto()
        world.state_machine.state_queries.end(query)


def where_one_left(world: FakeCluster) -> tuple[FakeBox, FakeBox, FakeWorker]:
    """Open two boxes: one has abandoned its epoch after step 5, and taken another batch; the other is at step 4."""
    first, second = (world.open(number, num_boxes=2) for number in range(2))
    worker = world.worker("w")
    worker.ready()
    first.deliver(5)
    second.deliver(4)
    first.abandon_epoch()
    first.deliver(1)
    return first, second, worker


@pytest.mark.parametrize(("leaves", "restarted"), [(True, False), (False, True)])
def test_box_that_may_abandon_too_is_waited_for(tmp_path: Path, leaves: bool, restarted: bool) -> None:
    """Ignore what the box's workers produced ahead of the break."""
    directory = StateDir(tmp_path)
    world = FakeCluster(directory=directory)
    first, second, worker = where_one_left(world)
    if restarted:
        world.restart(worker)
        second.watch()
    query = ask(first, 6)
    respond(worker)
    assert not query.done
    assert query.waits_for() == "box 1 (at step 5, where box 0 abandoned an epoch)"
    second.deliver(1)
    assert not [request for request in worker.heartbeat().state_requests if request.box == 1]
    if leaves:
        second.abandon_epoch()
    else:
        second.deliver(1)
    respond(worker)
    there = ["1.0:1.4", "1.1:1.2"] if leaves else ["1.0:0.3", "1.1:0.3"]
    assert values(query) == ["0.0:1.4", "0.1:1.2", *there]
    world.journal.close()
    directory.close()


def test_workers_get_abandoned_epochs(world: FakeCluster) -> None:
    """The last ones; of what lies before them it is said that it is not known."""
    box = world.open(0)
    worker = world.worker("w")
    worker.ready()
    for taken in (5, 4, 3):
        box.deliver(taken)
        box.abandon_epoch()
    box.deliver(2)
    ask(box, 14)
    told = {request.slot: request for request in worker.heartbeat().state_requests}
    assert [(end.epoch, end.total) for end in told[0].abandoned] == [(2, 7), (1, 5), (0, 3)]
    assert [(end.epoch, end.total) for end in told[1].abandoned] == [(2, 5), (1, 4), (0, 2)]
    assert {request.abandoned_from for request in told.values()} == {0}
    for _ in range(EPOCHS_SENT):
        box.abandon_epoch()
        box.deliver(1)
    ask(box, 14 + EPOCHS_SENT)
    later = next(request for request in worker.heartbeat().state_requests if request.step > 14)
    assert [end.epoch for end in later.abandoned] == list(reversed(range(3, 3 + EPOCHS_SENT)))
    assert later.abandoned_from == 3


def test_ended_box_is_not_waited_for(world: FakeCluster) -> None:
    first, second, worker = where_one_left(world)
    query = ask(first, 6)
    second.epoch_ended = True
    second.watch()
    respond(worker)
    assert values(query)[2:] == ["1.0:0.2", "1.1:0.2"]


def test_disagreeing_workers_are_an_error(world: FakeCluster) -> None:
    box, worker = world.open(), world.worker("w")
    worker.ready()
    box.deliver(4)
    box.abandon_epoch()
    box.deliver(2)
    query = ask(box, 6)
    for _ in range(3):  # the epoch was left after two batches each; slot 1 insists that it has had one
        respond(worker, starts={(0, 1): 2, (1, 1): 1})
    assert isinstance(failure(query), ProtocolError)
    assert failure(query).message.endswith("Check that the loader is deterministic in box 0 slot 1 on worker w")


def test_later_report_shows_the_earlier_end() -> None:
    """The coordinator has forgotten the ends; slot 2 had ended after 2 batches, the loop left the epoch at step 9."""
    world = FakeCluster()
    worker, box = world.worker("w", slots=3), world.open(num_workers_per_box=3)
    worker.ready()
    box.abandoned[0] = 9
    box.position = Position(11, 1, [0, 1, 2], 2, [1, 1, 0], [5, 4, 2])
    box.report()
    query = ask(box, 10)
    assert [slot_request.place[2] for slot_request in query.requests.values()] == [5, 3, 2]
    respond(worker)
    assert values(query) == ["0.0:1.5", "0.1:1.3", "0.2:1.2"]


def test_refuted_plan_is_no_answer() -> None:
    """Two epochs back nothing tells that slot 1 had no batch at all, and its new worker does not know it."""
    world = FakeCluster()
    worker, box = world.worker("w", slots=2), world.open(num_workers_per_box=2)
    worker.ready()
    box.abandoned |= {0: 4, 1: 6}
    box.position = Position(7, 2, [0, 1], 1, [1, 0], [6, 1])
    box.report()
    query = ask(box, 4)
    respond(worker, tells_all=False)
    assert isinstance(query.failure, ProtocolError)


# ---- after a restart of the coordinator, which has forgotten where the boxes were


@pytest.fixture
def restartable(tmp_path: Path) -> Iterator[FakeCluster]:
    directory = StateDir(tmp_path)
    world = FakeCluster(directory=directory)
    yield world
    world.journal.close()
    directory.close()


def test_restart_waits_for_every_boxs_report(restartable: FakeCluster) -> None:
    """Wait for the reports: abandoned epochs may be newer than the journal, and a new runner has none of them."""
    asking, other = (restartable.open(number, num_boxes=2) for number in (0, 1))
    worker = restartable.worker("w")
    worker.ready()
    for box in (asking, other):
        box.deliver(3)
    other.abandoned[0] = 3
    restartable.restart(worker)
    asking.deliver(1)
    query = ask(asking, 4)
    respond(worker)
    assert not query.done
    assert query.waits_for() == "box 1 (has not reported since the coordinator started)"
    other.watch()
    respond(worker)
    assert values(query) == ["0.0:0.2", "0.1:0.2", "1.0:1.3", "1.1:1.1"]
    asking.close()
    restartable.restart()
    assert "box 0 has closed" in failure(ask(other, 3)).message


def test_restart_does_not_ask_behind_the_window(restartable: FakeCluster) -> None:
    """The base is known again, to count from, but what was kept of the steps since was dropped long ago."""
    boxes = [restartable.open(number, num_boxes=2, retention=4) for number in range(2)]
    worker = restartable.worker("w")
    worker.ready()
    boxes[0].deliver(3)
    boxes[1].deliver(20)
    restartable.restart(worker)
    boxes[0].watch()
    query = ask(boxes[0], 3)  # where box 1 stands is not known yet
    respond(worker)
    assert not query.done
    boxes[1].watch()
    assert not [request for request in worker.heartbeat().state_requests if request.box == 1]
    assert isinstance(failure(query), StateUnavailableError)
    assert "box 1 is more than retention_steps=" in failure(query).message


def test_restart_asks_from_the_epoch_start(restartable: FakeCluster) -> None:
    box = restartable.open(retention=4)
    worker = restartable.worker("w")
    worker.ready()
    box.deliver(20)
    restartable.restart(worker)
    box.watch()
    query = ask(box, 16)
    respond(worker)
    assert values(query) == ["0.0:0.8", "0.1:0.8"]


def test_restart_learns_the_epochs_between_reports(restartable: FakeCluster) -> None:
    """Plan from the starts of the epochs: no slot is asked where it ended, because a new runner does not know it."""
    box, worker = restartable.open(), restartable.worker("w")
    worker.ready()
    loop, records = Position.start(2), [Position.start(2)]
    while loop.step < 60:
        if loop.delivered[loop.turn] == (loop.epoch + 7 if loop.turn else 5):
            if loop.exhaust():
                box.epoch_starts.append(loop.copy())
            continue
        loop.deliver(loop.step)
        records.append(loop.copy())
    box.deliver(1)
    restartable.restart(worker)
    del box.epoch_starts[:-3]
    box.position, box.omits_epoch_starts = records[-1], True
    assert box.watch().wants_epoch_starts
    query = ask(box, 50)
    assert query.waits_for() == "box 0 (has not reported since the coordinator started)"
    box.omits_epoch_starts = False
    assert not box.watch().wants_epoch_starts
    for step in range(box.epoch_starts[0].step + 1, 61, 5):
        query = ask(box, step)
        respond(worker)
        assert values(query) == [
            f"0.{slot}:{records[step].epoch}.{total}" for slot, total in enumerate(records[step].total)
        ]


@pytest.mark.parametrize("wrong", ["batches", "epoch", "slots"])
def test_positions_that_start_no_epoch_are_refused(world: FakeCluster, wrong: str) -> None:
    box = world.open()
    start = Position.start(3 if wrong == "slots" else 2, epoch=0 if wrong == "epoch" else 1)
    if wrong == "batches":
        start.deliver()
    box.epoch_starts.append(start)
    error = box.refused()
    assert isinstance(error, InvalidArgumentError)
    says = (
        "a reported position must have 2 entries" if wrong == "slots" else "an epoch's start must have no batch of it"
    )
    assert says in error.message


def test_a_worker_waits_for_the_end_only_where_another_box_has_reached_it(world: FakeCluster) -> None:
    one, two = world.open(0, num_boxes=2), world.open(1, num_boxes=2)
    worker = world.worker("w", 8)
    worker.ready()
    one.deliver(4)
    two.deliver(4)
    assert one.position is not None
    for _ in range(2):
        one.position.exhaust()
    one.epoch_ended = True
    one.watch()
    query = ask(one, 4)
    assert sorted((asked.key.box, asked.message.at_end) for asked in query.requests.values()) == [
        *((0, False), (0, False), (1, True), (1, True))
    ]


def test_end_that_the_loop_has_seen_is_told(world: FakeCluster) -> None:
    """A slot whose runner took over may not have come to the epoch's end when it answers."""
    box = world.open(0)
    worker = world.worker("w")
    worker.ready()
    box.deliver(4)
    query = ask(box, 4)
    respond(worker, only=0, tells_all=False)
    assert box.position is not None
    for _ in range(2):
        box.position.exhaust()
    box.epoch_ended = True
    box.watch()
    assert [asked.message.at_end for asked in query.requests.values()] == [False], (
        "the worker need not wait to learn it"
    )
    respond(worker, tells_all=False)
    found = result(query)
    assert found is not None
    assert [record.next_epoch for record, _ in found.records] == [True, True]
