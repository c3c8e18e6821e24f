"""Entities of the coordinator: runs, attempts, boxes, slots, workers. They hold data only; state_machine.py changes
them.

Ownership. A run has at most one open attempt; an attempt has an entry for each of its boxes; an opened box has W slots;
a slot has at most one worker, under a generation that rises each time the slot moves. Calls for an older attempt or
generation are fenced, and the numbers are in the journal before any peer receives them.

Ownership is journaled. Leases and progress are not: after a restart every peer has a full new lease, and reports its
position with its next call.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from penstock.appliance.model.gauges import HALF_S, BoxWaits, SlotGauge
from penstock.proto.state.allowed_modules import under
from penstock.proto.state.position import Position
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.units import topology

ASSIGNMENTS_MAX = 10 << 20
"""Bytes of a worker's assignments above which it gets no more slots. One reply to a heartbeat contains all assignments,
and a worker is lost if its reply exceeds REPLY_MAX. 10 MiB are 1,024 slots of 10 KiB; serialising them takes 35 ms."""

ASSIGNMENT_BYTES = 256
"""Bytes of an assignment's numbers, key and field names."""


class SlotKey(NamedTuple):
    run: str
    attempt: int
    box: int
    slot: int


class AttemptState(Enum):
    OPEN = "open"
    SUPERSEDED = "superseded"
    ENDED = "ended"


class BoxPresence(Enum):
    """Presence of a box in its attempt."""

    LIVE = "live"
    GONE = "gone"  # the lease ran out; the same client may come back until the next attempt opens
    CLOSED = "closed"


@dataclass(frozen=True)
class SlotLoss:
    at: float
    worker: str
    note: str
    delivered: int
    """The slot's delivered total as known at the loss; a higher one now means progress."""
    making: records_pb2.Skip | None = None
    """Position of the batch that the runner was making when it died, if it was making one."""


@dataclass
class MigrationTarget:
    """Worker that prepares to take a slot over from another: see migration.py."""

    worker: str
    session: str
    generation: int
    why: str
    since: float
    ready_at: float = 0.0
    """Time when the target became ready; 0 = not yet."""
    capabilities: records_pb2.LoaderCapabilities | None = None


@dataclass
class Slot:
    key: SlotKey
    generation: int
    phase: pb.SlotPhase.ValueType = pb.WAITING
    worker: str = ""
    session: str = ""
    """Session of the worker, so that a restarted coordinator can tell whether it is still the same process."""
    ever_ready: bool = False
    recovery: bool = False
    restarts: int = 0
    note: str = ""
    capabilities: records_pb2.LoaderCapabilities | None = None
    error: records_pb2.ErrorDetail | None = None
    losses: list[SlotLoss] = field(default_factory=list)
    target: MigrationTarget | None = None
    reserved: int = 0
    """Highest generation reserved for a migration target. It is journaled, so that no generation is used twice."""
    moved_at: float = 0.0
    """Time of the last change of its worker."""
    left_alone_until: float = 0.0
    unfit: dict[str, str] = field(default_factory=dict)
    """Worker -> its session, for workers that failed to prepare for the slot."""
    migrated: bool = False
    """True if the slot's last move was a migration."""
    was_slow_at: frozenset[str] = frozenset()
    """Workers that the slot was moved away from as a straggler."""
    batches_per_s: float = 0.0
    batch_s: float = 0.0
    """Seconds of work per batch, as its worker reports; 0 = not known."""
    batch_cpu_s: float = 0.0
    """Seconds of processor time per batch; 0 = not known."""
    batch_delay_s: float = 0.0
    """Seconds of `batch_s` in which the runner waited for a processor."""
    doing: str = ""
    """Activity of its runner that takes unusually long; "" = nothing unusual."""
    start_queue_position: tuple[int, int] = (0, 0)
    """Position of its runner in its worker's start queue, from 1, and the length of the queue; 0 = it is not queued."""
    start_stage: int = 0
    """Stage of its start that it waits in (StartStage). A newer worker may report an unknown one."""
    stack: str = ""
    """Stack of the runner: at `doing` now, else when it last died."""
    outgrown: int = 0
    """Generation whose runner was recycled for its memory before its second batch; 0 = none was."""
    skips: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, total) -> batches skipped there; those of the state that the run resumed from included."""
    skipped: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, total) -> batches skipped there in this attempt alone."""
    gauge: SlotGauge = field(default_factory=SlotGauge)

    def unfit_at(self, workers: Mapping[str, Worker]) -> set[str]:
        """Return those of `workers` that failed to prepare for the slot, and were not restarted since."""
        return {name for name, session in self.unfit.items() if name in workers and workers[name].session == session}

    def is_migrating_to(self, worker: str, generation: int) -> bool:
        """Return whether that worker, under that generation, prepares to take the slot over."""
        target = self.target
        return target is not None and (target.worker, target.generation) == (worker, generation)

    @property
    def next_generation(self) -> int:
        """Next unused generation."""
        return max(self.generation, self.reserved) + 1

    def __str__(self) -> str:
        return f"box {self.key.box} slot {self.key.slot}"


