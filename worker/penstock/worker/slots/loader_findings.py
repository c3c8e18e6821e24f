"""Findings about a run's loader, shared by the run's slots on this worker."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.proto.errors import ReplayMismatchError

__all__ = ["FIRST_DEPTH", "LoaderFindings"]

FIRST_DEPTH = 16
"""Largest number of batches that the first long verification compares, and each verification before it."""


@dataclass
class LoaderFindings:
    """Findings about a run's loader on this worker."""

    crossing: str = ""
    """See StreamHistory.crossing in restart_points.py."""
    depth: int = FIRST_DEPTH
    """Batches that the next long verification compares."""
    near_s: float = 0.0
    """Seconds of processor time of the short verifications since the last long one."""
    far_s: float = 0.0
    """Expected processor time of the next long verification, in seconds; 0 before the first."""
    misleads: bool = False
    """Flag that a state of the loader led first to the right batches and later to wrong ones, so no state is used."""
    not_used: str = ""
    """Reason for not using the loader's snapshots, as logged once; "" = they are used."""
    checked: bool = False
    """Flag that a loader that declares exact_states was verified once."""
    inexact: bool = False
    """Flag that the verification of a loader that declares exact_states failed."""
    unrepeatable: ReplayMismatchError | None = None
    """Error for a save, if the loader has no state methods and yields other batches when replayed from its
    beginning."""
