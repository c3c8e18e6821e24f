"""How a loader that was restored within an epoch gets into the next one: see epoch_crossing.py. Needs no torch, for the
daemon compares what its helpers have found."""

from __future__ import annotations

__all__ = ["FRESH", "KEPT", "REPLAY", "WAYS", "more_careful"]

KEPT, FRESH, REPLAY = "kept", "fresh", "replay"
WAYS = ("", KEPT, FRESH, REPLAY)
"""The more careful the later; "" is not known yet."""


def more_careful(one: str, other: str) -> str:
    """Return the one of two ways that is still right if the other was found wrong."""
    return max(one, other, key=WAYS.index)
