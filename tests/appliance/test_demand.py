"""Recommended number of workers, from the processor time of batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_cluster import FakeCluster, FakeWorker

from penstock.appliance.core import demand
from penstock.proto.v1 import coordinator_pb2 as pb


def measured(worker: FakeWorker, batch_s: float, cpu_s: float, delay_s: float = 0.0) -> None:
    """All that the worker has is ready, and its batches take so much."""
    reports = [worker.slot_report(assignment, pb.READY) for assignment in worker.heartbeat().assignments]
    for report in reports:
        report.batch_s, report.batch_cpu_s, report.batch_delay_s = batch_s, cpu_s, delay_s
    worker.heartbeat(*reports)


def starved(world: FakeCluster, steps_per_s: float, share: float = 0.9) -> pb.StatusReply:
    """The loops wait for all of their slots, and none is ahead."""
    current = world.state_machine.cluster.runs["job/0"].current
    assert current is not None
    for box in current.boxes.values():
        box.usual_steps_per_s, box.usual_span_s = steps_per_s, 10.0
        box.waits.span_s = 10.0
        box.waits._seconds, box.waits._late = ([each] * len(box.slots) for each in (10.0 * share / len(box.slots), 0.0))
        for slot in box.slots:
            slot.gauge.mean_queued = 0.0
    return world.status()


@pytest.mark.parametrize("slots", [2, 6])
def test_no_more_slots_than_the_cores_carry(slots: int) -> None:
    """Every batch is 0.1 s of computing, and the rest of its time a wait for one of the two cores."""
    world = FakeCluster()
    worker = world.worker("w", slots, cores=2)
    world.open(num_workers_per_box=slots)
    measured(worker, 0.1 * slots / 2, 0.1, 0.1 * slots / 2 - 0.1)
    status = starved(world, steps_per_s=20.0)
    assert status.runs[0].recommended_workers_per_box == 2
    assert "all 2 cores of the workers' machines are busy" in status.runs[0].bottleneck.text
    assert status.recommended_workers == 4  # 200 steps a second are wanted: new machines bring cores


def test_storage_bound_slots_need_no_core_each() -> None:
    world = FakeCluster()
    worker = world.worker("w", 2, cores=2)
    world.open()
    measured(worker, 0.1, 0.01)
    status = starved(world, steps_per_s=20.0)
    assert status.runs[0].recommended_workers_per_box == 8  # four times as many
    assert "Raise num_workers_per_box, or make input_fn faster" in status.runs[0].bottleneck.text


@pytest.mark.parametrize(
    ("workers", "cores"),
    [
        ([("a", 2), ("b", 4)], 6),
        ([("a", 2), ("a", 4)], 4),  # of one machine
        ([("a", 2), ("b", 0)], 0),  # one did not tell
    ],
)
def test_cores_of_all_machines(workers: Sequence[tuple[str, int]], cores: int) -> None:
    world = FakeCluster()
    for number, (host, count) in enumerate(workers):
        world.worker(f"w{number}", host=host, cores=count)
    assert demand.cores(world.state_machine.cluster.workers.values()) == cores
