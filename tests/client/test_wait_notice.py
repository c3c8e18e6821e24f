"""The line about a wait for the first batch: when it comes, and what it says."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.client.stream import wait_notice
from penstock.client.stream.wait_notice import WaitNotice
from penstock.proto.errors import DeadlineError
from penstock.proto.v1 import coordinator_pb2 as pb


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(notice: WaitNotice, clock: Clock, until_s: float) -> None:
    while clock.now < 100.0 + until_s:
        clock.now += 0.5
        notice.tell("a batch", f"at {clock.now - 100:.1f}")


def test_lines_come_from_2_s_on_and_rarely() -> None:
    clock, lines = Clock(), list[str]()
    notice = WaitNotice(clock, lines.append)
    told(notice, clock, 1.5)
    assert not lines
    assert notice.due == 102.0
    told(notice, clock, 300)
    assert lines[0] == "penstock: waiting for a batch (at 2.0, 2 s)"
    assert [int(line.split(", ")[1].split()[0]) for line in lines] == [2, 12, 24, 48, 96, 156, 216, 276]


def test_time_between_waits_does_not_count() -> None:
    clock, lines = Clock(), list[str]()
    notice = WaitNotice(clock, lines.append)
    clock.now += 1.5
    notice.pause()
    clock.now += 60
    notice.pause()
    notice.resume()
    clock.now += 0.4
    notice.tell("a batch", "why")
    assert not lines
    clock.now += 0.1
    notice.resume()
    notice.tell("a batch", "why")
    assert lines == ["penstock: waiting for a batch (why, 2 s)"]


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (pb.SlotView(phase=pb.STARTING, start_stage=pb.INPUT_FN), "call of input_fn"),
        (pb.SlotView(phase=pb.STARTING, start_stage=77), "start of its runner"),  # type: ignore[arg-type]
        (
            pb.SlotView(phase=pb.STARTING, start_queue_position=3, start_queue_length=7),
            "number 3 of 7 in the queue of runners to start",
        ),
    ],
)
def test_the_reason_is_the_slots(
    rigs: Any, view: pb.SlotView, why: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_S", 0.1)
    rig = rigs(1, timeout_s=0.4)
    rig.run.views = [view]
    with pytest.raises(DeadlineError):
        rig.reader.next()
    assert capfd.readouterr().err == f"penstock: waiting for the first batch of inputs:make ({why}, 0 s)\n"


def test_later_batches_are_waited_for_in_silence(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_S", 0.1)
    rig = rigs(1, timeout_s=10)
    rig.numbers(0, 1)
    assert rig.take(1) == [1]
    later = threading.Timer(0.5, rig.numbers, (0, 2))
    later.start()
    assert rig.take(1) == [2]
    later.join()
    assert capfd.readouterr().err == ""


def test_wait_for_a_slot_without_worker_is_told(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the first batch too: a fleet with fewer slots than the job needs, or one that became smaller."""
    monkeypatch.setattr(wait_notice, "FIRST_S", 0.1)
    rig = rigs(2, timeout_s=0.4)
    rig.numbers(0, 1)
    rig.run.views = [rig.run.views[0], pb.SlotView(slot=1, phase=pb.WAITING)]
    assert rig.take(1) == [1]
    with pytest.raises(DeadlineError):
        rig.reader.next()
    assert capfd.readouterr().err == (
        "penstock: waiting for the next batch of inputs:make from worker slot 1 (no worker has free slots, 0 s)\n"
    )