@dataclass
class Box:
    number: int
    client: str
    """Digest of the client that holds the box: see `client_of`."""
    opening: pb.OpenRunRequest
    """Opening without its client_id."""
    start: Position
    """Position of the box when the attempt opened."""
    presence: BoxPresence
    lease_until: float
    version: int
    slots: list[Slot] = field(default_factory=list)
    credential: str = ""
    """Digest of the token that opened the box; "" = the coordinator was restarted since."""

    delivered: records_pb2.BoxPosition = field(default_factory=records_pb2.BoxPosition)
    """The newest report; empty before the first one."""
    reported: bool = True
    """True if its client has reported since the restart; until then, its abandoned epochs and position may be out of
    date."""
    restored: bool = False
    """Flag of a box restored from the journal, which does not record the steps dropped since its epoch start."""
    earlier: tuple[records_pb2.BoxPosition, ...] = ()
    """Positions known before the restart: for `penstock replay` alone."""
    settled: bool = False
    """Flag of a box that had closed before the restart, at the last position of `earlier`."""
    epoch_ended: bool = False
    abandoned: dict[int, int] = field(default_factory=dict)
    """Epoch -> last step of it, for epochs abandoned by `break`."""
    ends: dict[tuple[int, int], int] = field(default_factory=dict)
    """(slot, epoch) -> the slot's total when the epoch ended, as workers reported."""
    waiting_for: int = 0
    waited_s: float = 0.0
    steps_per_s: float = 0.0
    waited_share: float = 0.0
    """Share of waiting in the time that steps_per_s refers to."""
    usual_steps_per_s: float = 0.0
    """Decaying mean of steps_per_s, like `waits`, so that a single report does not decide anything."""
    usual_span_s: float = 0.0
    """Seconds that usual_steps_per_s refers to, decayed like the mean."""
    rate_from: float = 0.0
    rate_steps: int = 0
    rate_waited_s: float = 0.0
    waits: BoxWaits = field(default_factory=BoxWaits)
    reported_at: float = 0.0
    unreachable: dict[str, float] = field(default_factory=dict)
    """Worker -> time when the box last reported that it cannot reach it: see reachability.py."""
    lingers_until: float = 0.0
    """Time until which a closed box keeps its workers, for state queries of other boxes; 0 = it has no workers to
    keep."""
    history: deque[Position] = field(default_factory=deque)
    """Reported positions, oldest first; the first is the newest outside the window, or the epoch start."""

    @cached_property
    def assignment_size(self) -> int:
        """Bytes of the assignment of one of its slots."""
        parts = (self.opening.loader, self.opening.resume, self.start.to_proto())
        return len(self.opening.job) + sum(part.ByteSize() for part in parts) + ASSIGNMENT_BYTES

    @property
    def step(self) -> int:
        """Steps delivered, as far as reported."""
        return max(self.delivered.step, self.start.step)

    @property
    def retention(self) -> int:
        return self.opening.loader.options.retention_steps

    def total(self, slot: int) -> int:
        """Return the slot's delivered batches, as far as reported."""
        return self.delivered.slots[slot].total if self.delivered.slots else self.start.total[slot]

    def unreachable_since(self, since: float) -> set[str]:
        """Return the names of the workers that the box could not reach at that time or later."""
        return {worker for worker, at in self.unreachable.items() if at > since}

    def measure(self, now: float, steps: int) -> None:
        """Update the rates after `steps` more steps were delivered."""
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
        """Record the client's report of its loop's waiting. An older release reports none."""
        if len(by_slot_s) == len(self.slots):
            begun = self.step > self.start.step
            self.waits.report(now, by_slot_s, [slot.gauge.queued for slot in self.slots], begun=begun)

    def position_before(self, step: int) -> Position | None:
        """Return the newest position known at or before `step`; None if the step is older than all.

        The record of a step is the position right after it, before an epoch end that follows. If the loop had passed
        the epoch's end when it reported, its report holds the start of the next epoch. A loader can resume from that
        position, but it is not the record of the step.
        """
        fits = [at for at in self._known() if at.step < step or (at.step == step and not self.is_fresh(at))]
        return max(fits, key=lambda position: position.step, default=None)

    def is_refuted(self, position: Position) -> bool:
        """Return whether a report of a later step shows that this planned position is wrong: the report has fewer
        batches of a slot, or another start of the same epoch. A plan is wrong if it was made before the end of an epoch
        was known."""
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
        """Return the stream digest at `step`, if a position of exactly that step was reported with it."""
        return next((at.chain for at in self._known() if at.step == step and at.chain is not None), None)

    def _known(self) -> list[Position]:
        known = [*self.history, *([Position.from_proto(self.delivered)] if self.delivered.slots else [])]
        if any(slot.capabilities is not None and by_own_methods(slot.capabilities) for slot in self.slots[:1]):
            for position in known:
                position.carry()
        return known

    def is_fresh(self, position: Position) -> bool:
        """Return whether the position is the start of an epoch after the attempt's first one."""
        return position.epoch > self.start.epoch and not any(position.delivered)

    def who(self) -> str:
        return f"client {shown(self.client)} on host {self.opening.host_id or '?'}"


