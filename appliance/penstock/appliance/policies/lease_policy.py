"""How often everybody speaks: the beat, the lease that goes with it, and the share of each slot in the snapshots.

A small fleet beats as often as its leases ask for, so that a death is seen within seconds. A call costs a coordinator
a fixed time, so from some size on it is the number of calls a second that is kept, and beat and lease grow with the
fleet: 10,000 workers at 2,000 heartbeats a second are one beat every 5 s and a lease of 15 s. The same for boxes and
their watches, and for snapshots, which have a budget in calls and one in bytes a second.

What a call costs depends on what else the machine does. So the coordinator notes how late it is with its own timer,
and asks a large fleet for fewer calls while it is: one that was asked for more than it can hear would lose its workers
by its own doing.

A lease is promised to a peer by what the coordinator told it last, which may be more than the fleet asks for now. So
the peer says with each call which lease it knows, and gets the longer of the two. That needs no memory, and holds over
restarts and for replies that were lost.

Polls that were answered together, at the start of a job or after a restart, would end together ever after. So each peer
has a moment of its own within the beat, by its name, and a poll is held until then.

Pure, but for the note of a promise in the journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from penstock.appliance.model.limits import Limits
from penstock.appliance.storage.journal import Journal
from penstock.proto.errors import JournalError


@dataclass(frozen=True)
class LeasePolicy:
    heartbeat_s: float
    """Between two calls of one peer that has nothing to say."""
    lease_s: float
    """Silence after which it is taken for dead."""

    def promised(self, known_s: float, longest_s: float) -> float:
        """The lease of a peer that was told `known_s` at its last call."""
        return max(self.lease_s, min(known_s, longest_s))

    def left(self, now: float, name: str) -> float:
        """Seconds until the peer's own moment in the beat, more than none."""
        digest = blake2b(name.encode(), digest_size=4).digest()
        moment = int.from_bytes(digest) / (1 << 32) * self.heartbeat_s
        return self.heartbeat_s - (now - moment) % self.heartbeat_s


@dataclass(frozen=True)
class SnapshotShare:
    """Of one slot, in what the fleet may send. Its first snapshot, without which it cannot start, is exempt."""

    every_s: float
    bytes_per_s: float


def _lease_policy(lease_s: float, peers: int, calls_per_s: float, limits: Limits) -> LeasePolicy:
    heartbeat_s = max(min(limits.heartbeat_s, lease_s * limits.hold_share), peers / calls_per_s)
    return LeasePolicy(heartbeat_s, max(lease_s, heartbeat_s / limits.hold_share))


def of_workers(workers: int, strain: float, limits: Limits) -> LeasePolicy:
    return _lease_policy(limits.worker_lease_s, workers, limits.heartbeats_per_s / strain, limits)


def of_boxes(boxes: int, strain: float, limits: Limits) -> LeasePolicy:
    return _lease_policy(limits.client_lease_s, boxes, limits.watches_per_s / strain, limits)


MOST_STRAIN = 8.0


def updated_strain(strain: float, gap_s: float, tick_s: float) -> float:
    """How much fewer calls are asked for, after a tick that came `gap_s` after the last one, or that knows of nothing
    that came later than `gap_s` ago.

    Up fast, by half with each tick that came late by more than its period, and down slowly, by half in 35 ticks (10 s).
    """
    if gap_s > 2 * tick_s:
        return min(MOST_STRAIN, strain * 1.5)
    return max(1.0, strain * 0.98)


def patience_s(strain: float, lease_s: float, unheard_s: float = 0.0) -> float:
    """Seconds that a silent peer has beyond its lease: up to another lease, or what has not been heard yet.

    A coordinator that is late cannot tell silence from its own deafness: what it has not got to yet may be the very
    call that it waits for, and others of its machine may be as late as it is. It is late where strain is above 1.
    """
    return max(lease_s * min(1.0, strain - 1.0), unheard_s if strain > 1.0 else 0.0)


class PromisedLease:
    """The longest lease of a kind that a peer may still go by, noted where the next coordinator finds it.

    It is noted with some room above, so that a fleet that grows costs a write now and then. It is taken back once it
    is older than itself: whoever knew it has been told another one since, or has lost it.
    """

    ROOM = 1.25

    def __init__(self, journal: Journal, name: str, shortest_s: float, now: float) -> None:
        self._journal = journal
        self._name = name
        self._shortest_s = shortest_s
        noted = journal.noted(name, "0")
        try:
            self.lease_s = max(shortest_s, float(noted))
        except ValueError as error:
            raise JournalError(
                f"{journal.name} has {noted!r} as {name}, which is no number: restore it from a copy, or move it away "
                "to start anew"
            ) from error
        self._since = now

    def keep(self, lease_s: float, now: float) -> None:
        """A peer is about to be told this lease."""
        if lease_s > self.lease_s:
            self._note(lease_s * self.ROOM, now)
        elif lease_s * self.ROOM >= self.lease_s:
            self._since = now

    def take_back(self, lease_s: float, now: float) -> None:
        """`lease_s`: what peers are told now."""
        if lease_s * self.ROOM < self.lease_s and now - self._since > self.lease_s:
            self._note(max(lease_s, self._shortest_s), now)

    def _note(self, lease_s: float, now: float) -> None:
        self.lease_s, self._since = lease_s, now
        self._journal.note(self._name, repr(lease_s))


SNAPSHOT_CALLS = 3.0
"""What a snapshot costs, in heartbeats: a stream, its part of a commit, the thread that writes."""


def share(slots: int, calls_per_s: float, limits: Limits) -> SnapshotShare:
    """What is left of the coordinator's calls is for snapshots: a fleet that keeps it busy replays more after a fault
    rather than being heard late.

    Args:
        slots: those that workers have.
        calls_per_s: what heartbeats and watches take.
    """
    count = max(1, slots)
    each = min(limits.snapshot_slot_bytes_per_s, limits.snapshot_bytes_per_s / count)
    left = (limits.calls_per_s - calls_per_s) / SNAPSHOT_CALLS
    per_s = max(limits.snapshots_least_per_s, min(limits.snapshots_per_s, left))
    return SnapshotShare(max(limits.snapshot_every_s, count / per_s), each)
