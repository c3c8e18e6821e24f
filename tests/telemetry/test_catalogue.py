"""The catalogue of metrics keeps its own rules, and what is read must be in it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from penstock.appliance.server.metrics import readings
from penstock.appliance.server.service import CoordinatorCounters
from penstock.proto.errors import DeadlineError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.counters import CallCounters, Histogram
from penstock.runtime.telemetry.metric_catalogue import CATALOGUE
from penstock.runtime.web.prometheus import Collector, in_loop

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_names_follow_the_rules() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.startswith("penstock_")
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert metric.help.endswith(".")
        # The coordinator's series must not grow with the slots, nor with the workers.
        assert "coordinator" not in metric.processes or not {"slot", "worker"} & set(metric.labels), metric.name


def test_the_page_names_every_metric() -> None:
    for process, title in {"coordinator": "coordinator", "worker": "worker", "client": "training job"}.items():
        names = [metric.name.removeprefix("penstock_") for metric in CATALOGUE if process in metric.processes]
        row = f"| {title} | {', '.join(f'`{name}`' for name in names if name != 'build_info')} |"
        assert row in DOCS.read_text(), f"docs/metrics.md should hold:\n{row}"


def fleet(boxes: int, slots: int) -> pb.StatusReply:
    reply = pb.StatusReply(workers=[pb.WorkerStatus(worker=f"w{n}", live=True, slots=8) for n in range(1000)])
    run = reply.runs.add(run='a "run"\\\n/0', attempt=1, open=True, num_boxes=boxes)
    for box in range(boxes):
        run.boxes.add(box=box, live=True, slots=[pb.SlotView(slot=n, phase=pb.READY) for n in range(slots)])
    return reply


def test_coordinators_series_do_not_grow() -> None:
    vitals = CoordinatorCounters(CallCounters(), Histogram([1.0]), 0, 0, {})

    def size(slots: int) -> int:
        return sum(len(family.samples) for family in readings(fleet(16, slots), vitals).families())

    assert size(1) == size(625) < 250  # 10,000 slots


def test_slots_of_a_lost_box_and_its_counters() -> None:
    """Else an alert would want more workers for a job that was killed."""
    reply = fleet(2, 3)
    gone = reply.runs[0].boxes[1]
    gone.live, gone.waited_share, gone.waited_s = False, 0.9, 7.0
    for slot in gone.slots:
        slot.phase, slot.restarts = pb.WAITING, 2
    found: dict[tuple[str, str, str], float] = {}
    for family in readings(
        reply, CoordinatorCounters(CallCounters(), Histogram([1.0]), 0, 0, {(reply.runs[0].run, 1): (0, 3)})
    ).families():
        for sample in family.samples:
            found[sample.name, sample.labels.get("box", ""), sample.labels.get("phase", "")] = sample.value
    assert [found["penstock_run_slots", "", phase] for phase in ("waiting", "ready")] == [0, 3]
    assert ("penstock_box_wait_ratio", "0", "") in found
    assert ("penstock_box_wait_ratio", "1", "") not in found
    assert found["penstock_box_waiting_for_slot", "1", ""] == -1
    assert found["penstock_box_wait_seconds_total", "1", ""] == 7
    assert found["penstock_run_recoveries_total", "", ""] == 6


def test_the_exposition_is_valid_openmetrics_too() -> None:
    calls = CallCounters()
    calls.add("OpenRun", "OK", 0.02)
    calls.add("OpenRun", "UNAUTHENTICATED", 0.0)
    commits = Histogram([0.001, 0.1])
    for seconds in (0.0005, 0.05, 3.0):
        commits.add(seconds)
    vitals = CoordinatorCounters(calls, commits, 10, 100, {("a", 0): (0, 0)})
    registry = CollectorRegistry()
    registry.register(Collector(lambda: readings(fleet(2, 3), vitals)))
    text = generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    families = {family.name: family for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    buckets = {s.labels["le"]: s.value for s in families["penstock_coordinator_commit_seconds"].samples if s.labels}
    assert buckets == {"0.001": 1, "0.1": 2, "+Inf": 3}
    (attempt,) = families["penstock_run_attempt"].samples
    assert attempt.labels == {"run": 'a "run"\\\n/0'}


def test_nobody_waits_for_a_loop_that_has_ended() -> None:
    async def read() -> int:
        return 1

    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(DeadlineError, match="is ending"):
        in_loop(loop, read())