@dataclass
class Attempt:
    run: str
    number: int
    key: str
    opened_by: str
    """Opener and its host, for messages."""
    num_boxes: int
    num_workers: int
    seed: int
    state: AttemptState = AttemptState.OPEN
    why: str = ""
    """Reason why the attempt is no longer open."""
    boxes: dict[int, Box] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    """Boxes whose epoch_ended is set."""
    live: set[int] = field(default_factory=set)
    """Boxes whose presence is LIVE, kept so that a close need not look at all boxes."""
    left: dict[int, int] = field(default_factory=dict)
    """Step after which some box abandoned an epoch -> the first box that did."""
    _left: list[int] = field(default_factory=list)
    """Keys of `left`, sorted."""
    last_live: float = 0.0
    generation: int = 0
    """Highest generation that its slots used or reserved."""
    clients: dict[int, str] = field(default_factory=dict)
    """Box -> client, by the digest of its secret."""
    credentials: Counter[str] = field(default_factory=Counter)
    """Number of boxes, by the digest of the credential token that opened them."""
    blobs: set[str] = field(default_factory=set)
    """Names of the blobs in its openings."""

    def add_box(self, box: Box) -> None:
        self.boxes[box.number] = box
        self.clients[box.number] = box.client
        self.credentials[box.credential] += 1
        self.set_presence(box, box.presence)
        self.blobs |= {box.opening.resume.blob, box.opening.loader.arguments_blob}

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
        """Record that the box abandoned an epoch. Return true if it is the first to do so after this step."""
        box.abandoned[epoch] = step
        if step in self.left:
            return False
        self.left[step] = box.number
        insort(self._left, step)
        return True

    def left_between(self, first: int, last: int) -> list[int]:
        """Return the steps from `first` to before `last` after which some box abandoned an epoch."""
        return self._left[bisect_left(self._left, first) : bisect_left(self._left, last)]

    def behind(self, box: Box, step: int) -> int | None:
        """Return the first step before `step` after which another box abandoned an epoch and this box may still do so.
        The position of this box at `step` is unknown until it reports an abandoned epoch there, or a later step."""
        if box.epoch_ended or box.presence is not BoxPresence.LIVE:
            return None
        ahead = self.left_between(box.step, step)
        own = max(box.abandoned.values(), default=-1) if ahead else -1
        return next((left for left in ahead if left > own), None)

    def all_live(self) -> bool:
        return len(self.live) == len(self.boxes)

    def any_live(self) -> bool:
        return bool(self.live)


