"""Entities of the coordinator: runs, attempts, boxes, slots, workers. They hold data; the modules of core/ change it.

    run       one loader of a training job, over all its launches
    attempt   one launch of the job, as far as the run is concerned
    box       one data-parallel rank of the launch
    slot      one logical worker of a box, whatever process runs it
    worker    daemon that runs slots, each in a process called runner

Ownership. A run has at most one open attempt. An attempt has an entry for each box that was opened in it, with its
slots. A slot has at most one worker, under a generation that rises each time the slot moves. Calls for an older attempt
or generation are refused. Each new number of attempt or generation is in the journal before any peer receives it.

Ownership is in the journal. Leases and progress are not: after a restart every peer has a full new lease, and reports
its position with its next call.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from penstock.appliance.core.gauges import HALF_S, BoxWaits, SlotGauge
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.errors import SupersededError, UnknownRunError
from penstock.proto.state.allowed_modules import under
from penstock.proto.state.epoch_labels import labels_in
from penstock.proto.state.position import Position
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.units import topology

ASSIGNMENTS_MAX = 10 << 20
"""Total size of a worker's assignments, in bytes, from which on the worker gets no more slots. An assignment is the
message that tells a worker to run one slot. A heartbeat reply contains all assignments of the worker. A worker cannot
receive a reply above channel.REPLY_MAX, so its lease would end. 10 MiB are 1,024 slots of 10 KiB each; serialising them
takes 35 ms."""

ASSIGNMENT_BYTES = 256
"""Estimated size of the small fields of an assignment, in bytes: run, numbers and lane key. The large fields (loader,
saved state, position) are not estimated but measured."""


class AttemptState(Enum):
    OPEN = "open"
    SUPERSEDED = "superseded"
    ENDED = "ended"


class BoxPresence(Enum):
    """State of a box's client, the training process that opened the box."""

    LIVE = "live"
    GONE = "gone"  # the lease ran out; the same client may come back until the next attempt opens
    CLOSED = "closed"


@dataclass(frozen=True)
class SlotLoss:
    """Record of one death of a slot's runner."""

    at: float
    """Monotonic time of the death, in seconds."""
    worker: str
    note: str
    delivered: int
    """Number of the slot's batches that were known to be delivered at that time. If the number is higher later, the
    slot has made progress since."""
    making: records_pb2.Skip | None = None
    """Position of the batch that the runner was making when it died; None if it was making none, or if not known."""


