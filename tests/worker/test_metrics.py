"""What the daemon reads in a progress page: positions, and the counts of its metrics."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from penstock.proto.state.assignment import WorkerInfoAnswer
from penstock.worker.processes.progress_page import ENDS, ENTRIES, BatchRecord, ProgressPage


@pytest.fixture
def progress_pages() -> Iterator[tuple[ProgressPage, ProgressPage]]:
    """The daemon's, and the runner's of the same memory."""
    daemon = ProgressPage.create()
    yield daemon, ProgressPage(daemon.fd)
    daemon.close()


def counts(daemon: ProgressPage) -> tuple[int, int, int]:
    daemon.refresh()
    return daemon.counts()


def test_abandoned_batches_stay_counted_as_made(progress_pages: tuple[ProgressPage, ProgressPage]) -> None:
    """The loop leaves the epoch at batch 4 of 10 that were made: the runner goes on from there, and no counter
    falls."""
    daemon, runner = progress_pages
    runner.set_position(0, 0, 0)
    for total in range(1, 11):
        runner.record(total, 0, 7, total, delivered=4)
    assert counts(daemon) == (10, 4, 0)
    runner.set_position(4, 1, 4)
    assert counts(daemon) == (10, 4, 0)
    runner.record(5, 1, 7, 5, delivered=4)
    assert counts(daemon) == (11, 4, 0)
    runner.replayed()
    assert counts(daemon) == (11, 4, 1)


def test_predecessors_batches_are_not_counted(
    progress_pages: tuple[ProgressPage, ProgressPage],
) -> None:
    """Count only its own batches: the runner learns the loop's position first, and needs long to get there."""
    daemon, runner = progress_pages
    runner.doing("replay", delivered=784)
    for done in range(1, 4):
        runner.replayed()
        assert counts(daemon) == (0, 0, done)
    runner.set_position(784, 0, 784)
    assert counts(daemon) == (0, 0, 3)
    runner.record(785, 0, 7, 785, delivered=784)
    runner.doing("next", delivered=785)
    assert counts(daemon) == (1, 1, 3)


# ---- what another mapping of the same memory reads


def test_the_daemon_reads_what_the_runner_wrote() -> None:
    daemon = ProgressPage.create()
    runner = ProgressPage(os.dup(daemon.fd))
    runner.set_position(10, 1, 40)
    runner.record(11, 1, 0xFEED, 44, delivered=9)
    runner.end(1, 11)
    runner.doing("next", delivered=11)
    runner.note_reads(looked=True, answer=WorkerInfoAnswer.OF_BOX)
    daemon.refresh()
    assert (daemon.total, daemon.epoch, daemon.samples, daemon.delivered) == (11, 1, 44, 11)
    assert (daemon.looked, daemon.worker_info) == (True, WorkerInfoAnswer.OF_BOX)
    assert daemon.entry(11) == BatchRecord(11, 1, 0xFEED, 44)
    assert daemon.entry(10) is None
    assert daemon.ends() == {1: 11}
    assert daemon.activity[0] == "next"
    runner.close()
    daemon.close()


def test_a_reader_sees_no_zeros_between() -> None:
    """Each value that the daemon reads is one that the runner has written."""
    page = ProgressPage.create()
    page.here(3, 2)
    page.note_reads(looked=True, answer=WorkerInfoAnswer.NOT_ASKED)
    page.record(7, 3, 9, 7, 5)
    writer = os.fork()
    if writer == 0:
        while True:
            page.record(7, 3, 9, 7, 5)
            page.here(3, 2)
    try:
        for _ in range(20_000):
            page.refresh()
            assert (page.total, page.epoch, page.looked, page.delivered, page.begun) == (7, 3, True, 5, 3)
            assert page.entry(7) == BatchRecord(7, 3, 9, 7)
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        page.close()


def test_newest_batches_are_kept() -> None:
    progress_page = ProgressPage.create()
    last = ENTRIES + 10
    for total in range(1, last + 1):
        progress_page.record(total, 0, total, total, delivered=0)
    for epoch in range(ENDS + 2):
        progress_page.end(epoch, epoch)
    assert progress_page.entry(10) is None
    assert progress_page.entry(11) == BatchRecord(11, 0, 11, 11)
    assert progress_page.entry(last) == BatchRecord(last, 0, last, last)
    assert len(progress_page.ends()) == ENDS
    assert min(progress_page.ends()) == 2
    progress_page.close()
