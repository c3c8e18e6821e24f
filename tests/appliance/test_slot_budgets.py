"""Workers for whole boxes or not at all, within a budget for each credential; what a box waits for is named."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from time import process_time

import pytest
from bearer import metadata
from fake_cluster import FakeBox, FakeCluster, limited
from served import LIMITS, coordinator

from penstock.appliance.journal.journal import StateDir
from penstock.appliance.limits import Limits
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.channel import connect_aio
from penstock.proto.rpc.credentials.tokens import Tokens
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorStub

BUDGETS = Limits(max_slots={"team-a": 4, "client": 2})


@pytest.fixture
def world() -> FakeCluster:
    return FakeCluster()


def opened(
    world: FakeCluster, job: str, workers: int, credential: str = "", box: int = 0, boxes: int = 1, module: str = "m"
) -> FakeBox:
    names = {"job": job, "attempt_key": job, "loader": {"input_fn": f"{module}:f"}}
    return world.open(box, num_boxes=boxes, num_workers_per_box=workers, credential=credential, **names)


def placed(*boxes: FakeBox) -> list[int]:
    return [box.request.num_workers_per_box - box.watch().missing_slots for box in boxes]


def why(box: FakeBox) -> str:
    return box.watch().unplaced_because


def test_no_box_gets_half(world: FakeCluster) -> None:
    """Give four slots, which join two by two, to one of two boxes that need four each; what the other waits for is in
    the job's notice, the run's bottleneck and the slots' notes."""
    one, two = opened(world, "one", 4), opened(world, "two", 4)
    assert (placed(one, two), why(one)) == ([0, 0], ""), "no workers: the job's own words"
    world.worker("v", 2)
    assert placed(one, two) == [0, 0]
    short = "it waits for 4 slots at once, and all workers together have 2. Start more workers, or lower"
    assert why(one).startswith(short)
    world.worker("w", 2)
    assert placed(one, two) == [4, 0]
    world.worker("x", 3)
    assert (placed(one, two), why(one), why(two)) == ([4, 0], "", "it waits for 4 slots at once: 3 are free")
    status = {run.run: run for run in world.status().runs}["two/0"]
    assert status.bottleneck.text == "Box 0 must wait: it waits for 4 slots at once: 3 are free."
    assert {slot.note for slot in status.boxes[0].slots} == {"it waits for 4 slots at once: 3 are free"}
    three = opened(world, "three", 3)
    assert placed(two, three) == [0, 3], "a smaller box need not wait for a larger one"
    one.close()
    assert (placed(two, three), why(two)) == ([4, 3], "")


def test_runs_do_not_wait_for_each_other(world: FakeCluster) -> None:
    """Give slots to a run's boxes as they open, and none to another run that would leave one of them without."""
    worker = world.worker("w", 5)
    one = [opened(world, "one", 2, box=0, boxes=2)]
    two = [opened(world, "two", 2, box=box, boxes=2) for box in (1, 0)]
    small = opened(world, "small", 1)
    assert placed(*one, *two, small) == [2, 0, 0, 1]
    kept = "it waits for 4 slots at once, for 2 boxes: 2 are free, and 2 are kept for other boxes of one/0"
    assert [why(box) for box in (*one, *two)] == ["", kept, kept]
    one.append(opened(world, "one", 2, box=1, boxes=2))
    assert placed(*one, *two) == [2, 2, 0, 0]
    one[0].close()
    world.run_for(61.0, [worker, one[1], *two, small])
    assert (placed(*two), why(two[0])) == ([0, 0], "it waits for 4 slots at once, for 2 boxes: 2 are free")
    one[1].close()
    assert placed(*two) == [2, 2]
    large = opened(world, "large", 2, boxes=3)
    short = "it waits for 6 slots at once, for 3 boxes, and all workers together have 5. Start more workers, or lower"
    assert why(large).startswith(short)


def test_a_run_that_lost_its_workers_comes_before_one_that_waits(world: FakeCluster) -> None:
    world.worker("w", 4)
    one, two = (opened(world, job, workers) for job, workers in (("one", 4), ("two", 2)))
    assert placed(one, two) == [4, 0]
    world.run_for(9.0, [one, two])
    assert placed(one, two) == [0, 0]
    world.worker("v", 3)
    assert placed(one, two) == [3, 0]
    world.worker("x", 3)
    assert placed(one, two) == [4, 2]


