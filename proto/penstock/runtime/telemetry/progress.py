"""Display of progress as one line: redrawn in place on a terminal, otherwise a new line every LOG_S seconds.

It does not use rich, because rich's live displays hide the cursor until they are stopped, which a killed job does not
do, and because the training process would have to import rich for one line.
"""

from __future__ import annotations

import shutil
import sys
import time

__all__ = ["Progress"]

TERMINAL_S, LOG_S = 0.5, 10.0
"""Seconds between two lines, on a terminal and otherwise."""


class Progress:
    """Line of progress on standard error."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._terminal = self._stream is not None and self._stream.isatty()
        self._shown_at = time.monotonic()
        self._drawn = False

    def due(self) -> float:
        """Return the seconds since the last line, if the next one is due; otherwise 0."""
        passed = time.monotonic() - self._shown_at
        return passed if passed >= (TERMINAL_S if self._terminal else LOG_S) else 0.0

    def show(self, text: str) -> None:
        """Show this line instead of the last one."""
        self._shown_at = time.monotonic()
        if self._terminal:  # a line that wraps could not be drawn over
            text = f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}"
        self._write(text if self._terminal else f"{text}\n")
        self._drawn = True

    def finish(self) -> None:
        """Keep the last line on the terminal."""
        if self._terminal and self._drawn:
            self._write("\n")
        self._drawn = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # standard error is closed
