"""Limits of a coordinator that its operator sets. All others are constants beside their use."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30
MEMORY_BUDGET = 512 * MIB
"""Value of `budget` for a coordinator that keeps its cluster state in memory (embedded mode)."""
TICK_SHARE = 10
"""Number of checks of the leases within one lease."""


@dataclass(frozen=True)
class Limits:
    """Limits of a coordinator: times in seconds, sizes in bytes."""

    worker_lease_s: float = 3.0
    """Silence after which a worker counts as dead. The daemon runs no user code and reports three times per lease, so
    this much silence means that the worker is dead, stopped or cut off. The lease grows with the fleet: see
    leases.py."""
    client_lease_s: float = 10.0
    """Lease of a training process. It is longer than a worker's lease, because user code may hold the GIL for seconds
    (a compile, a large pickle). The process cannot report meanwhile."""
    balance_after_s: float = 30.0
    """Time that a slot stays on its worker before balance may move the slot; 0 = balance never moves a slot. After this
    time the measured waits of the loop are mostly those with the slot's present worker. A move itself takes about a
    second."""
    budget: int = 4 * GIB
    """Largest size of all snapshots and blobs on disk."""

    @property
    def tick_s(self) -> float:
        """Time between two checks whether leases have ended."""
        return min(self.worker_lease_s, self.client_lease_s) / TICK_SHARE
