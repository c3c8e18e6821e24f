"""Findings about a run's loader on this worker, of all its slots."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.proto.errors import ReplayMismatchError

__all__ = ["FIRST_DEPTH", "LoaderFindings"]

FIRST_DEPTH = 16
"""Batches that the first long verification compares; earlier ones compare as many of them as are known."""


@dataclass
class LoaderFindings:
    """Findings about a run's loader on this worker."""

    crossing: str = ""
    """See Past.rewinds in restart_points.py."""
    depth: int = FIRST_DEPTH
    """Batches that the next long verification compares."""
    near_s: float = 0.0
    """Seconds of a core that the short ones took since the last long one."""
    far_s: float = 0.0
    """Seconds of a core that the next long one will take; 0 before the first."""
    misleads: bool = False
    """Flag that one of its states led to the right batches first and to others later: none is used any more."""
    not_used: str = ""
    """Reason, as logged once, for not using its snapshots."""
    checked: bool = False
    """Flag that a loader that declares exact_states was verified, once."""
    inexact: bool = False
    """Flag that this verification failed."""
    unrepeatable: ReplayMismatchError | None = None
    """Reason why a loader without methods cannot be saved: from its beginning it yields other batches."""
