"""Display of progress as one line: redrawn in place on a terminal, otherwise a new line every few seconds. Not by rich:
a killed job would leave its cursor hidden."""

from __future__ import annotations

import shutil
import sys
import time

TERMINAL_S, LOG_S = 0.5, 10.0
"""Seconds between two lines of progress of a training loop: on a terminal, and elsewhere."""
FILES_S = 2.0
"""Seconds between two lines of progress of work on many files. Work that takes less time shows no line."""


class Progress:
    def __init__(self, every_s: float | None = None) -> None:
        """`every_s`: seconds between two lines; None: those of a training loop."""
        self._every_s = every_s
        self._stream = sys.stderr
        self._terminal = self._stream is not None and self._stream.isatty()
        self._shown_at = time.monotonic()
        self._drawn = False

    def due(self) -> float:
        """Return the seconds since the last line if another one is due, else 0."""
        passed = time.monotonic() - self._shown_at
        every_s = (TERMINAL_S if self._terminal else LOG_S) if self._every_s is None else self._every_s
        return passed if passed >= every_s else 0.0

    def update(self, text: str) -> None:
        """Show `text` as a line, unless the last line is too recent."""
        if self.due():
            self.show(text)

    def show(self, text: str) -> None:
        self._shown_at = time.monotonic()
        if self._terminal:  # a line that wraps could not be drawn over
            text = f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}"
        self._write(text if self._terminal else f"{text}\n")
        self._drawn = True

    def finish(self) -> None:
        """End the display, so that later output does not overwrite its last line on a terminal."""
        if self._terminal and self._drawn:
            self._write("\n")
        self._drawn = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # standard error is closed
