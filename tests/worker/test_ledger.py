"""The progress page is read by another mapping of the same memory, as the daemon reads the runner's."""

from __future__ import annotations

import os

from penstock.worker.processes.progress_page import EARLY, ENDS, ENTRIES, BatchRecord, ProgressPage


def test_the_daemon_reads_what_the_runner_wrote() -> None:
    daemon = ProgressPage.create()
    runner = ProgressPage(os.dup(daemon.fd))
    runner.set_position(10, 1, 40)
    runner.record(11, 1, 0xFEED, 44, delivered=9)
    runner.end(1, 11)
    runner.doing("next", delivered=11)
    runner.note_assignment_read()
    daemon.refresh()
    assert (daemon.total, daemon.epoch, daemon.samples, daemon.delivered, daemon.looked) == (11, 1, 44, 11, 1)
    assert daemon.entry(11) == BatchRecord(11, 1, 0xFEED, 44)
    assert daemon.entry(10) is None
    assert daemon.ends() == {1: 11}
    assert daemon.activity[0] == "next"
    runner.close()
    daemon.close()


def test_newest_and_first_batches_are_kept() -> None:
    progress_page = ProgressPage.create()
    last = ENTRIES + EARLY + 10
    for total in range(1, last + 1):
        progress_page.record(total, 0, total, total, delivered=0)
    for epoch in range(ENDS + 2):
        progress_page.end(epoch, epoch)
    assert progress_page.entry(2) == BatchRecord(2, 0, 2, 2)
    assert progress_page.entry(EARLY + 1) is None
    assert progress_page.entry(last) == BatchRecord(last, 0, last, last)
    assert len(progress_page.ends()) == ENDS
    assert min(progress_page.ends()) == 2
    progress_page.close()


def test_abandoned_epoch_ends_where_abandoned() -> None:
    progress_page = ProgressPage.create()
    for epoch, total in enumerate((5, 10, 15)):
        progress_page.end(epoch, total)
    progress_page.cut(1, 7)
    assert progress_page.ends() == {0: 5, 1: 7}
    progress_page.close()
