"""Findings of a worker about a run's loader, which the run's slots on this worker share."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.proto.errors import ReplayMismatchError

__all__ = ["FIRST_DEPTH", "LoaderFindings"]

FIRST_DEPTH = 16
"""Number of batches that the first long verification of a restart point compares. Until then this is also the largest
number that a short verification compares."""


@dataclass
class LoaderFindings:
    """Findings of this worker about one run's loader."""

    crossing: str = ""
    """Way in which the loader enters the next epoch after a restore; see StreamHistory.crossing in
    restart_points.py."""
    depth: int = FIRST_DEPTH
    """Number of batches that the next long verification of a restart point compares."""
    short_s: float = 0.0
    """Processor time of all short verifications since the last long one, in seconds."""
    long_s: float = 0.0
    """Expected processor time of the next long verification, in seconds; 0 before the first."""
    misleads: bool = False
    """True if a restored loader made right batches at first and wrong ones later. The loader's states are then not
    used."""
    not_used: str = ""
    """Reason why the loader's snapshots are not used, as logged once; "" = snapshots are used."""
    checked: bool = False
    """True once a verification has begun. A verification without a result (its helper process took too long or died)
    sets this to False again, until LAPSES (verification.py) verifications in a row have failed. While it is True, a
    loader whose declaration `exact_states` is trusted is not verified."""
    inexact: bool = False
    """True if a verification failed. The loader's declaration `exact_states` is then not trusted any more."""
    unrepeatable: ReplayMismatchError | None = None
    """Error that a save must raise; None = no error. Set if the loader has no state methods, and a replay from its
    beginning yields other batches."""
