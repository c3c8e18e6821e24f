"""Entities of the coordinator; the modules of core/ change them.

    run       one loader of a training job, over all its launches
    attempt   one launch of the job, as far as the run is concerned
    box       one data-parallel rank of the launch
    slot      one logical worker of a box, whatever process runs it
    worker    daemon that runs slots, each in a process called runner

A run has at most one open attempt. A slot has at most one worker, under a generation that rises each time it moves;
calls for an older attempt or generation are refused. A new number is in the journal before any peer receives it.
Leases and progress are not: after a restart every peer has a full new lease, and reports its position.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from penstock.appliance.core.gauges import HALF_S, BoxWaits, SlotGauge
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.errors import SupersededError, UnknownRunError
from penstock.proto.state.allowed_modules import module_of, under
from penstock.proto.state.epoch_labels import labels_in
from penstock.proto.state.position import Position
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.units import topology

ASSIGNMENTS_MAX = 10 << 20
"""Total bytes of a worker's assignments from which on it gets no more slots. A heartbeat reply contains them all, and
a worker whose reply is above channel.REPLY_MAX would lose its lease. 1,024 slots of 10 KiB take 35 ms."""

ASSIGNMENT_BYTES = 256
"""Estimated bytes of the small fields of an assignment; the large ones (loader, saved state, position) are measured."""


UNNAMED_LANE_PROTOCOL = 8
"""Lane protocol of the training jobs and workers that do not name theirs: the last one of the releases that did not."""


class AttemptState(Enum):
    OPEN = "open"
    SUPERSEDED = "superseded"
    ENDED = "ended"


class BoxPresence(Enum):
    """State of the training process that opened the box."""

    LIVE = "live"
    GONE = "gone"  # the lease ran out; the same client may come back until the next attempt opens
    CLOSED = "closed"


@dataclass(frozen=True)
class SlotLoss:
    at: float
    """Monotonic seconds."""
    worker: str
    note: str
    delivered: int
    """Number of the slot's batches known as delivered then; if it is higher later, the slot has made progress."""
    making: records_pb2.Skip | None = None
    """Position of the batch that the runner was making; None if none, or not known."""


@dataclass
class MigrationTarget:
    """Worker that prepares to take over a slot (migration.py)."""

    worker: str
    session: str
    generation: int
    why: str
    since: float
    ready_at: float = 0.0
    """Monotonic time when it became ready; 0 = not yet."""
    delivered: int | None = None
    """Slot's batches that the loop had taken when the target could begin to replay; None = it cannot yet."""
    loop_waits: bool = False
    """True if the loop takes batches about as fast as the slot makes them."""
    replayed: int | None = None
    """Number of the slot's last batch that the target has replayed; None = it still replays."""
    capabilities: records_pb2.LoaderCapabilities | None = None


