"""History that the coordinator keeps so that a batch can be made again: in its cluster state, and in its files when it
is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cluster import FakeBox, FakeCluster, limited

from penstock.appliance.core.box_history import past
from penstock.appliance.journal.journal import StateDir
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


def told(world: FakeCluster) -> pb.History:
    """Return the history of box 0 in the cluster state."""
    history = world.state_machine.cluster.history("job/0", 0)
    assert history is not None
    return history


def test_state_has_positions_and_abandoned(state: StateDir) -> None:
    world = FakeCluster(directory=state)
    box = world.open(attempt_key="secret")
    box.deliver(5)
    box.abandon_epoch()
    box.deliver(3)
    slot = world.state_machine.cluster.slot(SlotKey("job/0", 1, 0, 1))
    assert slot is not None
    slot.skips[1, 4] = 2
    history = told(world)
    assert (history.attempt, history.settled, history.opening.seed) == (1, True, 4242)
    assert (history.opening.client_id, history.opening.attempt_key) == ("", "")
    assert [(cut.epoch, cut.step) for cut in history.abandoned] == [(0, 5)]
    assert [position.step for position in history.known][-1] == 8
    assert [(skip.epoch, skip.total, skip.count) for skip in history.slots[1].skips] == [(1, 4, 2)]
    assert world.state_machine.cluster.history("job/0", 1) is None
    assert world.state_machine.cluster.history("other/0", 0) is None


def test_breaks_outlive_the_coordinator(state: StateDir) -> None:
    """Killed: its last word is the break, and where the box had come after it is not known."""
    world = FakeCluster(directory=state)
    box = world.open()
    box.deliver(5)
    box.abandon_epoch()
    box.deliver(4)
    stale = {"run": "job/0", "attempt": 0, "box": 0, "epoch": 7, "step": 3}
    world.journal.put("abandoned", stale)  # of an attempt that a release ended which does not know them
    world.journal.commit()
    world.restart()
    restored = world.state_machine.cluster.runs["job/0"].current
    assert restored is not None
    assert restored.boxes[0].abandoned == {0: 5}
    history = told(world)
    assert [(cut.epoch, cut.step) for cut in history.abandoned] == [(0, 5)]
    assert [position.step for position in history.known] == [0]
    assert not history.settled


def chained(box: FakeBox, steps: int) -> None:
    """The loop takes batches whose digests it knows, and reports."""
    box.position = box.position or Position.start(2)
    for number in range(steps):
        box.position.deliver(number)
    box.watch()


@pytest.mark.parametrize("closed", [True, False])
def test_stream_digest_survives_restart(state: StateDir, closed: bool) -> None:
    """Keep the last position: no report follows from a closed box, nor from a running one before the stop."""
    world = FakeCluster(directory=state)
    one, other = world.open(0, num_boxes=2), world.open(1, num_boxes=2)
    chained(one, 5)
    chained(one, 4)
    chained(other, 3)
    if closed:
        one.close()
    for attempt in world.state_machine.cluster.open_attempts():
        world.state_machine.cluster.save_history(attempt, attempt.boxes[0])  # as at an orderly end
    world.journal.commit()
    for _ in range(2):
        world.restart()
        history = told(world)
        assert [(at.step, at.HasField("chain")) for at in history.known] == [(0, True), (5, True), (9, True)]
        assert history.settled == closed
    if not closed:
        chained(one, 2)
    other.close()
    if not closed:
        one.close()
    (over,) = past(state.path / "journal.db", "job/0", 0)
    assert [at.step for at in over.known] == [0, 5, 9] + ([] if closed else [11])
    assert over.settled


def test_long_attempt_keeps_few_positions(state: StateDir) -> None:
    world = FakeCluster(directory=state)
    box = world.open(retention=6400)
    for _ in range(64):
        box.deliver(100)
    world.open(client_id="next")
    (first,) = past(state.path / "journal.db", "job/0", 0)
    steps = [position.step for position in first.known]
    assert steps[-1] == 6400
    assert 8 <= len(steps) <= 10
    assert steps == sorted(steps)


@limited(past_attempts=2)
def test_what_is_forgotten_is_gone(state: StateDir) -> None:
    world = FakeCluster(directory=state)
    for number in range(5):
        box = world.open(client_id=f"client-{number}", box=0)
        box.deliver(2)
        box.abandon_epoch()
    found = past(state.path / "journal.db", "job/0", 0)
    assert [history.attempt for history in found] == [3, 4]
    box.close(forget=True)
    assert not past(state.path / "journal.db", "job/0", 0)
    assert not world.journal.rows("abandoned")
