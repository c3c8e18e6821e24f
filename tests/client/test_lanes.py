"""A slot's lane whose worker cannot be reached: when the coordinator is asked for another one."""

from __future__ import annotations

from penstock.client.stream.lane_reader import CUT_OFF_S, SlotLane


def cut_off(lane: SlotLane, *, dials_at: float, replied_at: float, fails: float, silent_s: float = 0.0) -> bool:
    """A try to open it; the coordinator was heard at that time."""
    assert dials_at >= lane.retry_at
    lane.begin_try(replied_at)
    return lane.cut_off(fails, silent_s, "timed out")


def test_new_worker_is_requested_after_two_tries() -> None:
    lane = SlotLane(0, 1, "slot 0")
    assert not cut_off(lane, dials_at=10.0, replied_at=9.0, fails=11.25)
    assert not cut_off(lane, dials_at=11.5, replied_at=11.4, fails=11.6), (
        "refused at once: the daemon may just have died"
    )
    assert cut_off(lane, dials_at=13.0, replied_at=13.0, fails=11.25 + CUT_OFF_S)
    assert lane.unreachable == "timed out"
    lane.settle()
    assert not lane.unreachable, "something came"
    assert not cut_off(lane, dials_at=20.0, replied_at=19.9, fails=20.1), "and all begins anew"


def test_silent_lane_needs_one_more_try() -> None:
    lane = SlotLane(0, 1, "slot 0")
    assert not lane.cut_off(10.0, 2.0, "silent")
    assert cut_off(lane, dials_at=10.1, replied_at=10.01, fails=11.35)


def test_host_with_own_network_fault_waits() -> None:
    lane = SlotLane(0, 1, "slot 0")
    assert not lane.cut_off(10.0, 2.0, "silent")
    assert not cut_off(lane, dials_at=10.1, replied_at=7.0, fails=11.35)
    assert not cut_off(lane, dials_at=12.0, replied_at=7.0, fails=13.25)
    # The coordinator is heard again while a try is under way: that try says nothing yet.
    assert not cut_off(lane, dials_at=14.0, replied_at=7.0, fails=15.25)
    assert cut_off(lane, dials_at=16.0, replied_at=15.0, fails=17.25)
