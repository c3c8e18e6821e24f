"""Children's output in the daemon's log, in bounded amounts: user code may print without end. Reading is bounded too,
so a flood of output slows the child and not the daemon."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_LINE = 8192
LOGGED_BYTES_PER_S = 64 << 10
"""Bytes per second logged from one child on average: 200 short lines."""
BURST = 1 << 20
"""Bytes of one child that are logged even if they come faster, such as a long traceback."""
LINE_BYTES = 300
"""Bytes that a line counts for beside its text."""
BYTES_PER_S = 16 << 20
"""Bytes per second read from one child, which blocks if it writes faster."""
READ_BYTES = 1 << 16
PAUSE_S = 0.01
REPORT_S = 1.0
"""Seconds between two log lines that count lines left out. At the output's end one comes at once."""
QUEUED = 10_000
_CLOSE_S = 1.0


class OutputLines:
    """Splitter of one child's output into the lines to log. It reads no clock and no file."""

    def __init__(self, now: float) -> None:
        self._part = b""
        self._cutting = False
        self._credit = float(BURST)
        self._bytes_credit = float(BYTES_PER_S)
        self._at = now
        self._reported_at = now
        self.left_out = 0

    def feed(self, data: bytes, now: float) -> list[str]:
        """Return the lines to log. data: b"" = end of the output, which ends an unfinished line. now: monotonic
        seconds."""
        passed, self._at = max(0.0, now - self._at), now
        self._credit = min(BURST, self._credit + passed * LOGGED_BYTES_PER_S)
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
        texts: list[str] = []
        for line in lines:
            if self._credit < 0:
                break
            texts.append(_text(line))
            self._credit -= LINE_BYTES + len(texts[-1].encode("unicode_escape"))  # a log may escape each character
        self.left_out += len(lines) - len(texts)
        if self.left_out and (now - self._reported_at >= REPORT_S or not data):
            most = f"{LOGGED_BYTES_PER_S >> 10} KiB a second"
            texts.append(f"... {self.left_out} lines were left out: more than {most} were printed")
            self.left_out, self._reported_at = 0, now
        return texts

    @property
    def too_fast(self) -> bool:
        return self._bytes_credit < 0


def _text(line: bytes) -> str:
    text = line[:LONGEST_LINE].decode(errors="replace")
    return text if len(line) <= LONGEST_LINE else f"{text} ... cut"


class _Dropping(logging.handlers.QueueHandler):
    """Handler that never waits: a record is dropped and counted if the queue is full."""

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
            text = f"{lost} log lines were lost, because the reader of this process's standard error was too slow"
            self.handle(logging.LogRecord("penstock.worker", logging.WARNING, __file__, 0, text, None, None))


@contextmanager
def unblocked_logging() -> Iterator[None]:
    """Log in a thread of its own: if standard error is a pipe that is not read, lines are lost, but heartbeats
    continue."""
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
            pass  # nothing reads standard error: the thread ends with the process
        else:
            writer.join(_CLOSE_S)
