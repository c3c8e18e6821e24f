"""Findings of a worker about a run's loader. The run's slots on this worker share them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.proto.errors import ReplayMismatchError

__all__ = ["FIRST_DEPTH", "LoaderFindings"]

FIRST_DEPTH = 16
"""Number of batches that the first long verification compares. Before it, each verification compares at most as
many."""


@dataclass
class LoaderFindings:
    """Findings about one run's loader on this worker."""

    crossing: str = ""
    """Way in which the loader enters the next epoch after a restore; see StreamHistory.crossing in
    restart_points.py."""
    depth: int = FIRST_DEPTH
    """Number of batches that the next long verification compares."""
    near_s: float = 0.0
    """Processor time of all short verifications since the last long one, in seconds."""
    far_s: float = 0.0
    """Expected processor time of the next long verification, in seconds; 0 before the first."""
    misleads: bool = False
    """Flag that a state of the loader led to the right batches first and to wrong ones later. No state of it is used
    then."""
    not_used: str = ""
    """Reason why the loader's snapshots are not used, as logged once; "" = they are used."""
    checked: bool = False
    """Flag that the loader was verified at least once. A loader that declares exact_states is then trusted."""
    inexact: bool = False
    """Flag that a verification failed, so that exact_states is not believed any more."""
    unrepeatable: ReplayMismatchError | None = None
    """Error that a save must raise; None = none. Set if the loader has no state methods and yields other batches when
    it is replayed from its beginning."""