@dataclass
class Slot:
    """Logical worker of a box, and the worker daemon that runs it."""

    key: SlotKey
    generation: int
    phase: pb.SlotPhase.ValueType = pb.WAITING
    worker: str = ""
    session: str = ""
    """Session of the slot's worker: a random name of its process, by which a restarted coordinator recognises it."""
    ever_ready: bool = False
    recovery: bool = False
    restarts: int = 0
    note: str = ""
    capabilities: records_pb2.LoaderCapabilities | None = None
    error: records_pb2.ErrorDetail | None = None
    losses: list[SlotLoss] = field(default_factory=list)
    target: MigrationTarget | None = None
    reserved: int = 0
    """Highest generation reserved for a migration target; in the journal, so that none is used twice."""
    moved_at: float = 0.0
    """Monotonic time when the present runner became ready or took over, or was found in the journal."""
    left_alone_until: float = 0.0
    """Monotonic time until which balance leaves the slot alone, after a failed migration."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Worker that failed to get ready as migration target -> its session at that time."""
    migrated: bool = False
    """True if the last move was planned: a migration, or a change of the mixture."""
    remade: list[tuple[int, int]] = field(default_factory=list)
    """For each change of the mixture: the first generation that knows it, and the last batch before it. A later
    snapshot of an older generation is invalid. Empty after a restart; then the loader refuses it."""
    was_slow_at: frozenset[str] = frozenset()
    """Workers from which the slot was moved because it was a straggler there."""
    batches_per_s: float = 0.0
    batch_s: float = 0.0
    """Seconds of work per batch; 0 = not known."""
    batch_cpu_s: float = 0.0
    """Seconds of processor time per batch; 0 = not known."""
    batch_delay_s: float = 0.0
    """Seconds per batch, within `batch_s`, of waiting for a processor."""
    doing: str = ""
    """Activity of the runner, if it lasts unusually long; else ""."""
    start_queue_position: tuple[int, int] = (0, 0)
    """Place in the worker's start queue, from 1, and the queue's length; (0, 0) = not in it."""
    start_stage: int = 0
    """StartStage of the runner's start; a newer worker may report an unknown one."""
    stack: str = ""
    """Python stack of the runner while `doing` is set, else of the one that was lost last; "" if not known, after a
    planned move, or after a stall that has ended."""
    outgrown: int = 0
    """Generation replaced last for too much memory before its second batch, else 0. If the next does so too, the slot
    fails."""
    spares_memory: bool = False
    """True once a runner used too much memory: the next ones replay as little as possible."""
    skips: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, total) -> batches to skip after batch `total`, also those from before the state that was resumed."""
    skipped: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, total) -> batches skipped after batch `total` in the present attempt alone."""
    firsts: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, the slot's batches before it) -> digest of the epoch's first batch, as made by runners that the slot has
    left; the next runner must make the same. Empty after a restart of the coordinator."""
    gauge: SlotGauge = field(default_factory=SlotGauge)
    worked_s: float = 0.0
    """Seconds of work since the position where the loader was started, and so of a replay; 0 = not known."""

    def unfit_at(self, workers: Mapping[str, Worker]) -> set[str]:
        """Return those of `workers` that failed to prepare for the slot and were not restarted since."""
        return {name for name, session in self.unfit.items() if name in workers and workers[name].session == session}

    def is_outdated(self, generation: int, total: int) -> bool:
        """Return whether a change of the mixture makes the snapshot invalid: a later batch, without knowing it."""
        return any(generation < first and total > last for first, last in self.remade)

    def is_migrating_to(self, worker: str, generation: int) -> bool:
        target = self.target
        return target is not None and (target.worker, target.generation) == (worker, generation)

    @property
    def next_generation(self) -> int:
        return max(self.generation, self.reserved) + 1

    def __str__(self) -> str:
        return f"box {self.key.box} slot {self.key.slot}"


@dataclass
class Box:
    number: int
    client: str
    """Digest of the secret of the client that holds the box: `client_of`."""
    opening: pb.OpenRunRequest
    """Request that opened the box, without its client_id."""
    start: Position
    """Position when the attempt opened."""
    presence: BoxPresence
    lease_until: float
    version: int
    slots: list[Slot] = field(default_factory=list)
    credential: str = ""
    """Name or digest of the credential token that opened the box; "" if an older release stored the box."""
    working: bool = False
    """True from when all its slots got workers until it gives them back: it then counts in the credential's budget."""

    delivered: records_pb2.BoxPosition = field(default_factory=records_pb2.BoxPosition)
    """Position in the client's newest report; empty before the first."""
    reported: bool = True
    """False after a restart until the client has reported the starts of its epochs again; until then the position and
    abandoned epochs may be out of date."""
    restored: bool = False
    """True if restored from the journal: `history` then begins at the attempt's start, although workers may have
    dropped the snapshots of steps that are more than `retention` old."""
    earlier: tuple[records_pb2.BoxPosition, ...] = ()
    """Positions that an earlier coordinator process recorded, for `penstock replay` only."""
    settled: bool = False
    """True if the box had closed, with a complete history, before a restart: `earlier` ends with its final position."""
    epoch_ended: bool = False
    abandoned: dict[int, int] = field(default_factory=dict)
    """Epoch -> its last step, for epochs that the loop abandoned by `break`."""
    ends: dict[tuple[int, int], int] = field(default_factory=dict)
    """(slot, epoch) -> number of the slot's last batch in the epoch, counted over the run."""
    waiting_for: int = 0
    waited_s: float = 0.0
    steps_per_s: float = 0.0
    waited_share: float = 0.0
    """Share of the time in which the loop waited for data, over the same seconds as steps_per_s."""
    usual_steps_per_s: float = 0.0
    """Mean of steps_per_s, in which older measurements lose weight exponentially, as in `waits`."""
    usual_span_s: float = 0.0
    """Seconds over which usual_steps_per_s was measured, with the same loss of weight."""
    rate_from: float = 0.0
    rate_steps: int = 0
    rate_waited_s: float = 0.0
    waits: BoxWaits = field(default_factory=BoxWaits)
    reported_at: float = 0.0
    is_idle: bool = False
    """True if the loop has taken no batch between its last two reports, and did not wait for one at the last."""
    hung_up: bool = False
    """True if the client's connection ended during its last report, so that its process may have ended."""
    sources: dict[str, pb.SourceCount] = field(default_factory=dict)
    """Source -> counts of its delivered samples, as last reported; empty if the loader does not count."""
    fence: tuple[str, int] = ("", 0)
    """Key of the fence that the box received last (Attempt.fence), and the last step that it had taken by then."""
    first_digest: int = 0
    """Digest of the box's first batch in the attempt; 0 = not reported."""
    imbalance: float = 0.0
    """Cost of the most expensive box's batch, divided by the mean over all boxes; 0 = not measured."""
    unreachable: dict[str, float] = field(default_factory=dict)
    """Worker -> monotonic time when the box last reported that it cannot reach it."""
    error: records_pb2.ErrorDetail | None = None
    """Error with which the box has closed."""
    finished: bool | None = None
    """True if the box has closed after its loop's end; None while it is open, and if it closed before a restart."""
    lingers_until: float = 0.0
    """Monotonic time until which a closed box keeps its workers for other boxes' queries; 0 = keeps none."""
    history: deque[Position] = field(default_factory=deque)
    """Reported positions, oldest first, from the newest one that is `retention` steps old, or the start."""

    @cached_property
    def assignment_size(self) -> int:
        """Bytes of the assignment of one slot of the box."""
        parts = (self.opening.loader, self.opening.resume, self.start.to_proto())
        return len(self.opening.job) + sum(part.ByteSize() for part in parts) + ASSIGNMENT_BYTES

    @property
    def launch_start(self) -> records_pb2.BoxPosition:
        """Position at which new runners start: the attempt's, or a state of a restart (launch_restarts.py)."""
        return self.opening.restart.start if self.opening.HasField("restart") else self.start.to_proto()

    @property
    def launch_resume(self) -> records_pb2.Resume:
        return self.opening.restart.resume if self.opening.HasField("restart") else self.opening.resume

    @property
    def launch_step(self) -> int:
        return self.opening.restart.start.step if self.opening.HasField("restart") else self.start.step

    @property
    def launched(self) -> str:
        """Part of a message: where new runners start."""
        how = "was restarted from the state of" if self.opening.HasField("restart") else "began at"
        return f"{how} step {self.launch_step}"

    @property
    def step(self) -> int:
        return max(self.delivered.step, self.start.step)

    @property
    def retention(self) -> int:
        """Number of latest steps whose states can be requested (`retention_steps`)."""
        return self.opening.loader.options.retention_steps

    def total(self, slot: int) -> int:
        """Return the slot's batches delivered over the run, by the newest report."""
        return self.delivered.slots[slot].total if self.delivered.slots else self.start.total[slot]

    def unreachable_since(self, since: float) -> set[str]:
        return {worker for worker, at in self.unreachable.items() if at > since}

    def measure(self, now: float, steps: int) -> None:
        """Update the rates of the box after `steps` more steps were delivered. `now`: monotonic seconds."""
        if self.rate_from == 0.0:
            self.rate_from, self.rate_waited_s = now, self.waited_s
        elif now - self.rate_from >= 0.5:
            span_s, waited_s = now - self.rate_from, self.waited_s - self.rate_waited_s
            self.steps_per_s = (self.rate_steps + steps) / span_s
            before_s = self.usual_span_s * 0.5 ** (span_s / HALF_S)
            self.usual_span_s = before_s + span_s
            usual_steps = before_s * self.usual_steps_per_s + self.rate_steps + steps
            self.usual_steps_per_s = usual_steps / self.usual_span_s
            # at most 1, because each new executor counts from 0 again
            self.waited_share = min(1.0, max(0.0, waited_s / span_s))
            self.rate_from, self.rate_steps, self.rate_waited_s = now, 0, self.waited_s
        else:
            self.rate_steps += steps

    def note_waits(self, now: float, by_slot_s: Sequence[float], step: int) -> None:
        """Record the seconds that the loop has waited for each slot, at this step; older clients send an empty list."""
        if len(by_slot_s) == len(self.slots):
            begun, queued = self.step > self.start.step, [slot.gauge.queued for slot in self.slots]
            self.waits.report(now, by_slot_s, queued, begun=begun, stepped=step > self.step)

    def position_before(self, step: int) -> Position | None:
        """Return the newest known position from which the record of `step` (Penstock's part of a saved state) can be
        computed.

        Where an epoch ends, two positions belong to the step: its record is the end, so the start of the next epoch,
        which the box may have reported, is not returned.
        """
        fits = [at for at in self._known() if at.step < step or (at.step == step and not self.is_fresh(at))]
        return max(fits, key=lambda position: position.step, default=None)

    def is_refuted(self, position: Position) -> bool:
        """Return whether a later report contradicts `position`, which was computed before the end of an epoch was
        known: a smaller total of some slot, or another start of the same epoch."""
        later = min((at for at in self._known() if at.step >= position.step), key=lambda at: at.step, default=None)
        if later is None:
            return False
        slots = range(len(position.total))
        same_epoch = later.epoch == position.epoch
        return any(
            position.total[k] > later.total[k]
            or (same_epoch and position.total[k] - position.delivered[k] != later.total[k] - later.delivered[k])
            for k in slots
        )

    def chain(self, step: int) -> int | None:
        """Return the stream digest at `step`; None if no report of exactly this step had one."""
        return next((at.chain for at in self._known() if at.step == step and at.chain is not None), None)

    def _known(self) -> list[Position]:
        known = [*self.history, *([Position.from_proto(self.delivered)] if self.delivered.slots else [])]
        if any(slot.capabilities is not None and by_own_methods(slot.capabilities) for slot in self.slots[:1]):
            for position in known:
                position.carry()
        return known

    def labels_to(self, epoch: int | None = None) -> dict[int, int]:
        """Return the labels of epochs up to this one; None: all."""
        newest = self.delivered if self.delivered.slots else self.start.to_proto()
        return labels_in(newest.labels, epoch)

    def is_fresh(self, position: Position) -> bool:
        """Return whether the position is the start of an epoch begun in this attempt, with no batch taken."""
        return position.epoch > self.start.epoch and not any(position.delivered)

    def who(self) -> str:
        return f"client {shown(self.client)} on host {self.opening.host or '?'}"


