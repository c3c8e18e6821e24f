"""Limits of a coordinator that its operator sets. All others are constants beside their use."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30
MEMORY_BUDGET = 512 * MIB
"""`budget` of a coordinator that keeps its cluster state in memory (embedded mode)."""
DISK_BUDGET = 4 * GIB
DISK_SHARE = 0.4
"""Largest share of the disk for snapshots, by default: SQLite holds what it writes twice for a while."""
TICK_SHARE = 10
"""Checks of the leases within one lease."""


@dataclass(frozen=True)
class Limits:
    """Limits of a coordinator: times in seconds, sizes in bytes."""

    worker_lease_s: float = 3.0
    """Silence after which a worker counts as dead. The daemon runs no user code and reports three times per lease,
    which grows with the fleet (leases.py)."""
    client_lease_s: float = 10.0
    """Lease of a training process: longer, as user code may hold the GIL for seconds (a compile, a pickle)."""
    hung_up_s: float = math.inf
    """Longest rest of a training process's lease once its connection has ended. A Unix socket ends with its process."""
    idle_report_s: float = 1.0
    """Longest time between two reports of a peer that has nothing new to say, within a third of its lease: each report
    wakes the threads of gRPC in both processes some 15 times."""
    balance_after_s: float = 30.0
    """Time until balance may move a slot, so that measured waits are of its present worker; 0 = never."""
    budget: int = DISK_BUDGET
    """Most bytes of snapshots and blobs; 0: `default_budget`."""

    max_slots: Mapping[str, int] = field(default_factory=dict)
    """Name of client tokens -> most slots that their boxes have at a time; "client": of each token without an entry."""

    def slot_budget(self, credential: str) -> int | None:
        """Return the most slots of a credential, by its name or digest; None: no budget, or no known credential."""
        return self.max_slots.get(credential, self.max_slots.get("client")) if credential else None

    @property
    def tick_s(self) -> float:
        return min(self.worker_lease_s, self.client_lease_s) / TICK_SHARE


def default_budget(state_dir: Path | None) -> int:
    """Return the budget of a coordinator in this directory, or in memory (None)."""
    if state_dir is None:
        return MEMORY_BUDGET
    disk = os.statvfs(state_dir)
    return min(DISK_BUDGET, int(DISK_SHARE * disk.f_blocks * disk.f_frsize))
