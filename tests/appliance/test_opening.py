"""Openings of runs: attempts, keys, topologies and seeds of OpenRun."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeBox, FakeCluster, limited

from penstock.appliance.core.entities import client_of, shown
from penstock.appliance.journal.journal import StateDir
from penstock.proto.errors import (
    BoxOutOfRangeError,
    BoxTakenError,
    InvalidArgumentError,
    OverloadedError,
    StateMismatchError,
    SupersededError,
    TopologyError,
    UnknownRunError,
)
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2


def resumed(world: FakeCluster, step: int = 10, count: int = 2) -> dict[str, Any]:
    """The fields of an opening that goes on from a state."""
    world.snapshot_index.add_blob("blob", 5, world.now)
    start = Position.start(count, step=step).to_proto()
    return {"resume": records_pb2.Resume(blob="blob"), "start": start}


@pytest.fixture
def world() -> FakeCluster:
    return FakeCluster()


def test_a_repeated_call_is_the_same_opening(world: FakeCluster) -> None:
    first = world.open()
    again = world.open()
    assert (first.reply.attempt, again.reply) == (1, first.reply)
    assert first.reply.seed == 4242
    assert first.reply.lease_s == world.limits.client_lease_s


def test_single_box_supersedes_its_predecessor(world: FakeCluster) -> None:
    worker = world.worker("w")
    old = world.open(client_id="old", host="host-1")
    assert len(worker.heartbeat().assignments) == 2
    new = world.open(client_id="new", host="host-2")
    assert new.reply.attempt == 2
    assert {assignment.attempt for assignment in worker.heartbeat().assignments} == {2}
    error = old.refused()
    assert isinstance(error, SupersededError)
    expected = "attempt 1 of run job/0 was superseded by attempt 2, opened by box 0, client {} on host host-2: end this"
    assert error.message.startswith(expected.format(shown(client_of("new"))))


def test_held_box_without_key_names_its_holder(world: FakeCluster) -> None:
    world.open(1, num_boxes=2, client_id="first", host="node-7")
    world.now += 3
    with pytest.raises(BoxTakenError) as caught:
        world.open(1, num_boxes=2, client_id="second")
    holder = f"is held by client {shown(client_of('first'))} on host node-7"
    assert f"box 1 of run job/0 (attempt 1) {holder}" in caught.value.message
    assert "PENSTOCK_ATTEMPT" in caught.value.message
    assert "retry in 7 s" in caught.value.message


def test_dead_member_breaks_attempt_without_key(world: FakeCluster) -> None:
    first = world.open(0, num_boxes=2, client_id="a0")
    world.open(1, num_boxes=2, client_id="a1")
    world.run_for(11, [first])  # box 1 falls silent
    assert world.open(1, num_boxes=2, client_id="b1").reply.attempt == 2
    assert world.open(0, num_boxes=2, client_id="b0").reply.attempt == 2
    assert isinstance(first.refused(), SupersededError)


def test_broken_attempt_gets_no_box_without_key(world: FakeCluster) -> None:
    first = world.open(0, num_boxes=3, client_id="a0")
    world.open(1, num_boxes=3, client_id="a1")
    world.run_for(11, [first])
    assert world.open(2, num_boxes=3, client_id="b2").reply.attempt == 2


def test_other_key_supersedes_same_key_joins(world: FakeCluster) -> None:
    old = [world.open(box, num_boxes=2, client_id=f"a{box}", attempt_key="one") for box in range(2)]
    new = [world.open(box, num_boxes=2, client_id=f"b{box}", attempt_key="two") for box in range(2)]
    assert [box.reply.attempt for box in old + new] == [1, 1, 2, 2]
    assert isinstance(old[0].refused(), SupersededError)


def test_key_of_live_holder_is_refused(world: FakeCluster) -> None:
    world.open(0, num_boxes=2, client_id="a", attempt_key="one")
    with pytest.raises(BoxTakenError, match=f"held by client {shown(client_of('a'))} on host host-a"):
        world.open(0, num_boxes=2, client_id="b", attempt_key="one")


def test_key_of_lost_holder_opens_next_attempt(world: FakeCluster) -> None:
    world.open(0, num_boxes=2, client_id="a0", attempt_key="one")
    other = world.open(1, num_boxes=2, client_id="a1", attempt_key="one")
    world.run_for(11, [other])
    assert world.open(0, num_boxes=2, client_id="b0", attempt_key="one").reply.attempt == 2
    assert isinstance(other.refused(), SupersededError)
    assert world.open(1, num_boxes=2, client_id="b1", attempt_key="one").reply.attempt == 2


def test_superseded_key_cannot_return(world: FakeCluster) -> None:
    world.open(0, num_boxes=2, client_id="a0", attempt_key="one")
    world.open(0, num_boxes=2, client_id="b0", attempt_key="two")
    with pytest.raises(SupersededError, match=r"give each launch a new attempt key, got 'one' again"):
        world.open(1, num_boxes=2, client_id="a1", attempt_key="one")
    world.run_for(11)  # once the successor is dead, the key is as good as any
    assert world.open(1, num_boxes=2, client_id="c1", attempt_key="one").reply.attempt == 3


# ---- rounds of one launcher, whose ranks have the same key: all of one are dead before the next one's are started


def rank(world: FakeCluster, box: int, age_s: float, *, life: int = 1, num_boxes: int = 2, key: str = "run") -> FakeBox:
    return world.open(box, num_boxes=num_boxes, client_id=f"{box}-{life}", attempt_key=key, process_age_s=age_s)


def killed(world: FakeCluster, *boxes: FakeBox) -> None:
    """The processes end, which their connections tell at once."""
    for box in boxes:
        world.state_machine.attempts.box_hung_up(box.progress())


@pytest.mark.parametrize("key", ["run", ""])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize("noticed", [True, False])
def test_a_round_is_one_attempt_whoever_comes_first(
    world: FakeCluster, key: str, order: tuple[int, ...], noticed: bool
) -> None:
    """One rank of the first round had opened no box, and its box looked free in the attempt of the dead."""
    first = [rank(world, box, 3.0, num_boxes=3, key=key) for box in (0, 1)]
    assert [box.reply.attempt for box in first] == [1, 1]
    world.run_for(2, first)
    if noticed:
        killed(world, *first)
    world.run_for(4)
    opened: dict[int, int] = {}
    for waited in range(40):  # as the clients do, while a lease runs
        for box in order:
            with contextlib.suppress(BoxTakenError):
                opened[box] = rank(world, box, 3.0 + waited / 4, life=2, num_boxes=3, key=key).reply.attempt
        if len(opened) == 3:
            break
        world.run_for(0.25)
    assert opened == {0: 2, 1: 2, 2: 2}
    assert waited == 0 or not noticed
    assert all(isinstance(box.refused(), SupersededError) for box in first)


def test_a_box_waits_for_the_sign_of_life_of_another(world: FakeCluster) -> None:
    """It may be of the last round: until it has reported after this process's start, nobody knows."""
    first = rank(world, 0, 3.0)
    world.now += 2
    with pytest.raises(BoxTakenError, match=r"box 0, of client .* has not reported for 2\.0 s. Retry in 8 s"):
        rank(world, 1, 1.0)
    first.report()
    assert rank(world, 1, 1.25).reply.attempt == 1