def test_runs_of_a_budget_do_not_wait_for_each_other() -> None:
    world = FakeCluster(BUDGETS)
    world.worker("w", 64)
    one, two = opened(world, "one", 2, "team-a", boxes=2), opened(world, "two", 2, "team-a", boxes=2)
    other, large = opened(world, "other", 1, "digest", boxes=2), opened(world, "large", 1, "team-a", boxes=5)
    assert placed(one, two, other, large) == [2, 0, 1, 0]
    in_use = (
        "it waits for the budget of team-a: 2 of 4 slots are in use by one, and 2 are kept for other boxes of one/0"
    )
    assert why(two) == in_use
    assert why(large).startswith("it waits for 5 slots at once, for 5 boxes, and the budget of team-a is 4. Lower num")
    one.close(forget=True)
    assert placed(two) == [2]


def test_a_closed_box_keeps_no_room(world: FakeCluster) -> None:
    """A silent box keeps its room while others of its run work, until it is closed; a run elsewhere keeps none here."""
    w, v = world.worker("w", 4, allow=("a",)), world.worker("v", 2, allow=("b",))
    elsewhere = opened(world, "b", 1, boxes=2, module="b")
    one = [opened(world, "one", 2, box=box, boxes=2, module="a") for box in (0, 1)]
    two = opened(world, "two", 2, module="a")
    world.run_for(11.0, [w, v, elsewhere, one[0], two])
    assert placed(elsewhere, one[0], two) == [1, 2, 0]
    assert why(two) == "it waits for 2 slots at once: 2 are free, and 2 are kept for other boxes of one/0"
    one[1].close()
    assert placed(one[0], two) == [2, 2]


@pytest.mark.parametrize("seed", range(40))
def test_every_run_that_fits_gets_all_its_boxes(seed: int) -> None:
    """Boxes of random runs open in any order, at workers of which some serve one kind of run alone, under a budget; a
    run that has all its boxes ends. No run is left."""
    rng = Random(seed)
    world = FakeCluster(Limits(max_slots={"team-a": 6}))
    for number in range(3):
        world.worker(f"w{number}", 4, allow=rng.choice([(), ("a",), ("a", "b")]))
    runs: dict[str, list[FakeBox]] = {f"run{number}": [] for number in range(8)}
    boxes, workers = ({name: rng.randint(1, most) for name in runs} for most in (3, 2))
    module, credential = ({name: rng.choice(of) for name in runs} for of in ("ab", ("team-a", "x")))
    to_open = [(name, box) for name in runs for box in range(boxes[name])]
    rng.shuffle(to_open)
    able = list(world.state_machine.cluster.workers.values())
    room = {letter: sum(worker.capacity for worker in able if worker.may_run(letter)) for letter in "ab"}
    fits = {name for name in runs if boxes[name] * workers[name] <= room[module[name]]}
    while to_open or fits & runs.keys():
        if to_open:
            name, box = to_open.pop()
            runs[name].append(opened(world, name, workers[name], credential[name], box, boxes[name], module[name]))
        whole = [name for name in runs if placed(*runs[name]) == [workers[name]] * boxes[name]]
        assert whole or to_open or not fits & runs.keys(), [why(box) for name in runs for box in runs[name]]
        for name in whole if rng.random() < 0.5 or not to_open else ():
            for box_of_run in runs.pop(name):
                box_of_run.close()


def test_large_assignments_leave_no_half_box(world: FakeCluster) -> None:
    with limited(assignments_max=600):  # two slots of a worker that has four
        world.worker("w", 4)
        box = world.open(num_workers_per_box=3, loader={"input_fn": "m:" + "f" * 200})
        assert placed(box) == [0]
        assert not world.state_machine.cluster.workers["w"].slots
        world.worker("v", 4)
        assert placed(box) == [3]


def test_a_recovery_waits_for_no_budget_and_no_whole_box() -> None:
    """A box that lost a slot while another waits gets it back alone, as soon as one slot is free; its budget was never
    free meanwhile."""
    world = FakeCluster(BUDGETS)
    v, w = world.worker("v", 2), world.worker("w", 2)
    works = opened(world, "works", 4, "team-a")
    v.ready()
    w.ready()
    waits = opened(world, "waits", 2, "team-a")
    world.run_for(4.0, [v, works, waits])
    assert placed(works, waits) == [2, 0]
    assert why(waits) == "it waits for the budget of team-a: 4 of 4 slots are in use by works"
    x = world.worker("x", 1)
    assert placed(works, waits) == [3, 0]
    world.worker("y", 8)
    assert placed(works, waits) == [4, 0]
    assert [a.generation for a in x.heartbeat().assignments] == [2]


