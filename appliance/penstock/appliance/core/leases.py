"""Lease policy: the heartbeat interval, the length of leases, and each slot's quota of durable snapshots.

In a small fleet heartbeats are frequent, so that a death is noticed within seconds. But each call costs the coordinator
a fixed time. So in a large fleet the number of calls per second stays constant, and the interval and the lease grow
with the fleet: 10,000 workers at 2,000 heartbeats a second have an interval of 5 s and a lease of 15 s. The same holds
for the WatchRun calls of boxes. Snapshots have a limit in calls and one in bytes per second.

The cost of a call depends on the other load of the machine. So the coordinator measures how late its own timer is.
While the timer is late, it asks a large fleet for fewer calls. Otherwise an overloaded coordinator would take live
workers for dead.

The coordinator's last reply promises a lease to a peer, which may be longer than the present fleet needs. So the peer
reports with each call the lease that it was promised, and gets the longer of the promised and the present lease. The
coordinator need not remember the promise, which therefore also holds after restarts and lost replies.

Long polls that were answered together, at the start of a job or after a restart, would stay synchronised. So each peer
has its own moment within the interval, derived from its name, and its poll is held until that moment.

This module only computes the leases. `StateMachine.tick` (core/state_machine.py) decides that a worker or box is dead,
because its lease has ended.

Pure, except that promised leases are recorded in the journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from penstock.appliance.journal.journal import Journal
from penstock.proto.errors import JournalError

HOLD_SHARE = 1 / 3
"""Longest time for which a long poll (a call that is answered at the next change) is held, as a share of the lease: a
peer may lose two polls in a row without harm."""
HEARTBEAT_S = 1.0
"""Heartbeat interval in a small fleet, in seconds. The figures in `penstock status` are at most this old."""
HEARTBEATS_PER_S = 2000.0
"""Largest number of heartbeats per second of the whole fleet: above 2,000 workers the heartbeat interval and the lease
grow. benchmarks/README.md has the cost of a call."""
WATCHES_PER_S = 200.0
"""Largest rate of WatchRun calls of all boxes: above 200 boxes their interval grows, above 660 their lease."""
SHRINKS_AFTER_S = 60.0
"""Seconds for which the fleet must have been smaller before the heartbeat interval and the lease become shorter."""
LEASE_MAX_S = 300.0
"""Longest lease in seconds that the coordinator believes if a peer reports which lease it was promised before, perhaps
by an earlier process of the coordinator."""
MOST_LOAD_FACTOR = 8.0
"""Largest load factor: peers are then asked for an eighth of the usual number of calls."""
CALLS_PER_S = 2600.0
"""Number of calls per second that a coordinator can answer promptly on one core: see benchmarks/README.md."""
SNAPSHOT_CALLS = 3.0
"""Cost of storing a snapshot, as a number of heartbeats: it takes a gRPC stream, a part of a commit, and time of the
writing thread."""
SNAPSHOT_BYTES_PER_S = 32 << 20
"""Largest rate at which the whole fleet sends snapshots, in bytes per second, without the first snapshot of each slot.
10,000 snapshots of 76 kB take 23 s."""
SNAPSHOT_SLOT_BYTES_PER_S = 4 << 20
SNAPSHOTS_PER_S = 400.0
"""Largest number of snapshots per second of the whole fleet. Small snapshots cost the coordinator one call each,
however few bytes they have."""
SNAPSHOTS_LEAST_PER_S = 50.0
"""Number of snapshots per second that is always allowed, however many heartbeats the coordinator receives."""
SNAPSHOT_EVERY_S = 1.0
"""Shortest interval between snapshots of one slot in seconds, however small the fleet."""


@dataclass(frozen=True)
class LeasePolicy:
    """Heartbeat interval and lease of one kind of peer."""

    heartbeat_s: float
    """Longest time between two calls of a peer, in seconds: it calls this often if it has nothing to report."""
    lease_s: float
    """Seconds of silence after which a peer counts as dead."""

    def promised(self, known_s: float, longest_s: float) -> float:
        """Return the length of the lease, in seconds, to promise to a peer now: at least that of this policy.
        `known_s`: length that the peer was promised before; `longest_s`: upper limit for `known_s`."""
        return max(self.lease_s, min(known_s, longest_s))

    def left(self, now: float, name: str) -> float:
        """Return the seconds until the long poll of the peer `name` is answered even without news; always above 0. This
        moment in the heartbeat interval is derived from the name, so that the polls of a fleet are spread over it."""
        digest = blake2b(name.encode(), digest_size=4).digest()
        moment = int.from_bytes(digest) / (1 << 32) * self.heartbeat_s
        return self.heartbeat_s - (now - moment) % self.heartbeat_s


@dataclass(frozen=True)
class SnapshotShare:
    """Quota of durable snapshots of one slot: the shortest time between two of them in seconds, and the largest rate in
    bytes per second. The first snapshot of a slot is exempt, because the slot needs it to start."""

    every_s: float
    bytes_per_s: float


def _lease_policy(lease_s: float, peers: int, calls_per_s: float) -> LeasePolicy:
    heartbeat_s = max(min(HEARTBEAT_S, lease_s * HOLD_SHARE), peers / calls_per_s)
    return LeasePolicy(heartbeat_s, max(lease_s, heartbeat_s / HOLD_SHARE))


def of_workers(workers: int, load_factor: float, lease_s: float) -> LeasePolicy:
    return _lease_policy(lease_s, workers, HEARTBEATS_PER_S / load_factor)


def of_boxes(boxes: int, load_factor: float, lease_s: float) -> LeasePolicy:
    return _lease_policy(lease_s, boxes, WATCHES_PER_S / load_factor)


def updated_load_factor(load_factor: float, gap_s: float, tick_s: float) -> float:
    """Return the new load factor, which divides the number of calls per second that peers may make. `gap_s`: seconds
    since the last tick, or since the last call known to have been received, whichever is longer.

    The factor rises fast: by half with each tick that is late by more than its period. It falls slowly: by half in 35
    ticks (10 s).
    """
    if gap_s > 2 * tick_s:
        return min(MOST_LOAD_FACTOR, load_factor * 1.5)
    return max(1.0, load_factor * 0.98)


def patience_s(load_factor: float, lease_s: float, unreceived_s: float = 0.0) -> float:
    """Return the seconds by which the lease of a silent peer is extended while the coordinator is overloaded: up to the
    length of a lease, or the age of calls that are still queued.

    A load factor above 1 says that the coordinator is late. Then it cannot distinguish a silent peer from its own
    delay: the peer's call may be queued, or the peer may be on the same machine and as late as the coordinator.
    """
    return max(lease_s * min(1.0, load_factor - 1.0), unreceived_s if load_factor > 1.0 else 0.0)


class PromisedLease:
    """Longest promised lease that a peer of one kind (worker or client) may still rely on. The journal keeps it for the
    next process of the coordinator.

    The recorded value has a margin, so that a growing fleet seldom causes a write. The value is lowered when it is
    older than the lease itself. By then every peer that was promised this lease has a newer promise, or has lost its
    lease.
    """

    MARGIN = 1.25

    def __init__(self, journal: Journal, name: str, shortest_s: float, now: float) -> None:
        self._journal = journal
        self._name = name
        self._shortest_s = shortest_s
        noted = journal.noted(name, "0")
        try:
            self.lease_s = max(shortest_s, float(noted))
        except ValueError as error:
            raise JournalError(
                f"{journal.name} is damaged: its value {name} must be a number, got {noted!r}. Restore a copy of "
                "the file, or move the file away to start anew"
            ) from error
        self._since = now

    def keep(self, lease_s: float, now: float) -> None:
        """Record that `lease_s` is about to be promised to a peer."""
        if lease_s > self.lease_s:
            self._note(lease_s * self.MARGIN, now)
        elif lease_s * self.MARGIN >= self.lease_s:
            self._since = now

    def shorten(self, lease_s: float, now: float) -> None:
        """Lower the recorded lease once no peer can hold a longer one. `lease_s`: lease that is promised at present, in
        seconds."""
        if lease_s * self.MARGIN < self.lease_s and now - self._since > self.lease_s:
            self._note(max(lease_s, self._shortest_s), now)

    def _note(self, lease_s: float, now: float) -> None:
        self.lease_s, self._since = lease_s, now
        self._journal.note(self._name, repr(lease_s))


def share(slots: int, calls_per_s: float) -> SnapshotShare:
    """Return the quota of durable snapshots of each slot. Snapshots get the calls per second that heartbeats and
    WatchRun calls leave. So a busy fleet has more batches to make again after a fault, but its heartbeats are not
    received late.

    Args:
        slots: number of slots that workers have.
        calls_per_s: number of heartbeats and WatchRun calls per second.
    """
    count = max(1, slots)
    each = min(SNAPSHOT_SLOT_BYTES_PER_S, SNAPSHOT_BYTES_PER_S / count)
    left = (CALLS_PER_S - calls_per_s) / SNAPSHOT_CALLS
    per_s = max(SNAPSHOTS_LEAST_PER_S, min(SNAPSHOTS_PER_S, left))
    return SnapshotShare(max(SNAPSHOT_EVERY_S, count / per_s), each)
