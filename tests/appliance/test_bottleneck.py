"""Bottlenecks, from measured slots: the loop, one slot, one worker, too few of them, the network between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.appliance.core.bottleneck import find
from penstock.appliance.core.entities import Box, BoxPresence, Slot, Worker
from penstock.appliance.core.gauges import BoxWaits, SlotGauge
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb

FULL = 8.0


@dataclass
class Measured(Slot):
    wait_share: float = 0.0
    late: float = 0.0
    remote: bool = False


def slot(
    number: int,
    worker: str = "",
    *,
    phase: str = "READY",
    mean_queued: float = FULL,
    behind: bool = False,
    **changes: Any,
) -> Measured:
    key, worker = SlotKey("job/0", 1, 0, number), worker or f"w{number}"
    gauge = SlotGauge(mean_queued=mean_queued, behind=behind)
    return Measured(key, 1, pb.SlotPhase.Value(phase), worker, recovery=behind, gauge=gauge, **changes)


def box(
    slots: Sequence[Measured],
    number: int = 0,
    span_s: float = 20.0,
    *,
    waiting_for: int = 0,
    still_s: float = 0.0,
    step_s: float = 1.0,
) -> Box:
    """`waiting_for`: 1 + the slot for which the loop waits now; `still_s`: since its last step."""
    seconds = [slot.wait_share * span_s for slot in slots]
    late = [slot.late * slot.wait_share * span_s for slot in slots]
    waits = BoxWaits(span_s, still_s, step_s, _seconds=seconds, _late=late)
    opening, start = pb.OpenRunRequest(host_id="here"), Position.start(len(slots))
    known = {"slots": list(slots), "waits": waits, "waiting_for": waiting_for}
    return Box(number, "", opening, start, BoxPresence.LIVE, 0.0, 0, **known)  # type: ignore[arg-type]


def found(*boxes: Box) -> pb.Bottleneck:
    slots = [slot for box in boxes for slot in box.slots if isinstance(slot, Measured)]
    hosts = {slot.worker: "there" if slot.remote else "here" for slot in slots}
    workers = {name: Worker(name, "", host, 1, "", "", True, 0.0, 0.0, 0) for name, host in hosts.items()}
    finding = find(boxes, workers)
    assert finding is not None
    return finding


def test_a_loop_that_seldom_waits_sets_the_speed() -> None:
    finding = found(box([slot(0, wait_share=0.04, mean_queued=0.5), slot(1)]))
    assert (finding.kind, finding.input_bound, finding.wait_share) == ("loop", False, 0.04)
    assert finding.text.startswith("Not input-bound: box 0, which waits most, waits for data 4% of its time")
    assert found(box([slot(0, wait_share=0.06, mean_queued=0.5), slot(1)])).input_bound


def test_slot_behind_others_ahead_is_straggler() -> None:
    finding = found(box([slot(0), slot(1, wait_share=0.6, mean_queued=0.4), slot(2, wait_share=0.02), slot(3)]))
    assert (finding.kind, finding.input_bound, finding.box, finding.slot) == ("straggler", True, 0, 1)
    assert (finding.worker, round(finding.blame, 2)) == ("w1", 0.97)
    assert "box 0 waits for data 62% of its time, 97% of that for slot 1 on worker w1" in finding.text
    assert "0.4 batches are ready there on average, 8.0 at each other slot" in finding.text


def test_slow_worker_is_named_with_a_slot_ahead() -> None:
    """The loop waits for the one that is asked first; the other one has used that time, and is as slow."""
    slow = {"worker": "slow", "batch_s": 0.080}
    slots = [
        slot(0, batch_s=0.006),
        slot(1, wait_share=0.5, mean_queued=1.0, **slow),  # type: ignore[arg-type]
        slot(2, batch_s=0.006),
        slot(3, mean_queued=4.0, **slow),  # type: ignore[arg-type]
    ]
    finding = found(box(slots))
    assert "100% of that for worker slow, which is slower than the others" in finding.text
    slots[3] = slot(3, worker="slow", batch_s=0.006)  # that machine can do better
    assert "100% of that for slot 1 on worker slow, which is slower" in found(box(slots)).text


def test_first_slot_is_no_straggler_by_itself() -> None:
    """Slots that are equally slow: the whole wait falls on one of them, for the others use that time."""
    finding = found(box([slot(0, wait_share=0.7, mean_queued=0.5), *(slot(k, mean_queued=0.6) for k in (1, 2, 3))]))
    assert (finding.kind, finding.HasField("slot"), finding.worker) == ("workers", False, "")
    assert "all its 4 slots are busy" in finding.text
    assert "Raise num_workers_per_box, or make input_fn faster" in finding.text


def test_ready_batches_waited_for_arrive_late() -> None:
    late = slot(0, wait_share=0.4, mean_queued=6.0, late=0.9, remote=True)
    assert found(box([late, slot(1)])).kind == "network"
    here = slot(0, wait_share=0.4, mean_queued=6.0, late=0.9, remote=False)  # no network lies between
    assert found(box([here, slot(1)])).kind == "loop"


def test_box_that_waits_most_decides() -> None:
    """The others wait for it in their collectives, not for data."""
    finding = found(
        box([slot(0), slot(1)], 0), box([slot(0), slot(1, wait_share=0.5, mean_queued=0.1)], 1), box([slot(0)], 2)
    )
    assert (finding.kind, finding.box, finding.slot) == ("straggler", 1, 1)


def test_slot_without_worker_or_with_new_runner() -> None:
    assert found(box([slot(0, wait_share=0.5, phase="WAITING"), slot(1)])).kind == "unplaced"
    moved = found(box([slot(0, wait_share=0.5, phase="STARTING", restarts=1), slot(1)]))
    assert (moved.kind, moved.input_bound) == ("recovering", True)
    assert "whose new runner on worker w0 is still starting" in moved.text
    assert found(box([slot(0, wait_share=0.5, behind=True), slot(1, mean_queued=9.0)])).kind == "recovering"
    assert found(box([slot(0, wait_share=0.5, phase="FAILED"), slot(1)])).kind == "recovering"


def test_waits_of_a_start_or_a_recovery_are_over_once_batches_are_ready() -> None:
    """They count for a minute: it was "Too few workers", with all slots busy, while 22 batches were ready at each."""
    finding = found(box([slot(0, mean_queued=22.0), slot(1, wait_share=0.3, mean_queued=22.0, restarts=1)]))
    assert (finding.kind, finding.input_bound) == ("loop", False)
    assert "waited for data 30% of the last minute, most for slot 1, where 22.0 batches are ready" in finding.text


DOING = "in next() of batch 17 since 12:03:41 UTC by the worker's clock"


@pytest.mark.parametrize("span_s", [0.0, 20.0])
def test_runner_that_is_long_in_a_call_is_stalled(span_s: float) -> None:
    """It was too few workers, or starting, while its worker knew the batch."""
    stalled = slot(0, wait_share=0.9, mean_queued=0.0, doing=DOING, phase="READY" if span_s else "STARTING")
    finding = found(box([stalled], span_s=span_s, waiting_for=1, still_s=61.0))
    assert (finding.kind, finding.input_bound, finding.slot, finding.worker) == ("stalled", True, 0, "w0")
    assert f"box 0 waits since 61 s for slot 0, whose runner on worker w0 is {DOING}." in finding.text
    assert found(box([stalled, slot(1)], span_s=20.0)).kind != "stalled", "nobody waits for it yet"


def test_loop_that_stands_still_is_stalled_before_its_worker_says_so() -> None:
    def kind(still_s: float, step_s: float, **changes: Any) -> str:
        return found(box([slot(0, wait_share=0.9, **changes)], waiting_for=1, still_s=still_s, step_s=step_s)).kind

    assert kind(11.0, 1.0, mean_queued=0.0) == "stalled"
    assert kind(9.0, 1.0, mean_queued=0.0) == "workers"
    assert kind(40.0, 20.0, mean_queued=0.0) == "workers", "its batches usually take as long"
    assert kind(61.0, 20.0, mean_queued=0.0) == "stalled"
    assert kind(61.0, 1.0, mean_queued=0.0, phase="STARTING", restarts=1) == "recovering"
    assert kind(61.0, 1.0, mean_queued=0.0, phase="WAITING") == "unplaced"


def test_a_run_that_has_just_begun_is_not_judged() -> None:
    finding = found(box([slot(0, wait_share=1.0, phase="STARTING"), slot(1, phase="STARTING")], span_s=0.0))
    assert (finding.kind, finding.input_bound) == ("starting", False)
    assert finding.text == "Starting: the first batches of 2 slots are being made."
    assert (
        "no worker has free capacity for its slot 1" in found(box([slot(0), slot(1, phase="WAITING")], span_s=0.0)).text
    )
