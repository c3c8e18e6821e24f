"""A line that says how the loop is doing: steps a second, and the share of the time that it waited for data.

On a terminal one line is rewritten twice a second; elsewhere, where every line stays, there is one in ten seconds.
"""

from __future__ import annotations

import sys
import time

from penstock.client.stream.ordered_reader import StreamStats

__all__ = ["ProgressLine"]

TERMINAL_S = 0.5
LOG_S = 10.0


class ProgressLine:
    """The line of one executor."""

    def __init__(self, label: str, stats: StreamStats, step: int) -> None:
        self._label = label
        self._stats = stats
        self._stream = sys.stderr
        self._terminal = self._stream is not None and self._stream.isatty()
        self._every_s = TERMINAL_S if self._terminal else LOG_S
        self._shown_at = time.monotonic()
        self._shown_step = step
        self._shown_waited = stats.waited_s
        self._drawn = False

    def update(self, step: int) -> None:
        """Show the line if it is time."""
        now = time.monotonic()
        seconds = now - self._shown_at
        if seconds >= self._every_s:
            self._show(step, seconds)
            self._shown_at, self._shown_step, self._shown_waited = now, step, self._stats.waited_s

    def _show(self, step: int, seconds: float) -> None:
        stats = self._stats
        rate = (step - self._shown_step) / seconds
        waited = min(1.0, (stats.waited_s - self._shown_waited) / seconds)
        line = f"{self._label}: step {step}, {rate:.1f} steps/s, waiting for data {waited:.0%}"
        if waited >= 0.05 and stats.waited_by_worker:
            line += f" (most for {max(stats.waited_by_worker, key=lambda worker: stats.waited_by_worker[worker])})"
        self._write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._drawn = True

    def finish(self) -> None:
        """Leave the last line standing."""
        if self._terminal and self._drawn:
            self._write("\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass  # nobody can read it
