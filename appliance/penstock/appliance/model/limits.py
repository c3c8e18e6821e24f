"""Every number of the coordinator that somebody chose, with the reason. Times are in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class RateLimits:
    """Of calls that make the coordinator remember something new: registrations of workers and openings of runs. Each
    costs it up to a millisecond, so a peer that does nothing else, by a mistake in a loop say, would starve the others'
    heartbeats. The bursts let a whole fleet come back at once after a restart."""

    peer_per_s: float = 200.0
    peer_burst: int = 12_000
    """Of one address: it may be that of many machines, behind a proxy."""
    all_per_s: float = 1_000.0
    all_burst: int = 24_000
    peers_max: int = 4096
    """Addresses that are remembered."""


@dataclass(frozen=True)
class Limits:
    """Frozen: a coordinator runs with one set; tests make their own."""

    worker_lease_s: float = 3.0
    """A worker that was silent so long is taken for dead. The daemon runs no user code and reports three times a lease,
    so this much silence means that it is gone, stopped or cut off. In a large fleet it is longer: see
    lease_policy.py."""
    hung_up_s: float = 1.5
    """What is left of a worker's lease when its connection ends in the middle of a heartbeat. A process that dies is
    known by that at once; one whose connection was cut alone is back within half a second. It grows with the lease."""
    client_lease_s: float = 10.0
    """A training process may hold the GIL for seconds (a compile, a large pickle), which stops its reporting thread."""
    return_s: float = 25.0
    """The leases of all that the journal knows, at least, after a start on another host than the last one's. Nobody
    told peers that the old one is gone: they find out by pings, after 15 s (channel.py), and a connection that does not
    come about is given up after 5 s more; only then do they look up the name again."""
    unreachable_s: float = 600.0
    """A box's slots are kept from a worker that it could not reach for so long, as long as others have room."""
    unreachable_again_s: float = 10.0
    """Where all others are out of its reach too, one of them is tried again after so long: networks heal."""
    unreachable_max: int = 8
    """Workers that a box is believed not to reach within `unreachable_per_s`."""
    unreachable_per_s: float = 60.0
    hold_share: float = 1 / 3
    """A long poll is answered after this share of the lease at the latest, so that two may be lost unharmed."""
    heartbeat_s: float = 1.0
    """Between two calls of a peer with nothing to say, in a small fleet: so old may be what `penstock status` tells."""
    heartbeats_per_s: float = 2000.0
    """Of the whole fleet: above 2,000 workers beat and lease grow. See docs/benchmarks.md for what a call costs."""
    watches_per_s: float = 200.0
    """Of all boxes: above 200 their beat grows, above 660 their lease."""
    shrinks_after_s: float = 60.0
    """The pace follows a fleet that has become smaller after so long."""
    lease_max_s: float = 300.0
    """The longest lease that a peer can say it was told."""
    stall_s: float = 1.0
    """A coordinator that was itself stopped for longer extends every lease by the gap: it has heard nobody, and that
    says nothing about them. One that is only late, because there is more to do than it can, extends them by that: what
    it has not got to yet may be the very call that it waits for. Nobody is lost to such a one for silence of less than
    two leases: see pace.patience_s."""
    linger_s: float = 60.0
    """A closed box keeps its workers so long while others are open: a rank that saves after its last step still gets
    the state of those that left before it."""
    abandoned_s: float = 3600.0
    """An attempt without a live box for so long is closed, and its snapshots go. Until then it may come back."""

    target_ready_s: float = 300.0
    """A worker that was asked to get ready for a slot may take so long: it may have to import torch and read the index
    of a dataset. The slot goes on where it is meanwhile."""
    migration_s: float = 5.0
    """The slot's worker may take so long to make durable what a successor that is ready needs."""
    left_alone_s: float = 30.0
    """A slot whose hand-over failed is left where it is for so long."""
    balance_after_s: float = 30.0
    """A slot stays so long where it is before it is moved for the sake of balance; 0 = it is never. Also how long ago
    counts for what loops waited for. Long against a move, which costs a second or so."""
    balance_every_s: float = 5.0
    """Between two looks at the balance."""

    losses: int = 3
    loss_window_s: float = 60.0
    """A slot may be lost so often within the window without a batch delivered in between. A machine that reboots or a
    preempted node stays below; a batch that kills its runner each time does not."""

    budget: int = 4 * GIB
    """Bytes of snapshots and blobs on disk."""
    cadence_share: float = 0.9
    """Snapshots that only save replay may fill this share of the budget; the rest is for the first one of a slot and
    for states to resume from, without which nothing can start."""
    value_max: int = 900_000_000
    """A single snapshot, blob or state. SQLite's own cap on a value is 1,000,000,000."""
    transfers_max: int = 64 * MIB
    """Bytes of snapshots, and as many of blobs, in memory on their way to the disk: half for small ones."""
    part_s: float = 30.0
    """Between two parts of such a value, of 512 KiB at most."""
    least_bytes_per_s: int = MIB
    """Of such a value on average, beyond `part_s`. One that is slower holds up those that wait for its room: 70 MB at a
    byte in 10 s kept every job from its start."""
    blob_share: float = 0.9
    """Blobs may fill this share of the budget: without a snapshot nothing can start."""
    blob_token_share: float = 0.6
    """Blobs that came with one token may fill this share of the budget, where tokens are told apart."""
    reads_max: int = 128 * MIB
    """Bytes of snapshots and blobs in memory on their way to readers: half for small ones."""
    blob_idle_s: float = 3600.0
    """A blob that no open attempt names is dropped so long after it came: boxes send it before they open."""
    snapshot_bytes_per_s: float = 32 * MIB
    """Of the whole fleet, beyond the first one of each slot. A round of 10,000 slots with 76 kB each takes 23 s."""
    snapshots_per_s: float = 400.0
    """Of the whole fleet: small ones cost the coordinator calls, not bytes."""
    snapshots_least_per_s: float = 50.0
    """However many heartbeats there are."""
    calls_per_s: float = 2600.0
    """That a coordinator can answer on one core and still be prompt: see docs/benchmarks.md."""
    snapshot_slot_bytes_per_s: float = 4 * MIB
    snapshot_every_s: float = 1.0
    """Of one slot, however small the fleet."""
    answers_max: int = 256 * MIB
    """Bytes of answers to state queries in memory: those that wait to be sent, and those kept for other ranks that ask
    for the same step. Where it is short, each query may still take the records of one box more."""
    asked_at_once: int = 1024
    """Slots that a state query asks at once, or one box if that has more: gRPC itself may hold 64 KiB of each answer
    that has begun to arrive, and 10,000 answers at once would keep heartbeats waiting."""

    closed_s: float = 7 * 86400.0
    """The last state of a run that has ended can be had for so long: over a weekend and the days around it."""
    closed_bytes: int = 256 * MIB
    """Of all these states on disk, beside the budget; the oldest go first."""
    closed_runs: int = 1000
    """Whose states are kept so."""
    json_max: int = 8 * MIB
    """Bytes of one worker's state that is asked for as JSON: to write them takes some 50 ms, in which heartbeats wait.
    """

    past_attempts: int = 16
    """Attempts of a run that are remembered by number, key and clients, so that a late call of one is refused."""
    registration_max: int = 16 * KIB
    """Bytes of a worker's registration, which is kept in memory and goes into every status."""
    capabilities_max: int = 16 * KIB
    """Bytes of what a worker tells of a slot's loader, which is kept in memory and in the journal."""
    past_sessions: int = 64
    """Sessions of workers that were replaced; a late call of one is refused."""
    runs_max: int = 100_000
    """Runs that the journal knows, open or not: each is kept for its seed, at about 1 KB."""
    workers_max: int = 100_000
    """Workers that are there at a time."""
    admissions: RateLimits = field(default_factory=lambda: RateLimits())
    """How fast workers may register and runs be opened."""
    slots_max: int = 16_384
    """Boxes times workers of a run, and of all runs that one token has open: a mistyped number should be an error, and
    what is done once for a whole attempt, when it ends or is superseded, takes up to 1 us for each."""
    slots_open_max: int = 65_536
    """Of all runs that are open. Each takes some 5 KB."""
    box_slots_max: int = 256
    """Workers of a box: to open it, and to tell its view, takes 20 us for each, in which heartbeats wait."""
    worker_slots_max: int = 4096
    """Slots of a worker: to tell it all of them takes 20 us for each."""
    slots_at_once: int = 1024
    """Slots that are placed, lost or failed in one go, before other calls have their turn: some 20 ms."""
    opening_max: int = 256 * KIB
    """Bytes of an opening, which is kept in memory and in the journal. Large arguments go ahead as a blob, and count in
    the budget."""
    watches_max: int = 4
    """Held answers to one box or one worker. One more, and the oldest is answered at once: who calls again has lost the
    connection of the one before."""
    queries_of_token_max: int = 1024
    """State queries that one token has open at a time, over all runs."""
    queries_max: int = 64
    """State queries of a run that are open at a time, and two more for each of its boxes: every one is a question to
    all workers of the run."""
    abandoned_max: int = 1 << 19
    """Passes that a box may leave by `break` in one attempt: as many as a report of them can hold."""
    ends_max: int = 1 << 20
    """Ends of epochs that are remembered of a box. They go with the retention window; this is for a window without one.
    """
    answer_ends_max: int = 4096
    """Ends of epochs in a worker's answer. It keeps 1,024."""
    history_entries: int = 64
    """Reported positions kept per box to know what lay one retention window ago."""

    @property
    def tick_s(self) -> float:
        """Between two looks at the leases."""
        return min(self.worker_lease_s, self.client_lease_s) / TICK_SHARE


MEMORY_BUDGET = 512 * MIB
"""The budget of a coordinator that keeps its cluster state in memory (embedded)."""
TICK_SHARE = 10
"""Leases are looked at so many times a lease."""
STOP_GRACE_S = 1.0
"""Calls under way when the coordinator stops may take so long to end."""
