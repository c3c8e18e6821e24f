"""Progress page, read while the runner writes it."""

from __future__ import annotations

import os
import signal

from penstock.worker.processes.progress_page import BatchRecord, ProgressPage


def test_a_reader_sees_no_zeros_between() -> None:
    """Each value that the daemon reads is one that the runner has written."""
    page = ProgressPage.create()
    page.here(3, 2)
    page.note_assignment_read()
    page.record(7, 3, 9, 7, 5)
    writer = os.fork()
    if writer == 0:
        while True:
            page.record(7, 3, 9, 7, 5)
            page.here(3, 2)
    try:
        for _ in range(20_000):
            page.refresh()
            assert (page.total, page.epoch, page.looked, page.delivered, page.begun) == (7, 3, 1, 5, 3)
            assert page.entry(7) == BatchRecord(7, 3, 9, 7)
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        page.close()
