"""States asked for after the coordinator was started again, which has forgotten where the boxes were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from queries import ask, failure, respond, values

from penstock.appliance.storage.journal import StateDir
from penstock.appliance.testing import FakeCluster
from penstock.proto.errors import StateUnavailableError


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FakeCluster]:
    directory = StateDir(tmp_path)
    world = FakeCluster(directory=directory)
    yield world
    world.journal.close()
    directory.close()


def test_restart_uses_the_callers_position(world: FakeCluster) -> None:
    box, worker = world.open(), world.worker("w")
    worker.ready()
    box.deliver(7)
    world.restart(worker)
    assert box.position is not None
    box.position.exhaust()  # slot 1 has ended after 3, noticed by the loop; nobody else will ever tell
    box.position.deliver()
    query = ask(box, 8)
    respond(worker)
    assert values(query) == ["0.0:0.5", "0.1:0.3"]


def test_restart_waits_for_every_boxs_report(world: FakeCluster) -> None:
    """Wait for the reports: abandoned epochs may be newer than the journal, and a new runner has none of them."""
    asking, other = (world.open(number, num_boxes=2) for number in (0, 1))
    worker = world.worker("w")
    worker.ready()
    for box in (asking, other):
        box.deliver(3)
    other.abandoned[0] = 3
    world.restart(worker)
    asking.deliver(1)
    query = ask(asking, 4)
    respond(worker)
    assert not query.done
    assert query.waits_for() == "box 1 (it has not reported since the coordinator was started)"
    other.watch()
    respond(worker)
    assert values(query) == ["0.0:0.2", "0.1:0.2", "1.0:1.3", "1.1:1.1"]
    asking.close()
    world.restart()
    assert (
        "box 0 has closed, and the coordinator, restarted since, does not know where it ended"
        in failure(ask(other, 3)).message
    )


@pytest.mark.parametrize("ended", [False, True])
def test_restart_does_not_ask_behind_the_window(world: FakeCluster, ended: bool) -> None:
    """The base is known again, to count from, but what was kept of the steps since was dropped long ago."""
    boxes = [world.open(number, num_boxes=2, retention=4) for number in range(2)]
    worker = world.worker("w")
    worker.ready()
    boxes[0].deliver(3)
    boxes[1].deliver(20)
    world.restart(worker)
    boxes[0].watch()
    query = ask(boxes[0], 3)  # where box 1 stands is not known yet
    respond(worker)
    assert not query.done
    boxes[1].epoch_ended = ended
    boxes[1].watch()
    assert not [request for request in worker.heartbeat().state_requests if request.box == 1]
    assert isinstance(failure(query), StateUnavailableError)
    assert "box 1 is more than retention_steps=" in failure(query).message


def test_restart_asks_from_the_epoch_start(world: FakeCluster) -> None:
    box = world.open(retention=4)
    worker = world.worker("w")
    worker.ready()
    box.deliver(20)
    world.restart(worker)
    box.watch()
    query = ask(box, 16)
    respond(worker)
    assert values(query) == ["0.0:0.8", "0.1:0.8"]