def test_a_second_process_for_a_live_box_is_refused(world: FakeCluster) -> None:
    first = rank(world, 0, 3.0)
    world.run_for(2, [first])
    with pytest.raises(BoxTakenError, match="is held by client"):
        rank(world, 0, 1.0, life=2)


def test_a_later_round_opens_its_loaders_under_the_keys_of_the_first(world: FakeCluster) -> None:
    """A loader that is opened again in a launch adds to the key, in each round the same."""
    for life in (1, 2, 3):
        before = [rank(world, box, 2.0, life=life) for box in (0, 1)]
        attempt = before[0].reply.attempt
        assert {box.reply.attempt for box in before} == {attempt}
        again = [rank(world, box, 2.0, life=10 * life, key="run#1") for box in (0, 1)]
        assert {box.reply.attempt for box in again} == {attempt + 1}
        with pytest.raises(SupersededError, match="give each launch a new attempt key"):
            rank(world, 1, 2.0, life=20 * life)  # within a round a key does not come back
        world.run_for(1, again)
        killed(world, *again)
        world.run_for(3)


def test_boxes_of_a_restarted_coordinator_must_report_first(tmp_path: Path) -> None:
    world = FakeCluster(directory=StateDir(tmp_path / "state"))
    first = rank(world, 0, 3.0)
    world.restart()
    with pytest.raises(BoxTakenError):
        rank(world, 1, 3.0)
    first.report()
    assert rank(world, 1, 3.0).reply.attempt == 1
    world.journal.close()


