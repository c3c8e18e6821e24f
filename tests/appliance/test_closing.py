"""Runs that an operator ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cluster import FakeCluster

from penstock.appliance.journal.journal import StateDir
from penstock.proto.errors import InvalidArgumentError, SupersededError, UnknownRunError
from penstock.proto.v1 import coordinator_pb2 as pb


def ended(world: FakeCluster, name: str) -> list[tuple[str, int, bool]]:
    reply = world.state_machine.attempts.end_run(pb.EndRunRequest(run=name))
    return [(run.run, run.attempt, run.was_open) for run in reply.runs]


def test_ended_run_frees_its_workers_at_once() -> None:
    world = FakeCluster()
    worker = world.worker("w")
    box = world.open()
    worker.ready()
    assert ended(world, "job/0") == [("job/0", 1, True)]
    assert not worker.heartbeat().assignments
    assert not world.state_machine.cluster.workers["w"].slots
    error = box.refused()
    assert isinstance(error, SupersededError)
    assert error.message == (
        "attempt 1 of run job/0 was ended by an operator (`penstock run close`): start the job again to continue from "
        "its last checkpoint"
    )
    assert world.open(client_id="next").reply.attempt == 2


def test_ending_twice_changes_nothing() -> None:
    world = FakeCluster()
    world.open()
    ended(world, "job/0")
    events = len(world.status().events)
    assert ended(world, "job/0") == [("job/0", 1, False)]
    assert len(world.status().events) == events


def test_job_name_ends_all_its_runs_and_no_other() -> None:
    world = FakeCluster()
    for job, ordinal in (("lm", 0), ("lm", 1), ("lm/0", 0), ("lmx", 0)):
        world.open(job=job, ordinal=ordinal, client_id=f"{job}{ordinal}")
    assert ended(world, "lm") == [("lm/0", 1, True), ("lm/1", 1, True)]
    assert {run.run for run in world.status().runs if run.open} == {"lm/0/0", "lmx/0"}


@pytest.mark.parametrize(
    ("name", "error"), [("", UnknownRunError), ("none", UnknownRunError), ("job\n", InvalidArgumentError)]
)
def test_unknown_run_is_named(name: str, error: type[Exception]) -> None:
    world = FakeCluster()
    world.open()
    with pytest.raises(error):
        ended(world, name)


def test_end_outlives_a_restart(tmp_path: Path) -> None:
    world = FakeCluster(directory=StateDir(tmp_path / "state"))
    box = world.open()
    ended(world, "job/0")
    world.restart()
    assert "was ended by an operator" in str(box.refused())
    world.journal.close()
