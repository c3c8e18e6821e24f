"""Display of progress: tqdm's bar on a terminal and in a notebook, if it is installed; else one line, redrawn in place
on a terminal, otherwise a new one every few seconds. Not by rich: a killed job would leave its cursor hidden."""

from __future__ import annotations

import shutil
import sys
import threading
import time
import warnings
from typing import Any

TERMINAL_S, LOG_S = 0.5, 10.0
"""Seconds between two lines of progress of a training loop: on a terminal, and elsewhere."""
FILES_S = 2.0
"""Seconds between two lines of progress of work on many files. Work that takes less time shows no line."""


class Progress:
    def __init__(self, every_s: float | None = None) -> None:
        """`every_s`: seconds between two lines; None: those of a training loop."""
        self._stream = sys.stderr
        self._terminal = self._stream is not None and self._stream.isatty()
        self._every_s = (TERMINAL_S if self._terminal else LOG_S) if every_s is None else every_s
        self._shown_at = time.monotonic()
        self._drawn = False
        self._bar: Any = None
        self._latest = 0, ""
        self._lock = threading.Lock()

    def count(
        self,
        what: str,
        done: int,
        total: int | None = None,
        unit: str = "files",
        note: str = "",
        *,
        always: bool = False,
    ) -> None:
        """Show how much is done, unless it was shown a moment ago and not `always`. From any thread."""
        with self._lock:
            self._latest = done, note
            every_s = TERMINAL_S if self._bar is not None else self._every_s
            if not always and time.monotonic() - self._shown_at < every_s:
                return
            if self._bar is None and not always and (self._terminal or "ipykernel" in sys.modules):
                width = shutil.get_terminal_size().columns if self._terminal else None
                self._bar = _bar(desc=what, total=total, unit=f" {unit}", initial=done, file=self._stream, ncols=width)
            if self._bar is None:
                of = f"{done} of {total}" if total is not None else str(done)
                self.show(f"{what} {of} {unit}{note and ', '}{note}")
            else:
                self._move()

    def _move(self) -> None:
        self._shown_at = time.monotonic()
        self._bar.n, note = self._latest
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.refresh()

    def show(self, text: str) -> None:
        self._shown_at = time.monotonic()
        if self._terminal:  # a line that wraps could not be drawn over
            text = f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}"
        self._write(text if self._terminal else f"{text}\n")
        self._drawn = True

    def finish(self) -> None:
        """End the display, so that later output does not overwrite its last line on a terminal."""
        if self._bar is not None:
            self._move()
            self._bar.close()
            self._bar = None
        if self._terminal and self._drawn:
            self._write("\n")
        self._drawn = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # standard error is closed


def _bar(**settings: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without widgets
            from tqdm.auto import tqdm

            return tqdm(**settings)
    except ImportError:
        return None