@dataclass
class Attempt:
    """Launch of a training job, as far as it concerns one run (one of its loaders)."""

    run: str
    number: int
    key: str
    opened_by: str
    """Client and host, as text for messages."""
    num_boxes: int
    num_workers: int
    seed: int
    state: AttemptState = AttemptState.OPEN
    why: str = ""
    """Why the attempt is over, as text for messages; "" while it is open."""
    boxes: dict[int, Box] = field(default_factory=dict)
    first_digests: dict[int, list[int]] = field(default_factory=dict)
    """Digest of a box's first batch in the attempt -> the first two boxes that had it."""
    ended: set[int] = field(default_factory=set)
    """Boxes whose epoch has ended, and whose loop has not begun another one."""
    left: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Newest epochs that some box has left -> last step of the first such box, and its number."""
    named: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Newest epochs of which a box has taken a batch -> label given by the first such box, and its number."""
    live: set[int] = field(default_factory=set)
    """Boxes whose presence is LIVE, so that closing a box need not look at all boxes."""
    working: set[int] = field(default_factory=set)
    """Boxes that are `working`."""
    served: set[int] = field(default_factory=set)
    """Boxes that are `working`, or closed, and so need no more slots."""
    abandoned_after: dict[int, int] = field(default_factory=dict)
    """Step after which some box abandoned an epoch -> first box that reported it."""
    _abandoned_steps: list[int] = field(default_factory=list)
    """Keys of `abandoned_after`, sorted."""
    fence: pb.MixtureFence | None = None
    """Step before which the boxes wait while a change of the mixture is decided (mixture_orders.py)."""
    mixture_changes: list[records_pb2.MixtureChange] = field(default_factory=list)
    """Changes of the mixture's weights: the same list object as the run's."""
    last_live: float = 0.0
    generation: int = 0
    """Highest generation that slots of the attempt use or have reserved."""
    blobs: set[str] = field(default_factory=set)
    """Names of the blobs (a saved state or large arguments of input_fn) that the boxes use."""
    offered: list[records_pb2.Restart] = field(default_factory=list)
    """Newest saved state from which all slots may be restarted, one entry for each box; empty = none."""
    restarts: int = 0
    """Number of restarts of all slots: states from before and after do not fit together."""
    restarts_refuted: bool = False
    """True if the loader did not continue exactly from a saved state."""

    def add_box(self, box: Box) -> None:
        self.boxes[box.number] = box
        self.set_presence(box, box.presence)
        self.blobs |= {from_.blob for from_ in (box.opening.resume, box.launch_resume)}
        self.blobs.add(box.opening.loader.arguments_blob)

    def name_blobs(self) -> None:
        openings = [box.opening for box in self.boxes.values()]
        resumes = [opening.resume for opening in openings] + [opening.restart.resume for opening in openings]
        resumes += [offered.resume for offered in self.offered]
        self.blobs = {resume.blob for resume in resumes} | {opening.loader.arguments_blob for opening in openings}

    @property
    def offered_step(self) -> int:
        return self.offered[0].start.step if self.offered else 0

    def note_generation(self, generation: int) -> None:
        self.generation = max(self.generation, generation)

    @property
    def topology(self) -> str:
        return topology(self.num_boxes, self.num_workers)

    def note_first_digest(self, box: Box, digest: int) -> None:
        if digest and not box.first_digest:
            box.first_digest = digest
            self.first_digests[digest] = [*self.first_digests.get(digest, ()), box.number][:2]

    def twin_of(self, box: Box) -> int | None:
        """Return another box whose first batch was equal; None: none is known."""
        return next((other for other in self.first_digests.get(box.first_digest, ()) if other != box.number), None)

    def set_presence(self, box: Box, presence: BoxPresence) -> None:
        box.presence = presence
        (self.live.add if presence is BoxPresence.LIVE else self.live.discard)(box.number)
        if presence is BoxPresence.CLOSED:
            self.served.add(box.number)

    def set_working(self, box: Box, working: bool) -> None:
        box.working = working
        (self.working.add if working else self.working.discard)(box.number)
        needs_none = working or box.presence is BoxPresence.CLOSED
        (self.served.add if needs_none else self.served.discard)(box.number)

    @property
    def lacks(self) -> int:
        """Slots that all boxes without workers need, also those that are still to open."""
        return (self.num_boxes - len(self.served)) * self.num_workers

    def set_ended(self, box: Box, ended: bool) -> None:
        box.epoch_ended = ended
        (self.ended.add if ended else self.ended.discard)(box.number)

    def note_abandoned(self, box: Box, epoch: int, step: int) -> bool:
        """Record that the box abandoned an epoch after `step`; return whether no box had reported this step before."""
        box.abandoned[epoch] = step
        if step in self.abandoned_after:
            return False
        self.abandoned_after[step] = box.number
        insort(self._abandoned_steps, step)
        return True

    def abandoned_between(self, first: int, last: int) -> list[int]:
        """Return the steps in [first, last) after which some box abandoned an epoch."""
        steps = self._abandoned_steps
        return steps[bisect_left(steps, first) : bisect_left(steps, last)]

    def unreported_abandonment(self, box: Box, step: int) -> int | None:
        """Return a step after which this box may have abandoned an epoch that it has not reported yet, or None. Boxes
        usually abandon an epoch at the same step: so it is the first one since the box's last report, below `step`,
        where another box did. Until the box reports that or a later step, its position is unknown. None for a box
        that has ended its epoch or is not live."""
        if box.epoch_ended or box.presence is not BoxPresence.LIVE:
            return None
        ahead = self.abandoned_between(box.step, step)
        own = max(box.abandoned.values(), default=-1) if ahead else -1
        return next((left for left in ahead if left > own), None)


