"""Progress of the indexing of a folder, on standard error."""

from __future__ import annotations

import sys
import time

__all__ = ["QUIET_S", "Progress"]

QUIET_S = 2.0
"""Seconds until the first line of progress, and between lines."""


class Progress:
    """Lines that say how many of a folder's files are indexed, at most one in QUIET_S seconds."""

    def __init__(self, folder: str, files: int) -> None:
        self._folder, self._files, self._shown = folder, files, time.monotonic()

    def show(self, done: int) -> None:
        """Print a line if one is due. `done`: number of files that are indexed."""
        if time.monotonic() - self._shown >= QUIET_S:
            self._shown = time.monotonic()
            print(f"{self._folder}: indexed {done} of {self._files} files", file=sys.stderr, flush=True)
