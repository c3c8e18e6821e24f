"""Output of children: cut into lines, bounded in number and length; every loss is reported."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from penstock.runtime.telemetry.logs import printable
from penstock.worker.processes import child_output
from penstock.worker.processes.child_output import (
    BURST,
    LINE_BYTES,
    LOGGED_BYTES_PER_S,
    LONGEST_LINE,
    OutputLines,
    unblocked_logging,
)


def test_endless_line_is_cut_and_costs_no_memory() -> None:
    lines = OutputLines(0.0)
    shown = [text for _ in range(1000) for text in lines.feed(b"y" * 5000, 0.0)]
    assert [len(text) for text in shown] == [LONGEST_LINE + len(" ... cut")]
    assert lines.feed(b"rest\nnext\n", 0.0) == ["next"]


def test_a_flood_is_thinned_out_counted_and_told() -> None:
    lines = OutputLines(0.0)
    first = len(lines.feed(b"x\n" * 5000, 0.0))
    assert first == BURST // (LINE_BYTES + 1) + 1
    said = [text for tick in range(1, 31) for text in lines.feed(b"x\n" * 1000, tick / 10)]
    told = [text for text in said if "left out" in text]
    shown, counted = len(said) - len(told), sum(int(text.split()[1]) for text in told)
    assert len(told) == 3
    assert abs(shown - 3 * LOGGED_BYTES_PER_S / (LINE_BYTES + 1)) <= 2
    assert first + shown + counted + lines.left_out == 5000 + 30 * 1000


def test_a_flood_fills_no_disk_whatever_it_prints() -> None:
    """A log escapes such a line, at four times its length: 58 MB in ten seconds."""
    lines = OutputLines(0.0)
    said = [text for tick in range(1, 1001) for text in lines.feed(b"\x01" * 8000 + b"\n", tick / 100)]
    assert sum(len(printable(text)) for text in said) < 1.1 * (BURST + 10 * LOGGED_BYTES_PER_S)
    assert "more than 64 KiB a second were printed" in said[-1]


def test_a_log_that_nobody_reads_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_output, "QUEUED", 100)
    read, write = os.pipe()
    root, log = logging.getLogger(), logging.getLogger("penstock.test")
    before, level = list(root.handlers), root.level
    with os.fdopen(write, "w") as stream, os.fdopen(read, "rb") as reader:
        root.handlers[:] = [logging.StreamHandler(stream)]
        root.setLevel(logging.INFO)
        try:
            with unblocked_logging():
                for number in range(3000):  # 300 kB, for a pipe of 64 KiB
                    log.info("%d %s", number, "x" * 100)
                said: list[bytes] = []
                enough = threading.Event()

                def drain() -> None:
                    for line in reader:
                        said.append(line)
                        if b"log lines were lost" in line:
                            enough.set()

                thread = threading.Thread(target=drain)
                thread.start()
                while not enough.wait(0.01):
                    log.info("one more")
            root.handlers[:] = before
            stream.close()
            thread.join(10)
        finally:
            root.handlers[:] = before
            root.setLevel(level)
    assert said[0].startswith(b"0 ")


def test_reading_is_bounded_in_bytes() -> None:
    lines = OutputLines(0.0)
    for _ in range(child_output.BYTES_PER_S >> 16):
        assert not lines.too_fast
        lines.feed(bytes(1 << 16), 0.0)
    lines.feed(b"x", 0.0)
    assert lines.too_fast
    lines.feed(b"", 0.001)
    assert not lines.too_fast
