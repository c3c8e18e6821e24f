"""Writes the output of child processes to the daemon's log, in bounded amounts: user code may print without end.

`OutputLines` cuts a child's output into lines and passes on a bounded number; it counts and reports what it leaves out.
The reader also bounds how much is read, so that a flood costs the child its time and not the daemon.
`unblocked_logging` writes the log outside the event loop: if standard error is a pipe that is not read, log lines are
lost, but heartbeats continue.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PAUSE_S", "READ_BYTES", "OutputLines", "unblocked_logging"]

LONGEST_LINE = 8192
LINES_PER_S = 200.0
"""Lines per second that are logged from one child on average. It is more than a person reads."""
BURST = 1000
"""Lines that one child may log at once above the average rate, for example a long traceback or a table of settings."""
BYTES_PER_S = 16 << 20
"""Bytes per second that the daemon reads from one child. A child that writes faster blocks until its pipe has free
space."""
READ_BYTES = 1 << 16
PAUSE_S = 0.01
REPORT_S = 1.0
"""Seconds between two log lines about lines that were left out."""
QUEUED = 10_000
"""Largest number of log records that wait to be written while standard error is slow."""
_CLOSE_S = 1.0


class OutputLines:
    """Splitter of one child's output into the lines to log. Pure: it gets bytes and times, and returns lines."""

    def __init__(self, now: float) -> None:
        self._part = b""
        self._cutting = False
        self._credit = float(BURST)
        self._bytes_credit = float(BYTES_PER_S)
        self._at = now
        self._told_at = now
        self.left_out = 0
        """Number of lines left out since the last report of lines left out."""

    def feed(self, data: bytes, now: float) -> list[str]:
        """Add output of the child, and return the lines to log. b"" means the end of the output: an unfinished last
        line is returned too."""
        passed, self._at = max(0.0, now - self._at), now
        self._credit = min(BURST, self._credit + passed * LINES_PER_S)
        self._bytes_credit = min(BYTES_PER_S, self._bytes_credit + passed * BYTES_PER_S) - len(data)
        lines = (self._part + data).split(b"\n")
        self._part = lines.pop()
        if lines and self._cutting:
            del lines[0]  # the rest of a line that was cut and has been shown
            self._cutting = False
        if len(self._part) > LONGEST_LINE or (not data and self._part):
            if not self._cutting:
                lines.append(self._part)
            self._part, self._cutting = b"", bool(data)
        shown = lines[: int(self._credit)]
        self._credit -= len(shown)
        self.left_out += len(lines) - len(shown)
        texts = [_text(line) for line in shown]
        if self.left_out and (now - self._told_at >= REPORT_S or not data):
            texts.append(f"... {self.left_out} lines were left out: it prints more than {LINES_PER_S:g} a second")
            self.left_out, self._told_at = 0, now
        return texts

    @property
    def too_fast(self) -> bool:
        """True if the child writes faster than BYTES_PER_S. The caller must then pause reading."""
        return self._bytes_credit < 0


def _text(line: bytes) -> str:
    text = line[:LONGEST_LINE].decode(errors="replace")
    return text if len(line) <= LONGEST_LINE else f"{text} ... cut"


class _Dropping(logging.handlers.QueueHandler):
    """Logging handler that puts records into a queue and never waits. If the queue is full, it drops and counts the
    record."""

    def __init__(self, records: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(records)
        self._records = records
        self._lost = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._lost += 1
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            text = f"{lost} lines of the log were lost: standard error was not read"
            self.handle(logging.LogRecord("penstock.worker", logging.WARNING, __file__, 0, text, None, None))


@contextmanager
def unblocked_logging() -> Iterator[None]:
    """Write log records in a thread of their own while the `with` block runs, so that a slow standard error blocks no
    other thread."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    records: queue.Queue[logging.LogRecord | None] = queue.Queue(QUEUED)

    def write() -> None:
        while (record := records.get()) is not None:
            for handler in handlers:
                if record.levelno >= handler.level:
                    handler.handle(record)

    writer = threading.Thread(target=write, name="penstock-log", daemon=True)
    writer.start()
    root.handlers[:] = [_Dropping(records)]  # type: ignore[arg-type]
    try:
        yield
    finally:
        root.handlers[:] = handlers
        try:
            records.put_nowait(None)
        except queue.Full:
            pass  # standard error is not read: the thread ends with the process
        else:
            writer.join(_CLOSE_S)