@dataclass
class MigrationTarget:
    """Worker that prepares to take over a slot from the slot's present worker: see migration.py."""

    worker: str
    session: str
    generation: int
    why: str
    since: float
    ready_at: float = 0.0
    """Monotonic time when the target became ready; 0 = not ready yet."""
    delivered: int | None = None
    """Number of the slot's batches that the training loop had taken when the target could begin to replay; None = it
    cannot yet."""
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
    """Session of the slot's worker: a random name that each process of a worker daemon gives itself. By the session a
    restarted coordinator knows whether the worker is still the same process."""
    ever_ready: bool = False
    recovery: bool = False
    restarts: int = 0
    note: str = ""
    capabilities: records_pb2.LoaderCapabilities | None = None
    error: records_pb2.ErrorDetail | None = None
    losses: list[SlotLoss] = field(default_factory=list)
    target: MigrationTarget | None = None
    reserved: int = 0
    """Highest generation reserved for a migration target. It is in the journal, so that no generation is used twice,
    even after a restart of the coordinator."""
    moved_at: float = 0.0
    """Monotonic time when the slot's present runner became ready or took the slot over, or when a restarted coordinator
    found the slot in its journal."""
    left_alone_until: float = 0.0
    """Monotonic time until which balance leaves the slot on its worker, after a failed migration."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Workers that failed to get ready as the slot's migration target: name -> the worker's session at that time."""
    migrated: bool = False
    """True if the slot's last move was planned: a migration, or a change of the mixture."""
    remade: list[tuple[int, int]] = field(default_factory=list)
    """Entries (generation, total), one for each change of the mixture: the first generation of the slot that knows the
    change, and the number of the slot's last batch before the change. A snapshot that an older generation took after
    this batch is not valid. The list is empty after a restart of the coordinator; then the loader refuses such a
    snapshot."""
    was_slow_at: frozenset[str] = frozenset()
    """Names of the workers from which the slot was moved because it was a straggler there."""
    batches_per_s: float = 0.0
    batch_s: float = 0.0
    """Seconds of work per batch, as reported by the slot's worker; 0 = not known."""
    batch_cpu_s: float = 0.0
    """Seconds of processor time per batch; 0 = not known."""
    batch_delay_s: float = 0.0
    """Seconds per batch, within `batch_s`, in which the runner waited for a processor."""
    doing: str = ""
    """Activity of the slot's runner, if it has lasted unusually long; else ""."""
    start_queue_position: tuple[int, int] = (0, 0)
    """Position of the slot's runner in the worker's start queue, from 1, and the length of the queue; (0, 0) = not in
    the queue."""
    start_stage: int = 0
    """Stage of the runner's start (StartStage). A newer worker may report an unknown stage."""
    stack: str = ""
    """Python stack of the slot's runner: the present one while `doing` is set; else that of the runner that was lost
    last. "" if it is not known, if the slot's last move was no loss, or if a stall has ended since (`doing` became "").
    """
    outgrown: int = 0
    """Generation of the runner that was replaced last because it used too much memory, if it did so before its second
    batch; else 0. If the runner of the next generation does the same, the slot fails."""
    spares_memory: bool = False
    """True once a runner was replaced because it used too much memory: the next ones replay as little as possible."""
    skips: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, total) -> number of batches to skip after the slot's batch number `total`, including those that were
    skipped before the state from which the run resumed."""
    skipped: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, total) -> number of batches skipped after the slot's batch number `total` in the present attempt
    alone."""
    firsts: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, the slot's batches before it) -> digest of the epoch's first batch, of epochs whose first batch a runner
    has made that the slot lost, or left in a migration. The slot's next runner must make the same. Empty after a
    restart of the coordinator."""
    gauge: SlotGauge = field(default_factory=SlotGauge)
    worked_s: float = 0.0
    """Seconds for which a runner of the slot has worked since the position where its loader was started; 0 = not known.
    A replay from there takes about as long."""

    def unfit_at(self, workers: Mapping[str, Worker]) -> set[str]:
        """Return the names of those of `workers` that failed to prepare for the slot and were not restarted since."""
        return {name for name, session in self.unfit.items() if name in workers and workers[name].session == session}

    def is_outdated(self, generation: int, total: int) -> bool:
        """Return whether a snapshot is invalid because of a change of the mixture: a runner of this generation, which
        did not know the change, took it after batch number `total` of the slot, which came after the change."""
        return any(generation < first and total > last for first, last in self.remade)

    def is_migrating_to(self, worker: str, generation: int) -> bool:
        """Return whether this worker, under this generation, prepares to take the slot over."""
        target = self.target
        return target is not None and (target.worker, target.generation) == (worker, generation)

    @property
    def next_generation(self) -> int:
        return max(self.generation, self.reserved) + 1

    def __str__(self) -> str:
        return f"box {self.key.box} slot {self.key.slot}"


@dataclass
class Box:
    """Data-parallel rank of a run, with its slots."""

    number: int
    client: str
    """Digest of the secret of the client (training process) that holds the box: see `client_of`."""
    opening: pb.OpenRunRequest
    """Request that opened the box, without its client_id."""
    start: Position
    """Position of the box when the attempt opened."""
    presence: BoxPresence
    lease_until: float
    version: int
    slots: list[Slot] = field(default_factory=list)
    credential: str = ""
    """Digest of the credential token that opened the box; "" after a restart of the coordinator."""

    delivered: records_pb2.BoxPosition = field(default_factory=records_pb2.BoxPosition)
    """Position of the box in its client's newest report; empty before the first report."""
    reported: bool = True
    """False from a restart of the coordinator until the client has reported again at which positions the box began its
    epochs. Until then the box's position and abandoned epochs may be out of date."""
    restored: bool = False
    """True if the box was restored from the journal. `history` then begins at the attempt's start again, although
    workers may have dropped the snapshots of steps that are more than `retention` steps old."""
    earlier: tuple[records_pb2.BoxPosition, ...] = ()
    """Positions of the box that an earlier coordinator process recorded. Only `penstock replay` uses them."""
    settled: bool = False
    """True if the box had closed, with a complete history, before the coordinator restarted. The last position of
    `earlier` is then the box's final one."""
    epoch_ended: bool = False
    abandoned: dict[int, int] = field(default_factory=dict)
    """Epoch -> its last step, for epochs that the loop abandoned by `break`."""
    ends: dict[tuple[int, int], int] = field(default_factory=dict)
    """(slot, epoch) -> number of the slot's last batch in the epoch, counted over the run. The box's positions and the
    workers' answers show it."""
    waiting_for: int = 0
    waited_s: float = 0.0
    steps_per_s: float = 0.0
    waited_share: float = 0.0
    """Share of the time in which the loop waited for data, measured over the same seconds as steps_per_s."""
    usual_steps_per_s: float = 0.0
    """Mean of steps_per_s over time. Older measurements lose weight exponentially, as in `waits`, so that a single
    report has little weight."""
    usual_span_s: float = 0.0
    """Seconds over which usual_steps_per_s was measured; older seconds lose weight in the same way."""
    rate_from: float = 0.0
    rate_steps: int = 0
    rate_waited_s: float = 0.0
    waits: BoxWaits = field(default_factory=BoxWaits)
    reported_at: float = 0.0
    sources: dict[str, pb.SourceCount] = field(default_factory=dict)
    """Name of a data source -> counts of its delivered samples, as last reported; empty if the loader does not
    count."""
    fence: tuple[str, int] = ("", 0)
    """Key of the fence that the box received last (see Attempt.fence), and the last step that the box had taken by
    then."""
    imbalance: float = 0.0
    """Cost of the most expensive box's batch in a step, divided by the mean over all boxes, as last reported; 0 = not
    measured."""
    unreachable: dict[str, float] = field(default_factory=dict)
    """Worker -> monotonic time when the box last reported that it cannot reach the worker: see box_progress.py."""
    lingers_until: float = 0.0
    """Monotonic time until which a closed box keeps its workers for the state queries of other boxes; 0 = the box keeps
    no workers."""
    history: deque[Position] = field(default_factory=deque)
    """Positions that the box reported, oldest first. The first one is the newest position that is at least `retention`
    steps old, or the start of the attempt."""

    @cached_property
    def assignment_size(self) -> int:
        """Size in bytes of the assignment of one slot of the box."""
        parts = (self.opening.loader, self.opening.resume, self.start.to_proto())
        return len(self.opening.job) + sum(part.ByteSize() for part in parts) + ASSIGNMENT_BYTES

    @property
    def launch_start(self) -> records_pb2.BoxPosition:
        """Position at which new runners start: where the attempt opened, or a state from which all slots have been
        restarted since (launch_restarts.py)."""
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
        """Number of steps delivered over the run, according to the newest report."""
        return max(self.delivered.step, self.start.step)

    @property
    def retention(self) -> int:
        """Number of latest steps whose states can be requested (`retention_steps`)."""
        return self.opening.loader.options.retention_steps

    def total(self, slot: int) -> int:
        """Return the number of the slot's batches delivered over the run, according to the newest report."""
        return self.delivered.slots[slot].total if self.delivered.slots else self.start.total[slot]

    def unreachable_since(self, since: float) -> set[str]:
        """Return the names of the workers that the box reported as unreachable after the time `since`."""
        return {worker for worker, at in self.unreachable.items() if at > since}

    def measure(self, now: float, steps: int) -> None:
        """Update steps_per_s and the other rates of the box after `steps` more steps were delivered. `now`: monotonic
        seconds."""
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

    def note_waits(self, now: float, by_slot_s: Sequence[float]) -> None:
        """Record the seconds that the client's loop has waited for each slot, `by_slot_s`. The list of a client of an
        older release is empty, and changes nothing."""
        if len(by_slot_s) == len(self.slots):
            begun = self.step > self.start.step
            self.waits.report(now, by_slot_s, [slot.gauge.queued for slot in self.slots], begun=begun)

    def position_before(self, step: int) -> Position | None:
        """Return the newest known position at or before `step` from which the record of `step` can be computed; None if
        all known positions are later. (The record is Penstock's part of a saved state.)

        Where an epoch ends at a step, two positions belong to the step: the end of the epoch, and the start of the next
        one. The record of the step is the end. The box may have reported the start, which is then not returned for this
        step.
        """
        fits = [at for at in self._known() if at.step < step or (at.step == step and not self.is_fresh(at))]
        return max(fits, key=lambda position: position.step, default=None)

    def is_refuted(self, position: Position) -> bool:
        """Return whether a later report of the box contradicts `position`, which was computed from an earlier report.
        A contradiction is a smaller total of some slot, or another start of the same epoch. Such a `position` was
        computed before the end of an epoch was known."""
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
        """Return the box's stream digest at `step`; None if no report of exactly this step contained the digest."""
        return next((at.chain for at in self._known() if at.step == step and at.chain is not None), None)

    def _known(self) -> list[Position]:
        known = [*self.history, *([Position.from_proto(self.delivered)] if self.delivered.slots else [])]
        if any(slot.capabilities is not None and by_own_methods(slot.capabilities) for slot in self.slots[:1]):
            for position in known:
                position.carry()
        return known

    def labels_to(self, epoch: int | None = None) -> dict[int, int]:
        """Return the labels that the loop has given to epochs, up to this one; None: all."""
        newest = self.delivered if self.delivered.slots else self.start.to_proto()
        return labels_in(newest.labels, epoch)

    def is_fresh(self, position: Position) -> bool:
        """Return whether the position is the start of an epoch that began during this attempt, with no batch of it
        taken."""
        return position.epoch > self.start.epoch and not any(position.delivered)

    def who(self) -> str:
        return f"client {shown(self.client)} on host {self.opening.host_id or '?'}"


