"""The choice of a worker: what it is for, and that the fast way finds what the plain one does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.appliance.core.entities import UNNAMED_LANE_PROTOCOL, Slot, SlotLoss, Worker
from penstock.appliance.core.free_capacity import FreeCapacity, cost
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.state.allowed_modules import under
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

HOSTS = ["host-a", "host-b", "host-c"]


ALLOWED = [(), ("m",), ("m.n", "other"), ("other",)]
SPOKEN = [UNNAMED_LANE_PROTOCOL, UNNAMED_LANE_PROTOCOL + 1]


def worker(
    name: str,
    host: str,
    capacity: int,
    used: int,
    *,
    draining: bool = False,
    allow: tuple[str, ...] = (),
    lanes: int = UNNAMED_LANE_PROTOCOL,
) -> Worker:
    made = Worker(name, "s", host, capacity, "", "", True, 0.0, 0.0, 1, draining, allow, lane_protocol=lanes)
    for number in range(used):
        made.slots[SlotKey("other", 1, 0, number)] = 0
    return made


def opening(host_id: str, input_fn: str = "m:f", lanes: int = 0) -> pb.OpenRunRequest:
    loader = records_pb2.LoaderSpec(input_fn=input_fn)
    return pb.OpenRunRequest(host_id=host_id, loader=loader, lane_protocol=lanes)


def able_workers(opening: pb.OpenRunRequest, workers: dict[str, Worker]) -> list[Worker]:
    module, lanes = opening.loader.input_fn.partition(":")[0], opening.lane_protocol or UNNAMED_LANE_PROTOCOL
    return [w for w in workers.values() if w.lane_protocol == lanes and (not w.allow or under(module, w.allow))]


def plainly(slot: Slot, opening: pb.OpenRunRequest, workers: dict[str, Worker]) -> Worker | None:
    """All workers, one after the other."""
    able = able_workers(opening, workers)
    return min((w for w in able if w.free > 0), key=lambda w: cost(slot, opening.host_id, w), default=None)


def slot(*lost_at: str) -> Slot:
    made = Slot(SlotKey("run", 1, 0, 0), 1)
    made.losses = [SlotLoss(1.0, name, "", 0) for name in lost_at]
    return made


WORKERS = st.dictionaries(
    st.sampled_from([f"w{number}" for number in range(12)]),
    st.tuples(
        st.sampled_from(HOSTS),
        st.integers(1, 4),
        st.integers(0, 4),
        st.booleans(),
        st.sampled_from(ALLOWED),
        st.sampled_from(SPOKEN),
    ),
    max_size=12,
)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["choose", "take", "give back", "remove", "replace", "drain"]),
        st.sampled_from([f"w{number}" for number in range(12)]),
        st.sampled_from(HOSTS),
        st.lists(st.sampled_from([f"w{number}" for number in range(12)]), max_size=4),
        st.sampled_from(["m:f", "m.n:f", "other:f"]),
        st.sampled_from([0, *SPOKEN]),
    ),
    max_size=60,
)


@given(fleet=WORKERS, changes=CHANGES)
def test_choice_equals_the_plain_rule(
    fleet: dict[str, tuple[str, int, int, bool, tuple[str, ...], int]],
    changes: list[tuple[str, str, str, list[str], str, int]],
) -> None:
    workers = {
        name: worker(name, host, capacity, min(used, capacity), draining=draining, allow=allow, lanes=lanes)
        for name, (host, capacity, used, draining, allow, lanes) in fleet.items()
    }
    room = FreeCapacity(workers)
    for each in workers.values():
        room.offer(each)
    for number, (what, name, host, lost_at, input_fn, lanes) in enumerate(changes):
        known = workers.get(name)
        if what == "choose":
            asked, opened = slot(*lost_at), opening(host, input_fn, lanes)
            found = room.choose(asked, opened)
            assert found is plainly(asked, opened, workers)
            if found is not None:
                found.slots[SlotKey("run", 1, number, 0)] = 0
                room.offer(found)
        elif what == "replace":
            workers[name] = worker(name, host, 1 + number % 4, 0, allow=ALLOWED[number % 3], lanes=SPOKEN[number % 2])
            room.offer(workers[name])
        elif known is None:
            continue
        elif what == "take" and known.free > 0:
            known.slots[SlotKey("run", 2, number, 0)] = 0
            room.offer(known)
        elif what == "give back" and known.slots:
            del known.slots[min(known.slots)]
            room.offer(known)
        elif what == "remove":
            del workers[name]
            room.forget(name)
        elif what == "drain":
            known.draining = True
            room.offer(known)
        able = able_workers(opening(host, input_fn, lanes), workers)
        slots = sum(w.capacity for w in able if not w.draining)
        assert room.room(opening(host, input_fn, lanes)) == (sum(max(0, w.free) for w in able), slots)
        assert room.is_full == all(each.free <= 0 for each in workers.values())
    for host in HOSTS:
        assert room.choose(slot(), opening(host)) is plainly(slot(), opening(host), workers)


def test_two_losses_count_against_a_worker() -> None:
    workers = {"a": worker("a", "host-a", 4, 0), "b": worker("b", "host-b", 4, 0)}
    room = FreeCapacity(workers)
    for each in workers.values():
        room.offer(each)
    assert room.choose(slot("a"), opening("host-a")) is workers["a"]
    assert room.choose(slot("a", "a"), opening("host-a")) is workers["b"]
    assert room.choose(slot("a", "a", "b", "b", "b"), opening("host-b")) is workers["a"]
    del workers["b"]
    assert room.choose(slot("a", "a", "a"), opening("host-a")) is workers["a"]  # better there than nowhere
    workers["a"].lane_protocol += 1
    assert room.choose(slot("a", "a", "a"), opening("host-a")) is None
