"""Whether a worker is well, and what a progress page counts for its metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.worker.daemon.worker_metrics import health
from penstock.worker.processes.progress_page import ProgressPage


@pytest.mark.parametrize(
    ("answered_at", "stopping", "status", "why"),
    [
        (None, False, 503, "the coordinator has not answered yet"),
        (98.0, False, 200, "ok"),
        (96.0, False, 503, "the coordinator has not answered for 4.0 s, its lease is 3 s"),
        (99.9, True, 503, "it is ending, as it was told"),
    ],
)
def test_a_worker_is_well_while_it_is_answered_within_its_lease(
    answered_at: float | None, stopping: bool, status: int, why: str
) -> None:
    assert health(answered_at, 3.0, stopping, 100.0) == (status, why)


@pytest.fixture
def progress_pages() -> Iterator[tuple[ProgressPage, ProgressPage]]:
    """The daemon's, and the runner's of the same memory."""
    daemon = ProgressPage.create()
    yield daemon, ProgressPage(daemon.fd)
    daemon.close()


def counts(daemon: ProgressPage) -> tuple[int, int, int]:
    daemon.refresh()
    return daemon.counts()


def test_a_progress_page_counts_what_its_runner_made_and_the_loop_took(
    progress_pages: tuple[ProgressPage, ProgressPage],
) -> None:
    daemon, runner = progress_pages
    assert counts(daemon) == (0, 0, 0)
    runner.place(1000, 2, 0)  # resumed there: what was before is not this runner's
    assert counts(daemon) == (0, 0, 0)
    for total in range(1001, 1011):
        runner.record(total, 2, 7, total, delivered=max(1000, total - 4))
    assert counts(daemon) == (10, 6, 0)


def test_what_the_loop_left_behind_stays_counted_as_made(progress_pages: tuple[ProgressPage, ProgressPage]) -> None:
    """The loop leaves the epoch at batch 4 of 10 that were made: the runner goes on from there, and no counter
    falls."""
    daemon, runner = progress_pages
    runner.place(0, 0, 0)
    for total in range(1, 11):
        runner.record(total, 0, 7, total, delivered=4)
    assert counts(daemon) == (10, 4, 0)
    runner.place(4, 1, 4)
    assert counts(daemon) == (10, 4, 0)
    runner.record(5, 1, 7, 5, delivered=4)
    assert counts(daemon) == (11, 4, 0)
    runner.replayed()
    assert counts(daemon) == (11, 4, 1)


def test_what_the_loop_took_of_a_predecessor_is_not_a_successors(
    progress_pages: tuple[ProgressPage, ProgressPage],
) -> None:
    """It hears from the loop where that is, and is long on its way there."""
    daemon, runner = progress_pages
    runner.doing("replay", delivered=784)
    for done in range(1, 4):
        runner.replayed()
        assert counts(daemon) == (0, 0, done)
    runner.place(784, 0, 784)
    assert counts(daemon) == (0, 0, 3)
    runner.record(785, 0, 7, 785, delivered=784)
    runner.doing("next", delivered=785)
    assert counts(daemon) == (1, 1, 3)


def test_no_count_falls_where_a_runner_goes_back_while_it_is_read(
    progress_pages: tuple[ProgressPage, ProgressPage],
) -> None:
    daemon, runner = progress_pages
    runner.place(0, 0, 0)
    runner.record(10, 0, 7, 10, delivered=4)
    daemon.refresh()
    runner.place(4, 1, 4)
    produced = daemon.counts()[0]
    assert counts(daemon)[0] >= produced
