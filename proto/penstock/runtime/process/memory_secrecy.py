"""Protection of a daemon's memory and environment, which hold tokens, from user code that runs as the same user."""

from __future__ import annotations

import ctypes

__all__ = ["keep_memory_private"]

_PR_SET_DUMPABLE = 4


def keep_memory_private() -> None:
    """Let no other process of this user read this one's memory, environment or descriptors, or trace it; root can.

    A process that this one starts by exec is not protected. Core dumps are disabled too.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