@dataclass
class Attempt:
    """Launch of a training job, as far as it concerns one run (one of the job's loaders)."""

    run: str
    number: int
    key: str
    opened_by: str
    """Client that opened the attempt, with its host, as text for messages."""
    num_boxes: int
    num_workers: int
    seed: int
    state: AttemptState = AttemptState.OPEN
    why: str = ""
    """Reason why the attempt is over, as text for messages; "" while the attempt is open."""
    boxes: dict[int, Box] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    """Numbers of the boxes whose epoch has ended, and whose loop has not begun another one."""
    left: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Newest epochs that some box has left for the next one -> last step of the first such box, and its number."""
    named: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Newest epochs of which some box has taken a batch -> label of the first such box (proto/state/epoch_labels.py),
    and its number."""
    live: set[int] = field(default_factory=set)
    """Numbers of the boxes whose presence is LIVE, kept so that closing a box need not look at all boxes."""
    abandoned_after: dict[int, int] = field(default_factory=dict)
    """Step after which some box abandoned an epoch -> number of the first box that reported it."""
    _abandoned_steps: list[int] = field(default_factory=list)
    """Keys of `abandoned_after`, sorted."""
    fence: pb.MixtureFence | None = None
    """Fence: step before which the boxes wait while a change of the mixture is decided; see mixture_orders.py. None: no
    fence."""
    mixture_changes: list[records_pb2.MixtureChange] = field(default_factory=list)
    """Changes of the mixture's weights in this run: the same list object as that of the run."""
    last_live: float = 0.0
    generation: int = 0
    """Highest generation that slots of the attempt use or have reserved."""
    clients: dict[int, str] = field(default_factory=dict)
    """Box number -> digest of the secret of the box's client."""
    credentials: Counter[str] = field(default_factory=Counter)
    """Digest of a credential token -> number of boxes that were opened with the token."""
    blobs: set[str] = field(default_factory=set)
    """Names of the blobs that the attempt's boxes use. A blob holds a saved state or large arguments of input_fn."""
    offered: list[records_pb2.Restart] = field(default_factory=list)
    """Newest saved state from which all slots may be restarted, as one entry for each box; empty = none."""
    restarts: int = 0
    """Number of times that all slots were started anew: states of slots from before and after do not fit together."""
    restarts_refuted: bool = False
    """True if the loader did not continue exactly from a saved state."""

    def add_box(self, box: Box) -> None:
        self.boxes[box.number] = box
        self.clients[box.number] = box.client
        self.credentials[box.credential] += 1
        self.set_presence(box, box.presence)
        self.blobs |= {from_.blob for from_ in (box.opening.resume, box.launch_resume)}
        self.blobs.add(box.opening.loader.arguments_blob)

    def name_blobs(self) -> None:
        """Bring `blobs` up to date."""
        openings = [box.opening for box in self.boxes.values()]
        resumes = [opening.resume for opening in openings] + [opening.restart.resume for opening in openings]
        resumes += [offered.resume for offered in self.offered]
        self.blobs = {resume.blob for resume in resumes} | {opening.loader.arguments_blob for opening in openings}

    @property
    def offered_step(self) -> int:
        """Step of `offered`; 0 = none."""
        return self.offered[0].start.step if self.offered else 0

    def note_generation(self, generation: int) -> None:
        self.generation = max(self.generation, generation)

    @property
    def topology(self) -> str:
        return topology(self.num_boxes, self.num_workers)

    def set_presence(self, box: Box, presence: BoxPresence) -> None:
        box.presence = presence
        (self.live.add if presence is BoxPresence.LIVE else self.live.discard)(box.number)

    def set_ended(self, box: Box, ended: bool) -> None:
        box.epoch_ended = ended
        (self.ended.add if ended else self.ended.discard)(box.number)

    def note_abandoned(self, box: Box, epoch: int, step: int) -> bool:
        """Record that the box abandoned an epoch after `step`. Return True if this is the first report, from any box,
        of an epoch abandoned after this step."""
        box.abandoned[epoch] = step
        if step in self.abandoned_after:
            return False
        self.abandoned_after[step] = box.number
        insort(self._abandoned_steps, step)
        return True

    def abandoned_between(self, first: int, last: int) -> list[int]:
        """Return the steps from `first` to `last` - 1 after which some box abandoned an epoch."""
        steps = self._abandoned_steps
        return steps[bisect_left(steps, first) : bisect_left(steps, last)]

    def unreported_abandonment(self, box: Box, step: int) -> int | None:
        """Return a step after which this box may have abandoned an epoch that it has not reported yet; None if there is
        none. Boxes usually abandon an epoch at the same step. So this is the first step, from the last one that this
        box reported up to `step` - 1, after which another box abandoned an epoch. Until this box reports an abandoned
        epoch, or a later step, its position at `step` is unknown. Also None for a box that has ended its epoch, or is
        not live."""
        if box.epoch_ended or box.presence is not BoxPresence.LIVE:
            return None
        ahead = self.abandoned_between(box.step, step)
        own = max(box.abandoned.values(), default=-1) if ahead else -1
        return next((left for left in ahead if left > own), None)

    def all_live(self) -> bool:
        return len(self.live) == len(self.boxes)

    def any_live(self) -> bool:
        return bool(self.live)


