"""Waits that fade, queues, events, fetched states and series: what the dashboard shows, without a coordinator."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cluster import FakeCluster

from penstock.appliance.core.gauges import HALF_S, BoxWaits
from penstock.appliance.core.recent_events import MOST, RecentEvents
from penstock.appliance.core.request_checks import check_progress
from penstock.appliance.server.dashboard import source_counts
from penstock.appliance.server.recent_queries import RecentQueries
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.v1 import coordinator_pb2 as pb


def told(waits: BoxWaits, *reports: tuple[float, list[float]], queued: tuple[int, ...] = (0, 0)) -> BoxWaits:
    for at, seconds in reports:
        waits.report(at, seconds, queued, begun=True)
    return waits


def test_share_counts_from_the_first_batch() -> None:
    waits = BoxWaits()
    waits.report(100, [9.0, 0.0], (0, 0), begun=False)  # the start says nothing
    assert told(waits, (110, [19.0, 0.0])).share == 0.0
    told(waits, (111, [19.5, 0.0]), (112, [20.0, 0.0]))
    assert waits.share == pytest.approx(0.5)
    assert waits.of(0) == pytest.approx(0.5)
    assert waits.of(1) == 0.0


def test_old_waits_fade() -> None:
    waits = told(BoxWaits(), (100, [0.0, 0.0]), (100 + HALF_S, [HALF_S, 0.0]))
    assert waits.share == 1.0
    told(waits, (100 + 2 * HALF_S, [HALF_S, 0.0]))
    assert waits.share == pytest.approx(0.5 / 1.5)


def test_waits_while_batches_lay_ready_are_known() -> None:
    waits = told(BoxWaits(), (100, [0.0, 0.0]), (101, [0.5, 0.1]), queued=(7, 1))
    assert (waits.late(0), waits.late(1)) == (1.0, 0.0)


def test_time_since_the_last_step_is_known() -> None:
    waits = told(BoxWaits(), (100, [0.0, 0.0]), (103, [3.0, 0.0]))
    assert (waits.still_s, waits.step_s) == (3.0, 0.0)
    waits.report(104, [3.5, 0.0], (0, 0), begun=True, stepped=True)
    told(waits, (106, [5.5, 0.0]))
    assert (waits.still_s, waits.step_s) == (2.0, 4.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_same_events_of_many_slots_are_counted() -> None:
    clock = Clock()
    events = RecentEvents(clock, lambda: 5.0)
    for _ in range(100):
        events.add("slot lost", "worker w was not heard of", run="job/0", worker="w")
    events.add("slot recovered", "box 0 slot 0", run="job/0")
    clock.now += 60
    events.add("slot lost", "worker w was not heard of", run="job/0", worker="w")
    first, second, third = events.messages()
    assert (first.kind, first.count, first.fault, first.wall_s, first.age_s) == ("slot lost", 100, True, 5.0, 60.0)
    assert (second.fault, third.count) == (False, 1)


def test_events_are_bounded_in_number_and_length() -> None:
    events = RecentEvents(Clock(), lambda: 0.0)
    for number in range(2 * MOST):
        events.add("slot failed", f"{number} " + "x" * 10_000)
    assert len(events.messages()) == MOST
    assert sum(event.ByteSize() for event in events.messages()) < 500 * MOST


def asked(fetches: RecentQueries, box: int | None, step: int) -> pb.FetchStateRequest:
    request = pb.FetchStateRequest(run="job/0", attempt=1, step=step)
    if box is not None:
        request.progress.box = box
    return request


def test_ranks_that_save_one_step_are_one_entry() -> None:
    clock = Clock()
    fetches = RecentQueries(clock, lambda: 7.0)
    for box, seconds in ((0, 0.25), (1, 0.5)):
        with fetches.noted(asked(fetches, box, 40)) as fetch:
            fetch.message.bytes = 10
            clock.now += seconds
    with fetches.noted(asked(fetches, None, 40)):
        pass
    ranks, operator = fetches.messages()["job/0"]
    assert (ranks.step, ranks.asker, ranks.askers, ranks.seconds, ranks.bytes) == (40, "box 0", 2, 0.5, 10)
    assert (operator.asker, operator.askers) == ("operator", 1)


def test_what_ended_a_fetch_is_told() -> None:
    fetches = RecentQueries(Clock(), lambda: 7.0)
    with pytest.raises(ValueError, match="no such step"), fetches.noted(asked(fetches, 0, 40)):
        raise ValueError("no such step")
    assert [state.error for state in fetches.messages()["job/0"]] == ["no such step"]


def test_sources_are_counted_over_all_boxes() -> None:
    def box(imbalance: float, **samples: int) -> Any:
        wanted = {"web": 0.75, "code": 0.25}
        counts = {
            name: pb.SourceCount(source=name, samples=count, tokens=3 * count, wanted=wanted.get(name, 0.0))
            for name, count in samples.items()
        }
        return SimpleNamespace(sources=counts, imbalance=imbalance)

    assert source_counts([box(0.0), box(0.0)]) is None
    assert source_counts([box(1.25, code=10, web=30), box(1.5, web=3)]) == {
        "names": ["web", "code"],
        "counts": [33, 10],
        "wanted": [0.75, 0.25],
        "unit": "samples",
        "imbalance": 1.5,
    }
    many = [box(0.0, web=1, **{f"s{number}": number for number in range(1, 8)})]
    many[0].sources["web"].wanted_of_tokens = True
    found = source_counts(many)
    assert found is not None
    assert found["names"] == ["web", "s7", "s6", "s5", "s4", "s3", "others"]
    assert (found["counts"][-1], found["unit"]) == (3 * (1 + 2), "tokens")


@pytest.mark.parametrize(
    "sources",
    [
        [pb.SourceCount(source=str(number)) for number in range(97)],
        [pb.SourceCount(source="x" * 49)],
        [pb.SourceCount(samples=1 << 63)],
        [pb.SourceCount(wanted=math.nan)],
    ],
)
def test_wrong_counts_of_a_report_are_refused(sources: list[pb.SourceCount]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be"):
        check_progress(pb.WatchRunRequest(sources=sources), 2)


def test_status_has_queues_waits_and_snapshots() -> None:
    world = FakeCluster()
    worker, box = world.worker("w"), world.open()
    worker.ready()
    box.deliver(2)
    assignment = worker.of(1)
    ahead, report = worker.slot_report(worker.of(0), pb.READY), worker.slot_report(assignment, pb.READY)
    ahead.produced, ahead.delivered = 9, 1
    report.produced, report.delivered, report.batches_per_s = 2, 0, 4.0
    worker.heartbeat(ahead, report)
    header = pb.SnapshotHeader(run="job/0", attempt=1, slot=1, generation=assignment.generation, total=1, size=10)
    world.state_machine.snapshot_stored(header)
    world.now += 2
    request = box.progress()
    request.waited_by_slot_s.extend([0.0, 0.0])
    world.watch(request)
    for _ in range(5):
        world.now += 1
        request.waited_by_slot_s[:] = [0.0, request.waited_by_slot_s[1] + 0.5]
        world.watch(request)
        worker.heartbeat(ahead, report)
    (run,) = world.status().runs
    other, slot = run.boxes[0].slots
    assert (slot.queued, slot.batches_per_s, slot.snapshot_age_s) == (1, 4.0, 7.0)  # one of the two was delivered
    assert slot.wait_share == pytest.approx(0.5)
    assert run.boxes[0].wait_share == pytest.approx(0.5)
    assert (other.queued, other.wait_share, other.HasField("snapshot_age_s")) == (8, 0.0, False)
    assert (run.bottleneck.kind, run.bottleneck.input_bound) == ("straggler", True)
    assert (run.bottleneck.box, run.bottleneck.slot) == (0, 1)
    assert {shown.ticket for shown in run.boxes[0].slots} == {""}, "tickets are the box's own"


def kinds(world: FakeCluster) -> list[tuple[str, int]]:
    return [(event.kind, event.count) for event in world.status().events]


def test_lost_worker_is_a_fault_and_slots_recover() -> None:
    world = FakeCluster()
    first, box = world.worker("first"), world.open()
    first.ready()
    box.deliver(3)
    world.run_for(10, [box])
    assert kinds(world) == [("worker joined", 1), ("box opened", 1), ("worker lost", 1), ("slot lost", 2)]
    assert box.watch().slots[0].note.startswith("worker first has not reported for 3.")
    second = world.worker("second")
    second.ready()
    assert kinds(world)[4:] == [("worker joined", 1)]  # it replays what the loop has had
    reports = [second.slot_report(assignment, pb.READY) for assignment in second.heartbeat().assignments]
    for report in reports:
        report.produced = 3
    second.heartbeat(*reports)
    assert kinds(world)[4:] == [("worker joined", 1), ("slot recovered", 1), ("slot recovered", 1)]
    told = r"recovered \d+\.\d s after this: worker first has not reported for 3\.\d s"
    assert all(re.fullmatch(told, slot.note) for slot in box.watch().slots), "it reads as if it were silent still"
    (run,) = world.status().runs
    assert run.recoveries == 2
    world.run_for(20, [second])
    assert ("box lost", 1) in kinds(world)
    assert world.status().events[-1].text.startswith("the training job of box 0 has not reported for")


def test_invalid_waits_are_refused_or_ignored() -> None:
    world = FakeCluster()
    world.worker("w")
    box = world.open()
    request = box.progress()
    request.waited_by_slot_s.extend([float("nan"), 0.0])
    with pytest.raises(Exception, match=r"waited_by_slot_s in a request .* must be 0 to"):
        world.watch(request)
    request.waited_by_slot_s[:] = [1.0] * 5
    world.watch(request)
    assert world.status().runs[0].boxes[0].wait_share == 0.0