def test_closed_boxes_free_the_run(world: FakeCluster) -> None:
    boxes = [world.open(box, num_boxes=2, attempt_key="one") for box in range(2)]
    boxes[0].close()
    boxes[0].close()  # twice is no harm
    assert world.status().runs[0].open
    boxes[1].close()
    assert not world.status().runs[0].open
    assert isinstance(boxes[1].refused(), SupersededError)
    assert world.open(0, num_boxes=2, client_id="new", attempt_key="one").reply.attempt == 2


def test_closed_client_cannot_reopen(world: FakeCluster) -> None:
    world.open(0, num_boxes=2)
    world.open(1, num_boxes=2).close()
    with pytest.raises(SupersededError, match="was closed by this process"):
        world.open(1, num_boxes=2)


def test_forget_leaves_nothing(world: FakeCluster) -> None:
    box = world.open()
    box.close(forget=True)
    assert [world.journal.rows(table) for table in ("runs", "attempts", "boxes", "slots")] == [[], [], [], []]
    assert isinstance(box.refused(), UnknownRunError)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"box": 2, "num_boxes": 2}, BoxOutOfRangeError, "must be below num_boxes=2, got 2"),
        ({"num_boxes": 70_000, "num_workers_per_box": 1}, InvalidArgumentError, "at most 16384 workers"),
        ({"resume": records_pb2.Resume(blob="none")}, InvalidArgumentError, "does not have the value none"),
        (
            {"loader": records_pb2.LoaderSpec(arguments_blob="x")},
            InvalidArgumentError,
            "does not have the value x",
        ),
        (
            {"start": Position.start(3, step=4).to_proto()},
            InvalidArgumentError,
            "the start must have 2 workers per box, got 3",
        ),
        (
            {"start": records_pb2.BoxPosition(step=1, slots=[records_pb2.SlotPosition()] * 2)},
            InvalidArgumentError,
            "must be ascending numbers",
        ),
    ],
)
def test_openings_that_cannot_be_meant(
    world: FakeCluster, fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        world.open(**fields)
    assert world.state_machine.cluster.runs == {}


def test_large_openings_are_refused(world: FakeCluster) -> None:
    """Six of 65,536 workers stopped a coordinator for minutes, and arguments of 4 MB were in no budget."""
    with pytest.raises(InvalidArgumentError, match="slots of one worker must be at most 1024, got 1025"):
        world.worker("huge", 1025)
    with pytest.raises(InvalidArgumentError, match="num_workers_per_box must be at most 256, got 257"):
        world.open(num_workers_per_box=257)
    large = records_pb2.LoaderSpec(arguments=b"x" * 300_000)
    with pytest.raises(InvalidArgumentError, match=r"at most 262144 bytes, got 3000\d\d: shorten input_fn's arguments"):
        world.open(loader=large)
    assert world.state_machine.cluster.runs == {}


@limited(slots_max=10, slots_open_max=16)
def test_open_workers_are_limited() -> None:
    world = FakeCluster()

    def opened(job: str, count: int, token: str, client: str = "c") -> str:
        request = pb.OpenRunRequest(job=job, client_id=client, num_boxes=1, num_workers_per_box=count)
        request.loader.input_fn = "m:f"
        request.has_seed, request.seed = True, 1
        try:
            return world.state_machine.attempts.open_run(request, token).run
        except OverloadedError as error:
            return error.message.partition(":")[0]

    assert opened("a", 6, "one") == "a/0"
    assert (
        opened("b", 5, "one") == "the open runs with this token must have at most 10 workers in all, got 6 and 5 more"
    )
    assert opened("b", 4, "one") == "b/0"
    assert opened("b", 4, "one", "again") == "b/0"  # it ends its predecessor
    assert (
        opened("c", 7, "two")
        == "the open runs of the whole cluster must have at most 16 workers in all, got 10 and 7 more"
    )
    assert opened("c", 6, "two") == "c/0"
    close = pb.CloseRunRequest(run="a/0", attempt=1, client_id="c")
    world.state_machine.attempts.close_run(close)
    assert opened("d", 6, "one") == "d/0"


def test_members_of_one_attempt_must_agree(world: FakeCluster) -> None:
    world.open(0, num_boxes=2, num_workers_per_box=2)
    with pytest.raises(TopologyError, match="asks for 2 boxes x 3 workers, the other boxes have 2 boxes x 2 workers"):
        world.open(1, num_boxes=2, num_workers_per_box=3)
    with pytest.raises(InvalidArgumentError, match="has seed 7, the other boxes have 4242"):
        world.open(1, num_boxes=2, has_seed=True, seed=7)
    with pytest.raises(TopologyError, match="has the loader m:g, box 0 has m:f"):
        world.open(1, num_boxes=2, loader=records_pb2.LoaderSpec(input_fn="m:g"))
    with pytest.raises(StateMismatchError, match=r"box 1 .* resumes from a state, box 0 starts anew"):
        world.open(1, num_boxes=2, **resumed(world))


def test_another_shape_needs_a_state(world: FakeCluster) -> None:
    world.open(client_id="a").deliver(1)
    with pytest.raises(TopologyError) as caught:
        world.open(client_id="b", num_workers_per_box=3)
    assert caught.value.message.startswith("run job/0 had 1 box x 2 workers and is opened with 1 box x 3 workers")
    assert world.open(client_id="c", num_workers_per_box=3, **resumed(world, count=3)).reply.attempt == 2
    with pytest.raises(TopologyError):  # three workers are the run's shape now
        world.open(client_id="d")


def test_unused_run_reopens_on_any_topology(tmp_path: Path) -> None:
    world = FakeCluster(directory=StateDir(tmp_path / "state"))
    world.open(client_id="a")
    assert world.open(client_id="b", num_workers_per_box=3).reply.attempt == 2
    world.restart()
    third = world.open(client_id="c", num_workers_per_box=1)
    assert (third.reply.attempt, third.reply.seed) == (3, 4242)
    third.deliver(1)
    world.restart()
    with pytest.raises(TopologyError, match="had 1 box x 1 worker and"):
        world.open(client_id="d")
    world.journal.close()


def test_journaled_seed_changes_only_with_a_state(world: FakeCluster) -> None:
    assert world.open(client_id="a", has_seed=True, seed=2**64 - 1).reply.seed == 2**64 - 1
    assert world.open(client_id="b").reply.seed == 2**64 - 1
    with pytest.raises(
        InvalidArgumentError, match=f"seed of run job/0 must be {2**64 - 1}, as in its last launch, got 5"
    ):
        world.open(client_id="c", has_seed=True, seed=5)
    assert world.open(client_id="d", has_seed=True, seed=5, **resumed(world)).reply.seed == 5
    assert world.open(client_id="e").reply.seed == 5
