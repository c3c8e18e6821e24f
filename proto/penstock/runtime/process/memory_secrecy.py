"""Protection of a daemon's memory and environment, which hold tokens, from user code that runs as the same user."""

from __future__ import annotations

import ctypes

__all__ = ["keep_memory_private"]

_PR_SET_DUMPABLE = 4


def keep_memory_private() -> None:
    """Forbid other processes of this user to trace this process and to read its memory, environment and descriptors.
    Root's processes still may.

    Programs that this process starts by exec are not protected. Core dumps are disabled too.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
