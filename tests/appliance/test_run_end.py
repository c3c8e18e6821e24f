"""How runs end: one reason for each attempt, decided once, in status, events and counters, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cluster import FakeBox, FakeCluster, limited

from penstock.appliance.core.run_end import REASONS
from penstock.appliance.journal.journal import StateDir
from penstock.proto.errors import (
    DeadlineError,
    InputFnError,
    NoWorkersError,
    PenstockError,
    PoisonBatchError,
    WorkerLostError,
)
from penstock.proto.v1 import coordinator_pb2 as pb


def end_of(world: FakeCluster, name: str = "job/0") -> pb.RunEnd | None:
    (run,) = (run for run in world.status().runs if run.run == name)
    return run.end if run.HasField("end") else None


def reason(world: FakeCluster) -> str:
    """The reason in the status, which is the one of the only event and of the only count."""
    end = end_of(world)
    assert end is not None
    (event,) = (event for event in world.status().events if event.kind == "run ended")
    assert event.text == f"{end.reason}, after step {end.step}: {end.text}"
    assert event.fault == end.fault
    counts = world.state_machine.cluster.run_ends
    assert set(counts) == set(REASONS), "a series that appears with its first count has no increase"
    assert {name: count for name, count in counts.items() if count} == {end.reason: 1}
    assert [(run, told.reason) for run, told in world.state_machine.cluster.new_ends] == [("job/0", end.reason)]
    return end.reason


def boxes(world: FakeCluster, count: int) -> list[FakeBox]:
    return [world.open(number, num_boxes=count, attempt_key="one") for number in range(count)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InputFnError("it raised"), "raised"),
        (PenstockError("something else"), "raised"),
        (WorkerLostError("four deaths"), "raised"),
        (PoisonBatchError("batch 7"), "quarantined"),
        (DeadlineError("120 s"), "stalled"),
        (NoWorkersError("120 s"), "no workers"),
    ],
)
def test_error_that_the_loop_got_is_the_reason(error: PenstockError, expected: str) -> None:
    world = FakeCluster()
    world.wall = 7.0
    world.worker("w").ready()
    box = world.open()
    box.deliver(3)
    box.close(error)
    assert reason(world) == expected
    end = end_of(world)
    assert end is not None
    assert (end.attempt, end.error, end.text, end.box, end.step) == (1, type(error).__name__, error.message, 0, 3)
    assert (end.wall_s, end.fault) == (7.0, True)


def test_loop_that_came_to_its_end_has_finished() -> None:
    world = FakeCluster()
    first, second = boxes(world, 2)
    first.close(finished=True)
    assert end_of(world) is None
    second.close(finished=True)
    assert reason(world) == "finished"
    world = FakeCluster()
    first, second = boxes(world, 2)
    first.close(finished=True)
    second.close()
    assert reason(world) == "closed"


def test_run_fails_with_its_first_box_although_others_go_on() -> None:
    """They wait for it in a collective, perhaps for long; then their launcher kills them."""
    world = FakeCluster()
    world.worker("w").ready()
    first, second = boxes(world, 2)
    second.close(DeadlineError("120 s"))
    assert reason(world) == "stalled"
    (run,) = world.status().runs
    assert (run.open, run.end.box, [box.closed for box in run.boxes]) == (True, 1, [False, True])
    world.run_for(70, [first])
    assert world.status().runs[0].open, "it may still save"
    world.run_for(60 + 15)
    assert not world.status().runs[0].open, "nobody is left who could"
    assert reason(world) == "stalled"
    first.request.attempt_key, first.request.client_id = "two", "next"
    world.state_machine.attempts.open_run(first.request)
    (run,) = world.status().runs
    assert (run.open, run.attempt, run.end.attempt) == (True, 2, 1)


def test_failed_slot_is_the_reason_of_a_box_that_did_not_close() -> None:
    world = FakeCluster()
    worker = world.worker("w")
    world.open()
    worker.ready()
    report = worker.slot_report(worker.of(1), pb.FAILED)
    report.error.name, report.error.message = "InputFnError", "no such image"
    worker.heartbeat(report)
    world.open(client_id="next")
    assert reason(world) == "raised"


def test_lost_client_and_newer_attempt() -> None:
    world = FakeCluster()
    world.open()
    world.open(client_id="next")
    assert [run.reason for _, run in world.state_machine.cluster.new_ends] == ["superseded"]
    world.run_for(20)
    world.open(client_id="third")
    assert [run.reason for _, run in world.state_machine.cluster.new_ends] == ["superseded", "client lost"]


@limited(abandoned_s=30.0)
def test_client_that_stays_away_is_lost() -> None:
    world = FakeCluster()
    box = world.open()
    world.run_for(25)
    assert end_of(world) is None
    box.watch()
    world.run_for(60)
    assert reason(world) == "client lost"
    assert box.refused().message.startswith("no box of attempt 1 of run job/0 has reported for 30 s")


def test_operator_s_end_is_no_fault() -> None:
    world = FakeCluster()
    world.open()
    world.run_for(20)
    world.state_machine.attempts.end_run(pb.EndRunRequest(run="job"))
    assert reason(world) == "closed"
    end = end_of(world)
    assert end is not None
    assert "by an operator" in end.text
    assert not end.fault


def test_end_outlives_a_restart(tmp_path: Path) -> None:
    world = FakeCluster(directory=StateDir(tmp_path / "state"))
    first, second = boxes(world, 2)
    other = world.open(job="other")
    other.close(finished=True)
    second.close(InputFnError("it raised"))
    before = end_of(world), end_of(world, "other/0")
    world.restart()
    assert (end_of(world), end_of(world, "other/0")) == before
    first.close(finished=True)
    assert (end_of(world), end_of(world, "other/0")) == before
    assert not world.state_machine.cluster.new_ends, "an end is told once"
    world.journal.close()


def test_box_that_closed_before_a_restart_may_have_finished(tmp_path: Path) -> None:
    world = FakeCluster(directory=StateDir(tmp_path / "state"))
    first, second = boxes(world, 2)
    first.close(finished=True)
    world.restart()
    second.close(finished=True)
    assert [end.reason for _, end in world.state_machine.cluster.new_ends] == ["finished"]
    world.journal.close()


def test_forgotten_run_is_counted_and_leaves_nothing(tmp_path: Path) -> None:
    world = FakeCluster(directory=StateDir(tmp_path / "state"))
    world.open().close(finished=True, forget=True)
    assert not world.status().runs
    assert world.state_machine.cluster.run_ends["finished"] == 1
    world.restart()
    assert not world.status().runs
    world.journal.close()
