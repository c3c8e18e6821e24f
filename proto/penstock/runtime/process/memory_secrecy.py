"""Protection of a daemon's memory and environment, which hold tokens, from user code that runs as the same user."""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4


def keep_memory_private() -> None:
    """Forbid other processes of this user, but root's, to trace this process and to read its memory, environment and
    descriptors, and disable core dumps. Programs that it starts by exec are not protected."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
