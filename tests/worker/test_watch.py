"""Duration of a runner's activity, from readings of its progress page."""

from __future__ import annotations

import pytest

from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.slots.runner_watch import Stall


def test_new_batch_is_progress_in_same_activity() -> None:
    stall = Stall(since=0.0)
    assert stall.look(10.0, "next", 10.0, 5) == pytest.approx(0.0)
    assert stall.look(12.0, "next", 12.0, 5) == pytest.approx(2.0)
    assert stall.look(13.0, "next", 13.0, 6) == pytest.approx(0.0)
    assert stall.look(14.5, "next", 14.5, 6) == pytest.approx(1.5)


def test_waiting_for_others_is_no_hang() -> None:
    stall = Stall()
    for activity, idle in (("waiting", True), ("sending", True), ("next", False), ("replay", False)):
        stall.look(1.0, activity, 0.0, 1)
        assert stall.idle is idle


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
