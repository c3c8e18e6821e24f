"""A box that cannot reach a worker, though the coordinator hears both: its slots go elsewhere, and nobody else's."""

from __future__ import annotations

from fake_cluster import FakeBox, FakeCluster, FakeWorker, limited

from penstock.appliance.core.attempts import UNREACHABLE_MAX, UNREACHABLE_PER_S
from penstock.appliance.core.placement import UNREACHABLE_AGAIN_S
from penstock.appliance.limits import Limits
from penstock.proto.v1 import coordinator_pb2 as pb

LIMITS = Limits(balance_after_s=0.0)


def cannot_reach(world: FakeCluster, box: FakeBox, *workers: str) -> list[str]:
    """The box says so of each slot that these have. Returns who has its slots then."""
    request = box.progress()
    for slot in world.slots():
        if slot.key.box == box.request.box and slot.worker in workers:
            request.unreachable.add(slot=slot.key.slot, generation=slot.generation, why="timed out")
    world.watch(request)
    return owners(world, box)


def owners(world: FakeCluster, box: FakeBox) -> list[str]:
    return [slot.worker for slot in world.slots() if slot.key.box == box.request.box]


def ready(*workers: FakeWorker) -> None:
    for worker in workers:
        worker.ready()


def test_slots_move_to_a_reachable_worker() -> None:
    world = FakeCluster(LIMITS)
    box, other = world.open(num_boxes=2, host_id="x"), world.open(box=1, num_boxes=2, host_id="x")
    one = world.worker("one", host="y")
    ready(one)
    two = world.worker("two", host="z")
    assert cannot_reach(world, box, "one") == ["two", "two"]
    assert owners(world, other) == ["one", "one"], "what one box says moves no other's slots"
    (first, _) = [slot for slot in world.slots() if slot.key.box == 0]
    assert first.note == "the training job of box 0 cannot reach worker one: timed out"
    assert first.losses == [], "nobody died"
    ready(one, two)
    two.lose(two.of(0))  # for whatever reason it moves next: not back to where it cannot be had from
    assert owners(world, box) == ["two", "two"]
    assert cannot_reach(world, other, "two") == ["one", "one"], "it has nothing there"


def test_slot_stays_without_capacity_elsewhere() -> None:
    world = FakeCluster(LIMITS)
    box, one = world.open(), world.worker("one", host="y")
    ready(one)
    generations = [slot.generation for slot in world.slots()]
    assert cannot_reach(world, box, "one") == ["one", "one"]
    assert [slot.generation for slot in world.slots()] == generations
    world.worker("small", 1, host="z")
    assert sorted(cannot_reach(world, box, "one")) == ["one", "small"], "as soon as there is"


def test_stale_claims_change_nothing() -> None:
    world = FakeCluster(LIMITS)
    box, one = world.open(), world.worker("one")
    ready(one)
    world.worker("two")
    request = box.progress()
    request.unreachable.add(slot=0, generation=0, why="old")
    request.unreachable.add(slot=7, generation=1, why="no such slot")
    world.watch(request)
    assert owners(world, box) == ["one", "one"]


def test_unreachable_worker_is_tried_again() -> None:
    world = FakeCluster(LIMITS)
    box, workers = world.open(), [world.worker(name) for name in ("one", "two")]
    ready(*workers)
    first = set(owners(world, box))
    cannot_reach(world, box, *first)
    ready(*workers)
    second = set(owners(world, box))
    assert first | second == {"one", "two"}
    assert set(cannot_reach(world, box, *second)) == second, "not back at once"
    world.run_for(UNREACHABLE_AGAIN_S, [box, *workers])
    assert set(cannot_reach(world, box, *second)) != second


def test_isolated_box_does_not_chase_its_slots() -> None:
    world = FakeCluster(LIMITS)
    workers = [world.worker(f"w{number:02}") for number in range(30)]
    box = world.open(num_workers_per_box=1)
    seen: list[str] = []
    for _ in range(30):
        ready(*workers)
        seen += cannot_reach(world, box, *owners(world, box))
    assert len(set(seen)) == UNREACHABLE_MAX
    world.run_for(UNREACHABLE_PER_S + 1, [box, *workers])
    assert cannot_reach(world, box, *owners(world, box)) != seen[-1:]


@limited(balance_every_s=0.25)
def test_drain_and_balance_avoid_unreachable() -> None:
    world = FakeCluster(Limits(balance_after_s=1.0))
    box, one = world.open(num_workers_per_box=4), world.worker("one", host="y")
    ready(one)
    two = world.worker("two", host="z")
    assert cannot_reach(world, box, "one") == ["two"] * 4
    ready(two)
    for _ in range(40):
        world.run_for(0.25, [one, two, box])
    assert owners(world, box) == ["two"] * 4, "the empty one is not for this box"
    three = world.worker("three", host="v")
    world.state_machine.workers.drain_worker(pb.DrainWorkerRequest(worker="two"))
    world.run_for(0.5, [one, two, three, box])
    assert {slot.target.worker for slot in world.slots() if slot.target} == {"three"}
