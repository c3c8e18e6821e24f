"""Limits of the coordinator, each with the reason for its value. Times are in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.proto.rpc.bounds.reply_parts import VALUE_MAX

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class RateLimits:
    """Limits on calls that make the coordinator store something new: registrations of workers and openings of runs.
    Each call costs up to a millisecond, so a peer that repeats it in a loop by mistake would delay the others'
    heartbeats. The burst sizes let a whole fleet register again at once after a restart."""

    peer_per_s: float = 200.0
    peer_burst: int = 12_000
    """Largest burst of calls from one address. Many machines may share an address behind a proxy."""
    all_per_s: float = 1_000.0
    all_burst: int = 24_000
    peers_max: int = 4096
    """Largest number of addresses of callers whose rates are kept in memory."""


@dataclass(frozen=True)
class Limits:
    """All limits of a coordinator. Frozen: a coordinator runs with one set; tests make their own."""

    worker_lease_s: float = 3.0
    """Silence after which a worker counts as dead. The daemon runs no user code and reports three times per lease, so
    this much silence means that the worker is dead, stopped or cut off. The lease grows with the fleet: see
    lease_policy.py."""
    hung_up_s: float = 1.5
    """Remaining lease of a worker whose connection ends during a heartbeat, in seconds. Its process has probably died;
    a worker that only lost the connection is back within half a second. If a large fleet makes the lease n times as
    long, this time is n times as long too."""
    client_lease_s: float = 10.0
    """Lease of a training process. It is longer than a worker's lease, because user code may hold the GIL for seconds
    (a compile, a large pickle). The process cannot report meanwhile."""
    return_s: float = 25.0
    """Shortest lease of every peer that is in the journal when a coordinator starts on another host. Peers get no
    signal that the old host is down: they notice it by pings that fail (channel.py), give up the connection, and only
    then resolve the coordinator's name again."""
    unreachable_s: float = 600.0
    """Time for which a box's slots are not placed on a worker that the box could not reach, as long as other workers
    have capacity."""
    unreachable_again_s: float = 10.0
    """Time after which a worker that a box could not reach is tried again, if the box can reach no other worker. The
    network may have recovered."""
    unreachable_max: int = 8
    """Largest number of workers that the reports of one box can mark as unreachable within `unreachable_per_s`
    seconds."""
    unreachable_per_s: float = 60.0
    hold_share: float = 1 / 3
    """Longest time for which a long poll (a call that is answered at the next change) is held, as a share of the lease:
    a peer may lose two polls in a row without harm."""
    heartbeat_s: float = 1.0
    """Heartbeat interval in a small fleet. The figures in `penstock status` are at most this old."""
    heartbeats_per_s: float = 2000.0
    """Largest number of heartbeats per second of the whole fleet: above 2,000 workers the heartbeat interval and the
    lease grow. benchmarks/README.md has the cost of a call."""
    watches_per_s: float = 200.0
    """Largest rate of WatchRun calls of all boxes: above 200 boxes their interval grows, above 660 their lease."""
    shrinks_after_s: float = 60.0
    """Time for which the fleet must have been smaller before the heartbeat interval and the lease become shorter."""
    lease_max_s: float = 300.0
    """Longest lease in seconds that the coordinator believes if a peer reports which lease it was promised before,
    perhaps by an earlier process of the coordinator."""
    stall_s: float = 1.0
    """Delay of the coordinator's own timer, in seconds, above which the coordinator counts as having been stopped. A
    stopped coordinator receives no calls, so it extends every lease by the whole delay. After a shorter delay it
    extends every lease by the part above two periods of the timer (`tick_s`). An overloaded coordinator waits for
    longer, for up to two leases of silence or more: see lease_policy.patience_s."""
    linger_s: float = 60.0
    """Time that a closed box keeps its workers while other boxes of the run are open. A rank that saves after its last
    step needs the states of the boxes that closed before it."""
    abandoned_s: float = 3600.0
    """Seconds after which an attempt without a live box is closed and its snapshots are dropped. Until then its boxes
    may come back."""

    target_ready_s: float = 300.0
    """Longest time for a migration target to become ready. A target may have to import torch and read the index of a
    dataset. Meanwhile the slot runs on its present worker."""
    migration_s: float = 15.0
    """Longest time for a ready migration target to replay to where the training loop is, and for the present worker to
    make the snapshot durable that this needs. After this time the slot migrates, and the loop waits for the rest."""
    left_alone_s: float = 30.0
    """Time after a failed migration in which balance does not move the slot again. A slot whose worker drains may go to
    another worker meanwhile, but not to one that failed to get ready for it or that its box cannot reach."""
    balance_after_s: float = 30.0
    """Time that a slot stays on its worker before balance may move the slot; 0 = balance never moves a slot. After this
    time the measured waits of the loop are mostly those with the slot's present worker. A move itself takes about a
    second."""
    balance_every_s: float = 5.0
    """Time between two checks whether slots should move to other workers."""

    losses: int = 3
    loss_window_s: float = 60.0
    """Window in seconds in which a slot may lose its runner at most `losses` times without a batch delivered in
    between. A reboot or a preempted node causes fewer losses; a poison batch causes more."""

    budget: int = 4 * GIB
    """Largest number of bytes of snapshots and blobs on disk."""
    replay_share: float = 0.9
    """Share of `budget` that is open to snapshots whose only use is a shorter replay. The rest is reserved for the
    first snapshot of each slot and for saved states, without which no run can start."""
    value_max: int = VALUE_MAX
    """Largest snapshot, blob or state, in bytes. SQLite's own limit on a value is 1,000,000,000 bytes."""
    transfers_max: int = 64 * MIB
    """Largest number of bytes in memory of received snapshots that wait to be written. The same limit holds for blobs.
    Half of it is reserved for small values."""
    part_s: float = 30.0
    """Longest time between two parts of a snapshot or blob in transfer. A part has at most 512 KiB."""
    least_bytes_per_s: int = MIB
    """Lowest average rate of a transfer of a snapshot or blob, after a grace of `part_s` seconds. A slower transfer
    delays others that wait for memory: a blob of 70 MB sent at a byte in 10 s kept every job from starting."""
    blob_share: float = 0.9
    """Share of the budget that blobs may use. The rest is reserved for snapshots, without which no run can start."""
    blob_token_share: float = 0.6
    """Share of the budget that the blobs of one credential token may use, if the coordinator has several tokens."""
    reads_max: int = 128 * MIB
    """Largest number of bytes of snapshots and blobs in memory that are being sent to readers. Half of it is reserved
    for small values."""
    blob_idle_s: float = 3600.0
    """Age at which a blob is dropped if no open attempt uses it. Boxes send blobs before they open the run."""
    snapshot_bytes_per_s: float = 32 * MIB
    """Largest rate at which the whole fleet sends snapshots, in bytes per second, without the first snapshot of each
    slot. 10,000 snapshots of 76 kB take 23 s."""
    snapshots_per_s: float = 400.0
    """Largest number of snapshots per second of the whole fleet. Small snapshots cost the coordinator one call each,
    however few bytes they have."""
    snapshots_least_per_s: float = 50.0
    """Number of snapshots per second that is always allowed, however many heartbeats the coordinator receives."""
    calls_per_s: float = 2600.0
    """Number of calls per second that a coordinator can answer promptly on one core: see benchmarks/README.md."""
    snapshot_slot_bytes_per_s: float = 4 * MIB
    snapshot_every_s: float = 1.0
    """Shortest interval between snapshots of one slot, however small the fleet."""
    answers_max: int = 256 * MIB
    """Largest number of bytes in memory of answers to state queries: answers to be sent, and answers kept for other
    ranks that request the same step. When it is reached, each query may still take the answers of one more box."""
    asked_at_once: int = 1024
    """Largest number of slots whose states a query requests at the same time. A box with more slots is requested as a
    whole. gRPC itself may buffer 64 KiB of each incoming answer, and 10,000 answers at once would delay heartbeats."""

    closed_s: float = 7 * 86400.0
    """Time for which the last state of an ended run is kept: a week, so that it is still there after a weekend."""
    closed_bytes: int = 256 * MIB
    """Largest number of bytes on disk of the last states of all ended runs. They do not count in `budget`. The oldest
    states are dropped first."""
    closed_runs: int = 1000
    """Largest number of ended runs whose last states are kept."""
    json_max: int = 8 * MIB
    """Largest state of one slot that is sent as JSON, in bytes. Encoding it takes some 50 ms, in which heartbeats
    wait."""

    past_attempts: int = 16
    """Number of earlier attempts of a run that are remembered by number, key and clients, so that their late calls are
    refused."""
    registration_max: int = 16 * KIB
    """Largest registration of a worker, in bytes. It is kept in memory and is part of every status reply."""
    capabilities_max: int = 16 * KIB
    """Largest size of a slot's capabilities (what its loader can do), in bytes. They are kept in memory and in the
    journal."""
    past_sessions: int = 64
    """Number of replaced worker processes whose sessions (random names) are remembered, so that late calls of these
    processes are refused."""
    runs_max: int = 100_000
    """Largest number of runs in the journal, open or not. Each is kept for its seed and takes about 1 KB."""
    workers_max: int = 100_000
    """Largest number of workers that are registered at a time."""
    rate_limits: RateLimits = field(default_factory=lambda: RateLimits())
    """Limits on the rate of registrations of workers and openings of runs."""
    slots_max: int = 16_384
    """Largest number of slots of a run (boxes times workers), and of all open runs of one credential token. The limit
    makes a mistyped number an error, and bounds the work at the end of an attempt, which takes up to 1 us per slot
    without a pause."""
    slots_open_max: int = 65_536
    """Largest number of slots of all open runs. Each slot takes some 5 KB."""
    box_slots_max: int = 256
    """Largest number of slots of a box. Opening the box, or sending its view, takes 20 us per slot, in which heartbeats
    wait."""
    worker_slots_max: int = 1024
    """Largest number of slots of a worker. Sending all slots to the worker, or draining or removing the worker, takes
    some 20 us per slot, in which heartbeats wait. Each slot is a process of its own, and no machine runs more
    processes of this kind."""
    slots_at_once: int = 1024
    """Number of slots that are placed, lost or failed without a pause, before other calls are served. Such a piece of
    work takes some 20 ms."""
    opening_max: int = 256 * KIB
    """Largest request to open a run, in bytes. The request is kept in memory and in the journal. Larger arguments are
    uploaded before the request as a blob, and then count in `budget`."""
    watches_max: int = 4
    """Largest number of long polls held for one box or one worker. A further poll makes the coordinator answer the
    oldest one at once: a peer that calls again has lost the connection of its earlier call."""
    queries_of_token_max: int = 1024
    """Largest number of state queries that one credential token may have open at a time, over all runs."""
    queries_max: int = 64
    """Number of open state queries that every run may have. A run may have two more for each of its boxes: 64 + 16 for
    a run of 8 boxes. Each query sends a request to all workers of the run."""
    abandoned_max: int = 1 << 19
    """Largest number of epochs that a box may abandon by `break` in one attempt."""
    abandoned_at_once: int = 4096
    """Largest number of abandoned epochs in one report. Writing this many to the journal takes 15 ms. A box reports an
    epoch again until the coordinator has confirmed it."""
    epoch_starts_at_once: int = 256
    """Largest number of epoch starts in one report. A box reports each once, and all again after a restart of the
    coordinator."""
    ends_max: int = 1 << 20
    """Largest number of ends of epochs kept for a box. An end that is older than the retained steps is dropped, so this
    limit matters only if `retention_steps` is unlimited."""
    answer_ends_max: int = 4096
    """Largest number of ends of epochs in a worker's answer to a state request. A worker remembers 1,024."""
    history_entries: int = 64
    """Approximate number of reported positions kept per box, spread over its last `retention_steps` steps. States at
    these steps are computed from them, and snapshots before the first one are dropped."""

    @property
    def tick_s(self) -> float:
        """Time between two checks whether leases have ended."""
        return min(self.worker_lease_s, self.client_lease_s) / TICK_SHARE


MEMORY_BUDGET = 512 * MIB
"""Value of `budget` for a coordinator that keeps its cluster state in memory (embedded mode)."""
TICK_SHARE = 10
"""Number of checks of the leases within one lease."""
STOP_GRACE_S = 1.0
"""Longest time for calls under way to end when the coordinator stops."""
