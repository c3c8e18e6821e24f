"""Duration of a runner's activity, from readings of its progress page."""

from __future__ import annotations

import pytest

from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.slots.runner_watch import HANG_S, Stall, hang_s


def test_new_batch_is_progress_in_same_activity() -> None:
    stall = Stall(since=0.0)
    assert stall.look(10.0, "next", 10.0, 5) == pytest.approx(0.0)
    assert stall.look(12.0, "next", 12.0, 5) == pytest.approx(2.0)
    assert stall.look(13.0, "next", 13.0, 6) == pytest.approx(0.0)
    assert stall.look(14.5, "next", 14.5, 6) == pytest.approx(1.5)


def test_later_activity_counts_from_its_start() -> None:
    stall = Stall(since=0.0)
    stall.look(10.0, "state_dict", 0.2, 5)
    assert stall.look(12.0, "state_dict", 0.5, 5) == pytest.approx(0.5)  # another call of it


def test_waiting_for_others_is_no_hang() -> None:
    stall = Stall()
    for activity, idle in (("waiting", True), ("sending", True), ("next", False), ("replay", False)):
        stall.look(1.0, activity, 0.0, 1)
        assert stall.idle is idle


def test_the_text_names_call_batch_and_time() -> None:
    stall = Stall()
    stall.look(100.0, "next", 0.0, 16)
    assert stall.text(103.0, 3600.0) == "in next() of batch 17 since 00:59:57 UTC by the worker's clock"


def test_it_is_told_at_half_of_the_loops_deadline() -> None:
    assert hang_s(10.0) == 5.0
    assert hang_s(0.0) == HANG_S


def test_progress_page_names_the_batch_in_work() -> None:
    daemon = ProgressPage.create()
    runner = ProgressPage(daemon.fd)
    runner.doing("next", 0)
    runner.here(2, 1)
    daemon.refresh()
    assert daemon.making == (2, 1)
    runner.doing("replay", 0)
    daemon.refresh()
    assert daemon.making is None
    daemon.close()