@dataclass
class ClosedAttempt:
    """Summary of an attempt that is no longer open."""

    number: int
    key: str
    state: AttemptState
    why: str
    clients: dict[int, str]
    """Box -> client, by the digest of its secret."""


@dataclass
class Run:
    name: str
    seed: int
    num_boxes: int
    num_workers: int
    attempt: int
    """Highest attempt number used."""
    generation: int
    """Highest generation used; the next attempt starts above it."""
    current: Attempt | None = None
    past: dict[int, ClosedAttempt] = field(default_factory=dict)


class AssignedSlots:
    """Slots of a worker, and the bytes that their assignments take in a heartbeat's reply."""

    def __init__(self) -> None:
        self._sizes: dict[SlotKey, int] = {}
        self.size = 0
        """Bytes of all assignments."""

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
    name: str
    session: str
    host_id: str
    capacity: int
    local_address: str
    tcp_address: str
    registered: bool
    """False for a worker restored from the journal until it registers again. Until then it keeps its slots and gets no
    new ones."""
    lease_until: float
    seen_at: float
    version: int
    draining: bool = False
    allow: tuple[str, ...] = ()
    """Prefixes of the modules that it may run."""
    release: str = ""
    """Release of Penstock; "" = not known."""
    cores: int = 0
    """Processors that it may use; 0 = not known."""
    slots: AssignedSlots = field(default_factory=AssignedSlots)
    more_requests: bool = False
    """True if its last reply could not hold all state requests."""
    left: bool = False
    """True if the worker announced its shutdown, so that its silence does not count as a loss."""

    @property
    def load(self) -> float:
        """Share of its capacity that is taken."""
        return len(self.slots) / self.capacity if self.capacity else 1.0

    def may_run(self, module: str) -> bool:
        """Return whether the worker may run the module; true for a worker that reported no prefixes, which checks it
        itself."""
        return not self.allow or under(module, self.allow)

    @property
    def free(self) -> int:
        """Number of further slots that it can take; 0 if the assignments' large arguments already fill a heartbeat's
        reply."""
        if self.draining or not self.registered or self.slots.size >= ASSIGNMENTS_MAX:
            return 0
        return self.capacity - len(self.slots)


_DIGEST = "sha256:"
_SHOWN = 8


def client_of(client_id: str) -> str:
    """Return the digest of a client's secret. The secret proves that a box is held; the digest, which is stored in
    memory, in the journal and in messages, proves nothing."""
    return _DIGEST + hashlib.sha256(client_id.encode()).hexdigest()[:32]


def client_in(row: str) -> str:
    """Return the client of a journal row, which may hold the secret itself, as releases before this one wrote it."""
    if type(row) is not str:
        raise TypeError(f"client_id must be a text, got {type(row).__name__}")
    return row if row.startswith(_DIGEST) else client_of(row)


def shown(client: str) -> str:
    """Return a client's short name for messages."""
    return client.removeprefix(_DIGEST)[:_SHOWN]
