"""Lease policy: the heartbeat interval, the length of leases, and each slot's quota of durable snapshots.

In a small fleet a death is noticed within seconds. In a large one the number of calls per second stays constant, and
the interval and the lease grow: 10,000 workers at 2,000 heartbeats a second have an interval of 5 s and a lease of 15
s. While the coordinator's own timer is late, it asks for fewer calls; otherwise it would take live workers for dead.

A peer reports with each call the lease that it was promised, and gets the longer of that and the present one. So the
promise also holds after restarts and lost replies. Long polls that were answered together would stay synchronised, so
each peer has its own moment within the interval, derived from its name.

`StateMachine.tick` decides that a peer is dead. Pure, except that promised leases are recorded in the journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from penstock.appliance.journal.database import damaged
from penstock.appliance.journal.journal import Journal

HOLD_SHARE = 1 / 3
"""Longest hold of a long poll, as a share of the lease: a peer may lose two polls in a row."""
HEARTBEAT_S = 1.0
"""Heartbeat interval in a small fleet, in seconds; figures in `penstock status` are at most this old."""
HEARTBEATS_PER_S = 2000.0
"""Most heartbeats per second of the fleet: above 2,000 workers interval and lease grow (cost: benchmarks/README.md)."""
WATCHES_PER_S = 200.0
"""Most WatchRun calls per second: above 200 boxes their interval grows, above 660 their lease."""
SHRINKS_AFTER_S = 60.0
"""Seconds for which the fleet must have been smaller before interval and lease get shorter."""
LEASE_MAX_S = 300.0
"""Longest lease in seconds that the coordinator believes from a peer, perhaps promised by an earlier process."""
MOST_LOAD_FACTOR = 8.0
"""Largest load factor: peers then make an eighth of the usual calls."""
CALLS_PER_S = 2600.0
"""Calls per second that a coordinator answers promptly on one core (benchmarks/README.md)."""
SNAPSHOT_CALLS = 3.0
"""Cost of storing a snapshot in heartbeats: a gRPC stream, part of a commit, time of the writing thread."""
SNAPSHOT_BYTES_PER_S = 32 << 20
"""Most bytes of snapshots per second of the fleet, without each slot's first: 10,000 of 76 kB take 23 s."""
SNAPSHOT_SLOT_BYTES_PER_S = 4 << 20
SNAPSHOTS_PER_S = 400.0
"""Most snapshots per second of the fleet: small ones cost a call each, however few bytes they have."""
SNAPSHOTS_LEAST_PER_S = 50.0
"""Snapshots per second that are always allowed, whatever the heartbeats."""
SNAPSHOT_EVERY_S = 1.0
"""Shortest interval between snapshots of one slot in seconds, however small the fleet."""


@dataclass(frozen=True)
class LeasePolicy:
    """Heartbeat interval and lease of one kind of peer."""

    heartbeat_s: float
    """Longest time between two calls of a peer, in seconds."""
    lease_s: float
    """Seconds of silence after which a peer counts as dead."""
    idle_s: float
    """Longest time between two calls of a peer that has nothing new to say, in seconds."""

    def promised(self, known_s: float, longest_s: float) -> float:
        """Return the lease in seconds to promise now. `known_s`: promised before, believed up to `longest_s`."""
        return max(self.lease_s, min(known_s, longest_s))

    def left(self, now: float, name: str, *, is_idle: bool) -> float:
        """Return the seconds, above 0, until the peer's poll is answered without news, spread by its name."""
        if is_idle and self.idle_s > self.heartbeat_s:
            return self.idle_s
        digest = blake2b(name.encode(), digest_size=4).digest()
        moment = int.from_bytes(digest) / (1 << 32) * self.heartbeat_s
        return self.heartbeat_s - (now - moment) % self.heartbeat_s


@dataclass(frozen=True)
class SnapshotShare:
    """Quota of durable snapshots of one slot: shortest interval in seconds, and bytes per second. The first snapshot
    is exempt, because the slot needs it to start."""

    every_s: float
    bytes_per_s: float


def lease_policy(lease_s: float, peers: int, calls_per_s: float, idle_s: float = HEARTBEAT_S) -> LeasePolicy:
    heartbeat_s = max(min(HEARTBEAT_S, lease_s * HOLD_SHARE), peers / calls_per_s)
    lease_s = max(lease_s, heartbeat_s / HOLD_SHARE)
    return LeasePolicy(heartbeat_s, lease_s, max(heartbeat_s, min(idle_s, lease_s * HOLD_SHARE)))


def updated_load_factor(load_factor: float, gap_s: float, tick_s: float) -> float:
    """Return the new divisor of the calls that peers may make: it rises by half with each late tick, and falls by half
    in 35 ticks (10 s). `gap_s`: seconds since the last tick or received call, whichever is longer."""
    if gap_s > 2 * tick_s:
        return min(MOST_LOAD_FACTOR, load_factor * 1.5)
    return max(1.0, load_factor * 0.98)


def patience_s(load_factor: float, lease_s: float, unreceived_s: float = 0.0) -> float:
    """Return the seconds by which a silent peer's lease is extended: up to a lease, or the age of queued calls. An
    overloaded coordinator cannot distinguish silence from its own delay: the call may be queued, or the peer late
    on the same machine."""
    return max(lease_s * min(1.0, load_factor - 1.0), unreceived_s if load_factor > 1.0 else 0.0)


class PromisedLease:
    """Longest promised lease that a peer of one kind may still rely on, in the journal for the next process. It has a
    margin, so that a growing fleet seldom causes a write, and is lowered once it is older than the lease itself: by
    then every peer has a newer promise."""

    MARGIN = 1.25

    def __init__(self, journal: Journal, name: str, shortest_s: float, now: float) -> None:
        self._journal = journal
        self._name = name
        self._shortest_s = shortest_s
        noted = journal.noted(name, "0")
        try:
            self.lease_s = max(shortest_s, float(noted))
        except ValueError as error:
            raise damaged(journal.name, f"its value {name} must be a number, got {noted!r}") from error
        self._since = now

    def keep(self, lease_s: float, now: float) -> None:
        """Record that `lease_s` is about to be promised to a peer."""
        if lease_s > self.lease_s:
            self._note(lease_s * self.MARGIN, now)
        elif lease_s * self.MARGIN >= self.lease_s:
            self._since = now

    def shorten(self, lease_s: float, now: float) -> None:
        """Lower the recorded lease once no peer can hold a longer one than `lease_s`."""
        if lease_s * self.MARGIN < self.lease_s and now - self._since > self.lease_s:
            self._note(max(lease_s, self._shortest_s), now)

    def _note(self, lease_s: float, now: float) -> None:
        self.lease_s, self._since = lease_s, now
        self._journal.note(self._name, repr(lease_s))


def share(slots: int, calls_per_s: float) -> SnapshotShare:
    """Return each slot's quota: snapshots get the calls per second that heartbeats and WatchRun calls leave, so that
    heartbeats of a busy fleet are received in time."""
    count = max(1, slots)
    each = min(SNAPSHOT_SLOT_BYTES_PER_S, SNAPSHOT_BYTES_PER_S / count)
    left = (CALLS_PER_S - calls_per_s) / SNAPSHOT_CALLS
    per_s = max(SNAPSHOTS_LEAST_PER_S, min(SNAPSHOTS_PER_S, left))
    return SnapshotShare(max(SNAPSHOT_EVERY_S, count / per_s), each)
