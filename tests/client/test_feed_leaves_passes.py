"""The feed where a loop leaves an epoch before its end, also around lanes that break."""

from __future__ import annotations

from typing import Any

import pytest
from lane_frames import a_frame

from penstock.proto.errors import (
    DeadlineError,
)
from penstock.proto.lane.frames import CLOSE
from penstock.proto.v1 import coordinator_pb2 as pb


def test_abandoned_epoch_releases_its_entries(rigs: Any) -> None:
    rig = rigs(2)
    rig.numbers(0, 0, 1, 2)
    rig.numbers(1, 10, 11, 12)
    assert rig.take(3) == [0, 10, 1]
    rig.reader.abandon_epoch()
    assert rig.run.progress.abandoned == ((0, 3),)
    assert rig.run.reports == 1
    assert [runner.leave_epoch() for runner in rig.runners] == [0, 0]
    rig.numbers(0, 100)
    rig.numbers(1, 110)
    assert rig.take(2) == [100, 110], "batches of the epoch that was left are never seen"
    assert rig.reader.position.total == [3, 2]
    producer = rig.runners[0].producer
    rig.reader.flush()
    producer.take_acks()
    assert producer.free_entries >= producer.ring_entries - 1


def test_closed_loader_reports_its_last_position(rigs: Any) -> None:
    rig = rigs()
    rig.numbers(0, 1, 2, 3)
    rig.take(3)
    rig.reader.close()
    last = rig.run.progress.position()
    assert (last.step, last.slots[0].total) == (3, 3)


def test_abandoned_epoch_is_in_the_next_hello(rigs: Any) -> None:
    rig = rigs(2)
    rig.numbers(0, 0, 1, 2)
    rig.numbers(1, 10, 11)
    assert rig.take(3) == [0, 10, 1]
    rig.runners[1].break_lane()
    rig.reader.abandon_epoch()
    assert rig.runners[0].leave_epoch() == 0
    rig.numbers(0, 100)
    assert rig.take(1) == [100]
    # The next turn is slot 1's: it connects, hears of the cut, and counts on from what was delivered.
    rig.reader._timeout_s = 0.05
    with pytest.raises(DeadlineError):
        rig.reader.next()
    assert rig.runners[1].producer.abandons == 1
    assert rig.runners[1].leave_epoch() == 0
    rig.numbers(1, 110)
    assert rig.take(1) == [110]


def test_closing_lane_may_lack_abandoned_epochs(rigs: Any) -> None:
    rig = rigs(timeout_s=0.05)
    runner = rig.runners[0]
    rig.numbers(0, 0)
    assert rig.take(1) == [0]
    rig.reader.abandon_epoch()
    runner.producer.forward_end(a_frame(kind=CLOSE))
    runner.break_lane()
    with pytest.raises(DeadlineError):
        rig.reader.next()
    assert runner.hellos[1].abandon_epoch == 1
    assert runner.leave_epoch() == 0
    rig.numbers(0, 100)
    assert rig.take(1) == [100]


def test_abandoned_epoch_is_in_the_first_hello(rigs: Any) -> None:
    rig = rigs(2, timeout_s=0.05)
    late = rig.runners[1]
    rig.run.views = [rig.run.views[0], pb.SlotView(slot=1, phase=pb.STARTING)]
    rig.numbers(0, 0)
    rig.numbers(1, 10)
    assert rig.take(1) == [0]
    rig.reader.abandon_epoch()
    assert rig.runners[0].leave_epoch() == 0
    rig.numbers(0, 100)
    assert rig.take(1) == [100]
    rig.run.show(late)
    with pytest.raises(DeadlineError):
        rig.reader.next()
    assert late.hellos[0].abandons == 1
    assert late.leave_epoch() == 0
    rig.numbers(1, 110)
    assert rig.take(1) == [110]


def test_abandonments_around_a_break_differ(rigs: Any) -> None:
    rig = rigs(timeout_s=0.05)
    runner = rig.runners[0]
    rig.numbers(0, 0, 1)
    assert rig.take(1) == [0]
    rig.reader.abandon_epoch()
    assert runner.leave_epoch() == 0
    runner.break_lane()
    with pytest.raises(DeadlineError):
        rig.reader.next()
    rig.numbers(0, 100, 101)
    assert rig.take(1) == [100]
    rig.reader.abandon_epoch()
    with pytest.raises(DeadlineError):
        rig.reader.next()  # 101 lies in the socket, of an epoch that was left
    assert runner.leave_epoch() == 1
    rig.numbers(0, 200)
    assert rig.take(1) == [200]


def test_nothing_is_cut_where_nothing_was_taken(rigs: Any) -> None:
    rig = rigs()
    rig.reader.abandon_epoch()
    assert rig.reader.position.epoch == 0
    assert rig.run.progress.abandoned == ()