@dataclass
class ClosedAttempt:
    """Summary of an attempt that is over, kept so that its late calls are refused with the reason."""

    number: int
    key: str
    state: AttemptState
    why: str
    clients: dict[int, str]
    """Box number -> digest of the secret of the box's client."""


@dataclass
class Run:
    """Loader of a training job, over all launches of the job."""

    name: str
    """Name, as JOB/ORDINAL. The ordinal counts the job's loaders from 0."""
    seed: int
    num_boxes: int
    num_workers: int
    attempt: int
    """Highest attempt number used in the run."""
    generation: int
    """Highest generation used in the run. The generations of the next attempt are above it."""
    current: Attempt | None = None
    past: dict[int, ClosedAttempt] = field(default_factory=dict)
    mixture_changes: list[records_pb2.MixtureChange] = field(default_factory=list)
    """Changes of the mixture's weights by `penstock mix`, in the order in which they were made."""
    unused: bool = False
    """True if the run has delivered nothing and was never resumed from a state, so that it has no position to lose."""


def known_run(runs: Mapping[str, Run], name: str) -> Run:
    run = runs.get(name)
    if run is None:
        raise UnknownRunError(
            f"the coordinator has no run {name!r}: see `penstock status --all` for its runs, and start the job again "
            "if it is missing there"
        )
    return run