@dataclass
class ClosedAttempt:
    """Attempt that is over, kept so that its late calls are refused with the reason."""

    number: int
    key: str
    state: AttemptState
    why: str
    clients: dict[int, str]
    """Box number -> digest of the secret of its client."""
    reported_at: float = 0.0
    """Monotonic time of the boxes' last report, or of the coordinator's restart."""


@dataclass
class Run:
    """Loader of a training job, over all launches of the job."""

    name: str
    """JOB/ORDINAL, where the ordinal counts the job's loaders from 0."""
    seed: int
    num_boxes: int
    num_workers: int
    attempt: int
    """Highest attempt number used."""
    generation: int
    """Highest generation used; those of the next attempt are above it."""
    current: Attempt | None = None
    past: dict[int, ClosedAttempt] = field(default_factory=dict)
    mixture_changes: list[records_pb2.MixtureChange] = field(default_factory=list)
    """Changes of the weights by `penstock mix`, oldest first."""
    end: pb.RunEnd | None = None
    """How the newest attempt whose end is decided has ended."""
    unused: bool = False
    """True if the run has delivered nothing and never resumed, so that it has no position to lose."""

    @property
    def is_decided(self) -> bool:
        """True if the end of the newest attempt is decided, although boxes that have not failed may be open."""
        return self.end is not None and self.end.attempt == self.attempt


