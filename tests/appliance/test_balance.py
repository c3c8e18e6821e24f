"""Balance of slots: which are moved and which are not; and the recommended number of workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_cluster import FakeBox, FakeCluster, FakeWorker, limited

from penstock.appliance.core import balance
from penstock.appliance.core.entities import Slot
from penstock.appliance.core.launch_restarts import ALONE_S
from penstock.appliance.limits import Limits
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

LIMITS = Limits(balance_after_s=10.0)
SAVES, REPLAYS = records_pb2.LoaderCapabilities(state_methods=4), records_pb2.LoaderCapabilities(state_methods=0)


@pytest.fixture(autouse=True)
def _limits() -> Iterator[None]:
    with limited(balance_every_s=1.0):
        yield


@pytest.fixture
def world() -> FakeCluster:
    return FakeCluster(LIMITS)


def ready(worker: FakeWorker, capabilities: records_pb2.LoaderCapabilities = SAVES) -> None:
    reports = [worker.slot_report(assignment, pb.READY) for assignment in worker.heartbeat().assignments]
    for report in reports:
        report.capabilities.CopyFrom(capabilities)
    worker.heartbeat(*reports)


def planned(world: FakeCluster, room: int = 10) -> list[tuple[int, str]]:
    """(slot, to worker)."""
    return [(move.slot.key.slot, move.worker.name) for move in moves(world, room)]


def moves(world: FakeCluster, room: int = 10) -> list[balance.SlotMove]:
    return list(balance.find_moves(world.state_machine.cluster, world.state_machine.placement, world.now, room))


def hold_up(slot: Slot, share: float, world: FakeCluster, *, others_ahead: bool = True) -> None:
    """The loop waits for the slot through this share of its time; the others have batches lying ready."""
    _, box = world.state_machine.cluster.box_of(slot)
    waits = box.waits
    waits.span_s = 10.0
    waits._seconds = waits._seconds or [0.0] * len(box.slots)
    waits._late = waits._late or [0.0] * len(box.slots)
    waits._seconds[slot.key.slot] = 10.0 * share
    for other in box.slots:
        other.gauge.mean_queued = 8.0 if others_ahead and other is not slot else 0.0


def slots_of(world: FakeCluster) -> list[Slot]:
    return world.slots()


def crowded(world: FakeCluster, capabilities: records_pb2.LoaderCapabilities = SAVES, host: str = "host-b") -> FakeBox:
    """Four slots on a worker with four places; then another such worker joins. The box is on host-a."""
    full = world.worker("full", 4, host=host)
    box = world.open(num_workers_per_box=4)
    ready(full, capabilities)
    world.worker("empty", 4, host="host-c")
    world.now += LIMITS.balance_after_s
    return box


def two_and_a_spare(world: FakeCluster) -> None:
    """A slot on each of two machines, for as long as balance waits, and an empty worker on a third."""
    one, two = world.worker("one", 1, host="host-b"), world.worker("two", 1, host="host-c")
    world.open()
    ready(one)
    ready(two)
    world.worker("spare", 1, host="host-d")
    world.now += LIMITS.balance_after_s


def test_slots_go_from_fullest_to_emptiest(world: FakeCluster) -> None:
    crowded(world)
    placement = world.state_machine.placement
    went = 0
    while found := moves(world):
        assert [(move.slot.worker, move.worker.name) for move in found] == [("full", "empty")]
        placement.start_migration(found[0].slot, found[0].worker, found[0].why, world.now)
        placement.complete_migration(found[0].slot, found[0].why, world.now - LIMITS.balance_after_s)
        went += 1
    assert went == 2


def test_failed_target_is_not_retried_at_once(world: FakeCluster) -> None:
    crowded(world)
    slot, cluster = slots_of(world)[0], world.state_machine.cluster
    assert planned(world) == [(0, "empty")]
    slot.unfit["empty"] = cluster.workers["empty"].session
    assert planned(world) == [(1, "empty")]
    for other in slots_of(world):
        other.unfit["empty"] = cluster.workers["empty"].session
    assert planned(world) == []
    world.worker("empty", 4, host="host-c", session="another")  # it was started again
    assert planned(world) == [(0, "empty")]


def test_loader_without_states_is_not_moved(world: FakeCluster) -> None:
    crowded(world, REPLAYS)
    assert planned(world) == []


@pytest.mark.parametrize("replay_s", [None, 100.0])
def test_loader_with_four_methods_stays_once_its_replay_would_take_long(
    world: FakeCluster, replay_s: float | None
) -> None:
    crowded(world)  # four methods
    first, second = slots_of(world)[:2]
    if replay_s is not None:
        world.state_machine.cluster.box_of(first)[1].opening.loader.options.replay_s = replay_s
    first.worked_s = (replay_s or ALONE_S) + 1
    assert planned(world) == [(1, "empty")]
    second.worked_s = first.worked_s - 2
    assert planned(world) == [(1, "empty")]


def test_slot_on_its_boxs_host_stays(world: FakeCluster) -> None:
    crowded(world, host="host-a")
    assert planned(world) == []


def test_draining_or_barred_worker_gets_no_slot(world: FakeCluster) -> None:
    crowded(world)
    empty = world.state_machine.cluster.workers["empty"]
    empty.draining = True
    assert planned(world) == []
    empty.draining, empty.allow = False, ("another",)
    assert planned(world) == []
    empty.allow, empty.lane_protocol = (), empty.lane_protocol + 1
    assert planned(world) == []


def test_straggler_changes_machine_with_backoff(world: FakeCluster) -> None:
    two_and_a_spare(world)
    world.worker("near-one", 1, host="host-b")
    (straggler,) = [slot for slot in slots_of(world) if slot.worker == "one"]
    assert planned(world) == []
    hold_up(straggler, 0.4, world)
    assert planned(world) == [(straggler.key.slot, "spare")]
    straggler.was_slow_at = frozenset({"another"})
    assert planned(world) == []
    world.now += LIMITS.balance_after_s
    assert planned(world) == [(straggler.key.slot, "spare")]
    straggler.was_slow_at = frozenset({"spare"})  # it did not get better there, so the machine is not the reason
    assert planned(world) == [(straggler.key.slot, "near-one")]
    straggler.was_slow_at = frozenset({"a", "b", "c"})
    assert planned(world) == []


def test_equal_batch_times_make_no_straggler(world: FakeCluster) -> None:
    """The others are ahead for they are a little faster; that fills their rings, and proves nothing."""
    two_and_a_spare(world)
    slow, fast = slots_of(world)
    hold_up(slow, 0.8, world)
    slow.batch_s, fast.batch_s = 0.041, 0.040
    assert planned(world) == []
    slow.batch_s = 0.080
    assert planned(world) == [(slow.key.slot, "spare")]
    slow.gauge.behind = True  # it replays
    assert planned(world) == []
    slow.gauge.behind = False
    slow.capabilities = REPLAYS
    assert planned(world) == []


@pytest.mark.parametrize("shares", [(0.05, 0.0), (0.3, 0.25)])
def test_small_or_common_waits_move_nothing(world: FakeCluster, shares: tuple[float, float]) -> None:
    two_and_a_spare(world)
    for slot, share in zip(slots_of(world), shares, strict=True):
        hold_up(slot, share, world, others_ahead=False)
    assert planned(world) == []


def test_slots_do_not_oscillate(world: FakeCluster) -> None:
    """Stragglers leave it, and then it is the emptiest: load brought them back, and so on for ever."""
    slow, fast = world.worker("slow", 2, host="host-b"), world.worker("fast", 4, host="host-c")
    box = world.open(num_workers_per_box=4)
    went: list[tuple[str, ...]] = []
    for _ in range(300):
        world.now += 1.0
        for worker in (slow, fast):
            reports = [worker.slot_report(assignment, pb.READY) for assignment in worker.heartbeat().assignments]
            for report in reports:
                report.capabilities.CopyFrom(SAVES)
                report.batch_s, report.produced, report.migrated = 0.1 if worker is slow else 0.01, 1, True
            worker.heartbeat(*reports)
        box.report()
        for slot in slots_of(world):
            hold_up(slot, 0.0, world)
        for slot in [slot for slot in slots_of(world) if slot.worker == "slow"]:
            hold_up(slot, 0.3, world)
        world.state_machine.tick()
        went.append(tuple(slot.worker for slot in slots_of(world)))
    assert "slow" in went[0]
    assert set(went[60:]) == {("fast",) * 4}


def test_coordinator_balances_unless_disabled() -> None:
    for after_s, moved in ((10.0, 1), (0.0, 0)):
        world = FakeCluster(Limits(balance_after_s=after_s))
        box = crowded(world)
        everybody = [FakeWorker(world, name, f"{name}-1", "", 4) for name in ("full", "empty")]
        world.run_for(1.5, [box, *everybody])
        assert len(world.state_machine.placement.migrating) == moved


def test_recommended_workers_follow_demand(world: FakeCluster) -> None:
    worker, box = world.worker("w", 4), world.open()
    ready(worker)
    status = world.status()
    assert status.runs[0].recommended_workers_per_box == 0  # nothing is known yet
    assert status.recommended_workers == 1  # two slots, four places
    reports = [worker.slot_report(assignment, pb.READY) for assignment in worker.heartbeat().assignments]
    for report in reports:
        report.batch_s = 0.1
    worker.heartbeat(*reports)
    (at,) = world.state_machine.cluster.runs["job/0"].current.boxes.values()  # type: ignore[union-attr]
    # 20 steps a second and half of the time waited: 40 would be taken, of which a slot gives 10; a quarter more.
    at.usual_steps_per_s, at.usual_span_s = 20.0, 10.0
    hold_up(at.slots[0], 0.5, world)
    status = world.status()
    assert status.runs[0].recommended_workers_per_box == 5
    assert status.recommended_workers == 2
    hold_up(at.slots[0], 0.0, world)
    assert world.status().runs[0].recommended_workers_per_box == 3
    box.close()
    assert world.status().recommended_workers == 0