def attempt_over(past: ClosedAttempt) -> SupersededError:
    if past.state is AttemptState.SUPERSEDED:
        return SupersededError(f"{past.why}: end this process, and give jobs that run side by side different names")
    return SupersededError(f"{past.why}: start the job again to continue from its last checkpoint")


class AssignedSlots:
    """Keys of a worker's slots, and the size of the slots' assignments in a heartbeat reply."""

    def __init__(self) -> None:
        self._sizes: dict[SlotKey, int] = {}
        self.size = 0
        """Size of the assignments of all the slots, in bytes."""

    def add(self, key: SlotKey, size: int = 0) -> None:
        self.discard(key)
        self._sizes[key] = size
        self.size += size

    def discard(self, key: SlotKey) -> None:
        self.size -= self._sizes.pop(key, 0)

    def clear(self) -> None:
        self._sizes.clear()
        self.size = 0

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[SlotKey]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


@dataclass
class Worker:
    """Worker daemon, as known to the coordinator."""

    name: str
    session: str
    host_id: str
    capacity: int
    local_address: str
    tcp_address: str
    registered: bool
    """True if the worker has registered since the coordinator's start. Until a worker from the journal registers, it
    keeps its slots and gets no new ones."""
    lease_until: float
    seen_at: float
    version: int
    draining: bool = False
    allow: tuple[str, ...] = ()
    """Prefixes of the names of modules that the worker may run; empty = the worker did not report them."""
    release: str = ""
    """Release of Penstock that the worker runs; "" = not known."""
    cores: int = 0
    """Number of processors that the worker may use; 0 = not known."""
    slots: AssignedSlots = field(default_factory=AssignedSlots)
    more_requests: bool = False
    """True if some requests for slots' states did not fit into the last heartbeat reply to the worker."""
    left: bool = False
    """True if the worker announced its shutdown, so that its silence does not count as a loss."""

    @property
    def load(self) -> float:
        """Used share of the worker's capacity, from 0 to 1."""
        return len(self.slots) / self.capacity if self.capacity else 1.0

    def may_run(self, module: str) -> bool:
        """Return whether the worker may run input_fn's module of this name. For a worker that reported no prefixes the
        answer is True, because such a worker checks the module itself."""
        return not self.allow or under(module, self.allow)

    @property
    def free(self) -> int:
        """Number of slots that the worker can take in addition to its present ones. It is 0 while the worker drains, is
        not registered, or has assignments of ASSIGNMENTS_MAX bytes."""
        if self.draining or not self.registered or self.slots.size >= ASSIGNMENTS_MAX:
            return 0
        return self.capacity - len(self.slots)


_DIGEST = "sha256:"
_SHOWN = 8


def client_of(client_id: str) -> str:
    """Return the digest of a client's secret. A client proves that it holds a box by the secret itself. The digest
    proves nothing, so it may be stored in memory, in the journal and in messages."""
    return _DIGEST + hashlib.sha256(client_id.encode()).hexdigest()[:32]


def client_in(row: str) -> str:
    """Return the client's digest from a journal row. A row of an older release holds the secret itself, so return the
    secret's digest."""
    if type(row) is not str:
        raise TypeError(f"client_id in a row of the journal must be a str, got {type(row).__name__}")
    return row if row.startswith(_DIGEST) else client_of(row)


def shown(client: str) -> str:
    """Return a short form of a client's digest, for messages."""
    return client.removeprefix(_DIGEST)[:_SHOWN]