def known_run(runs: Mapping[str, Run], name: str) -> Run:
    run = runs.get(name)
    if run is None:
        raise UnknownRunError(f"the coordinator has no run {name!r}: see `penstock status --all`")
    return run


def attempt_over(past: ClosedAttempt) -> SupersededError:
    if past.state is AttemptState.SUPERSEDED:
        return SupersededError(f"{past.why}: end this process, and give jobs that run side by side different names")
    return SupersededError(f"{past.why}: start the job again to continue from its last checkpoint")


@dataclass
class Worker:
    name: str
    session: str
    host_id: str
    capacity: int
    local_address: str
    tcp_address: str
    registered: bool
    """False for a worker from the journal until it registers; it keeps its slots and gets no new ones."""
    lease_until: float
    reported_at: float
    version: int
    draining: bool = False
    allow: tuple[str, ...] = ()
    """Prefixes of the modules that the worker may run; empty = not reported."""
    release: str = ""
    """Empty: not known."""
    cores: int = 0
    """0 = not known."""
    lane_protocol: int = UNNAMED_LANE_PROTOCOL
    slots: dict[SlotKey, int] = field(default_factory=dict)
    """Slots that the worker runs or prepares -> bytes of their assignments in a heartbeat reply."""
    batches: int = 0
    """Made and delivered batches of all its slots, in its last report."""
    is_idle: bool = False
    """True if its runners made and delivered nothing between its last two reports."""
    more_requests: bool = False
    """True if some requests for states did not fit into the last heartbeat reply."""
    left: bool = False
    """True if the worker announced its shutdown, so that its silence is no loss."""

    @property
    def load(self) -> float:
        """Used share of the worker's capacity, from 0 to 1."""
        return len(self.slots) / self.capacity if self.capacity else 1.0

    def may_run(self, module: str) -> bool:
        """Return whether the worker may run input_fn's module; True if it reported no prefixes and so checks itself."""
        return not self.allow or under(module, self.allow)

    def can_serve(self, opening: pb.OpenRunRequest) -> bool:
        """Return whether the worker may run the job's input_fn and speaks its lane protocol."""
        return self.lane_protocol == lane_protocol_of(opening) and self.may_run(module_of(opening.loader.input_fn))

    @property
    def free(self) -> int:
        """Slots that the worker can take; 0 if it drains, is not registered, or has ASSIGNMENTS_MAX bytes."""
        if self.draining or not self.registered or sum(self.slots.values()) >= ASSIGNMENTS_MAX:
            return 0
        return self.capacity - len(self.slots)


def lane_protocol_of(request: pb.OpenRunRequest | pb.RegisterWorkerRequest) -> int:
    return request.lane_protocol or UNNAMED_LANE_PROTOCOL


_DIGEST = "sha256:"
_SHOWN = 8


def client_of(client_id: str) -> str:
    """Return the digest of a client's secret: it proves nothing, so it may be stored and shown."""
    return _DIGEST + hashlib.sha256(client_id.encode()).hexdigest()[:32]


def client_in(row: str) -> str:
    """Return the client's digest from a journal row, which in an older release holds the secret itself."""
    return row if row.startswith(_DIGEST) else client_of(row)


def shown(client: str) -> str:
    """Return a short form of a client's digest, for messages."""
    return client.removeprefix(_DIGEST)[:_SHOWN]
