"""A line of progress: drawn over on a terminal, and never wider than that; elsewhere each line stays."""

from __future__ import annotations

import io
import sys

import pytest

from penstock.runtime.telemetry.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    return terminal


def test_a_line_is_drawn_over_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    line = Progress()
    line.show("step 1")
    line.show("step 2 " + 50 * "x")
    line.finish()
    line.finish()
    assert terminal.getvalue() == "\r\x1b[Kstep 1\r\x1b[Kstep 2 " + 12 * "x" + "\n"


@pytest.mark.parametrize("stream", [None, "closed"])
def test_nobody_to_read_it_is_no_error(stream: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    monkeypatch.setattr(sys, "stderr", closed if stream else None)
    line = Progress()
    closed.close()
    line.show("step 1")
    line.finish()


def test_counts_are_a_bar_of_tqdm_or_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(stream: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        progress = Progress(0)
        progress.count("folder: indexed", 1, 4)
        progress.count("folder: indexed", 3, 4, note="7 bytes", always=True)
        progress.count("folder: indexed", 4, 4)
        progress.finish()
        return stream.getvalue()

    lines = [f"folder: indexed {done}" for done in ("1 of 4 files", "3 of 4 files, 7 bytes", "4 of 4 files")]
    monkeypatch.setenv("COLUMNS", "60")
    assert said(io.StringIO()).splitlines() == lines
    assert "4/4 [00:00" in said(Terminal())
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert said(Terminal()) == "".join(f"\r\x1b[K{line}" for line in lines) + "\n"