def test_all_slots_lost_are_still_a_recovery() -> None:
    world = FakeCluster(BUDGETS)
    w = world.worker("w", 2)
    works = opened(world, "works", 2, "digest")
    w.ready()
    waits = opened(world, "waits", 1, "digest")
    world.run_for(4.0, [works, waits])
    assert placed(works, waits) == [0, 0]
    world.worker("v", 1)
    assert placed(works, waits) == [1, 0]


def test_budgets_are_for_names_and_tokens(tmp_path: Path) -> None:
    """A name's jobs share its budget, each token without one has its own, and a box's slots count until it gives them
    back: by its end, or by silence. All of it holds after a restart of the coordinator."""
    world = FakeCluster(BUDGETS, StateDir(tmp_path / "state"))
    w = world.worker("w", 64)
    a1, a2, a3 = (opened(world, f"a{n}", 2, "team-a") for n in (1, 2, 3))
    b1, b2 = opened(world, "b1", 2, "b" * 64), opened(world, "b2", 1, "b" * 64)
    c1, too_large = opened(world, "c1", 2, "c" * 64), opened(world, "d1", 3, "d" * 64)
    for _ in range(2):
        assert placed(a1, a2, a3, b1, b2, c1, too_large) == [2, 2, 0, 2, 0, 2, 0]
        assert why(a3) == "it waits for the budget of team-a: 4 of 4 slots are in use by a1, a2"
        assert why(b2) == "it waits for the budget of its token: 2 of 2 slots are in use by b1"
        beyond = "it waits for 3 slots at once, and the budget of its token is 2. Lower num_workers_per_box, or raise"
        assert why(too_large).startswith(beyond)
        world.restart(w)
    silent = [b1, b2, c1]
    a1.close()
    assert placed(a2, a3) == [2, 2]
    world.run_for(11.0, [w, a2, a3, b2])
    assert placed(a2, a3, b2) == [2, 2, 1], f"{silent[0]} is silent"
    assert (placed(b1), why(b1)) == ([0], "it waits for the budget of its token: 1 of 2 slots are in use by b2")
    world.restart(w)
    assert (placed(b1, b2), placed(c1)) == ([0, 1], [2])
    b2.close()
    assert placed(b1) == [2]
    for box in (a2, a3, b1, c1, too_large):
        box.close()
    cluster = world.state_machine.cluster
    assert not any(jobs for jobs in cluster.in_use.values())
    assert not cluster.journal.rows("holders")


def test_the_token_names_its_budget() -> None:
    """Two tokens of one name share a budget, and a token that the file names twice keeps one."""
    tokens = "client/team-a:token-one\nclient/team-a:token-two\nclient:token-three\nworker:token-w"
    limits = Limits(LIMITS.worker_lease_s, LIMITS.client_lease_s, max_slots={"team-a": 2})

    async def run() -> list[str]:
        async with coordinator(limits=limits, tokens=tokens) as address, connect_aio(address) as bare:
            stub, notes = CoordinatorStub(bare), []
            register = pb.RegisterWorkerRequest(worker="w", session="s", host_id="h", slots=8)
            register.local_address, register.tcp_address = "@w", "w:1"
            await stub.RegisterWorker(register, metadata=metadata("token-w"))
            for token in ("token-one", "token-two", "token-three"):
                opening = pb.OpenRunRequest(job=token, client_id=token, num_boxes=1, num_workers_per_box=2)
                opening.loader.input_fn = "m:f"
                await stub.OpenRun(opening, metadata=metadata(token))
                watch = pb.WatchRunRequest(run=f"{token}/0", attempt=1, box=0, client_id=token)
                notes.append((await stub.WatchRun(watch, metadata=metadata(token))).unplaced_because)
            return notes

    waits = "it waits for the budget of team-a: 2 of 2 slots are in use by token-one"
    assert asyncio.run(run()) == ["", waits, ""]


@pytest.mark.parametrize("text", ["client/:t", "client/worker:t", "client/a b:t", f"client/{'a' * 41}:t", "boss/a:t"])
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="role/name:token"):
        Tokens(text)
    with pytest.raises(InvalidArgumentError, match="one name, got a and b"):
        Tokens("client/a:t\nclient/b:t")


def test_waiting_boxes_cost_little(world: FakeCluster) -> None:
    """A heartbeat while 10,000 slots wait for more than is free looks at each box once."""
    for number in range(40):
        opened(world, f"job{number}", 250)
    worker = world.worker("w", 249)
    began = process_time()
    for _ in range(20):
        worker.report()
    assert (process_time() - began) / 20 < 0.02
    assert not worker.heartbeat().assignments
