"""State of a run at a step, collected from all its slots. This module only plans the requests; edge/service.py waits
and sets deadlines.

The record of a box at a step can be computed from an earlier position of the box and from the ends of its slots' epochs
(penstock.proto.state.position). The coordinator knows positions that the box reported, but not all ends. So a query
runs in rounds. It computes each slot's position from the ends known so far, and asks each slot's worker for its state
there. If a worker answers that the slot's epoch ended earlier, the query records the end and computes the positions
again. Answers for positions that did not change are kept. When every slot has answered for the current plan, the record
is complete. The record is the same for every caller and at any time.

Proof that the record is right. A slot's worker checks two facts about the position (epoch, delivered, total): the epoch
began after total - delivered batches of the slot, and did not end before batch `total`. If both hold for all slots of a
box, the plan has the right start of the epoch, with all slots live, and includes the end of every slot that has ended
in it. The rest is arithmetic.

Usually all boxes abandon an epoch by `break` after the same step, but one of them reports it first. So the query then
waits for every box that has not yet reported a position beyond that step. This wait ends, because the box's loop is not
inside a collective that waits for the caller.

If a slot is being recovered, the query waits until its new worker is ready. If the training process of a box has
stopped reporting, the query waits while another box of the run reports: a process that was only stopped comes back. A
box whose epoch is over, and whose loop has not begun another one, answers with its state after its last step.

The record of a box depends on this box alone. So boxes are collected in order, a limited number of slots at a time, and
the records of a complete box may be sent and dropped before the last boxes are begun. An error may therefore come after
the records of some boxes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from penstock.appliance.core.entities import Attempt, Box, BoxPresence
from penstock.appliance.journal.snapshot_index import SlotKey
from penstock.proto.errors import (
    SAME_RELEASE,
    InvalidArgumentError,
    PenstockError,
    ProtocolError,
    StateUnavailableError,
    error_named,
)
from penstock.proto.rpc.bounds.message_bounds import owned
from penstock.proto.rpc.channel import error_of
from penstock.proto.state.epoch_labels import to_messages
from penstock.proto.state.position import Position, advance, chain_at
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

EPOCHS_SENT = 16
"""Largest number of abandoned epochs sent to a worker with a request. Few slots have more since their last durable
snapshot. A state that would need more is refused."""


@dataclass(frozen=True)
class SlotStateRequest:
    """Request to a worker for the state of one of its slots at a position (epoch, delivered in it, total)."""

    key: SlotKey
    generation: int
    worker: str
    step: int
    epoch: int
    delivered: int
    total: int
    digests_after: int = field(compare=False)
    """Total of the slot at the box's nearest reported position. The worker returns the digests of the slot's batches
    after it, with which the box's stream digest is continued."""
    round: int
    """Number of the slot's answers so far that reported the end of an epoch instead of a state. It gives a request that
    is repeated after such an answer a new id."""
    serial: int
    """Serial number of the query that sends the request."""
    abandoned: tuple[tuple[int, int], ...] = field(default=(), compare=False, kw_only=True)
    """Epochs that the loop abandoned before the slot had ended them, as (epoch, the slot's total when the loop left
    it). All such epochs from `abandoned_from` on are in the tuple."""
    abandoned_from: int = field(default=0, compare=False, kw_only=True)
    labels: dict[int, int] = field(default_factory=dict, compare=False, kw_only=True)
    """Labels of epochs (proto/state/epoch_labels.py)."""
    at_end: bool = field(default=False, compare=False, kw_only=True)
    """True if the loop of a box has taken its epoch to the end at this step. The slot's epoch then usually ends here as
    well, and the state must say so: only between two epochs can a pure loader be resumed on another topology."""

    @property
    def id(self) -> str:
        """Id of the request. It is made of the request's content, so that a repeated or late answer is never taken for
        the answer to another request."""
        where = f"{self.key.run}@{self.key.attempt}/{self.key.box}.{self.key.slot}#{self.generation}"
        return f"{where}:{self.step}:{self.epoch}.{self.delivered}.{self.total}:{self.round}:{self.serial}"

    def request(self, deadline_s: float) -> pb.StateRequest:
        return pb.StateRequest(
            request=self.id,
            **self.key._asdict(),
            generation=self.generation,
            step=self.step,
            epoch=self.epoch,
            position=records_pb2.SlotPosition(delivered=self.delivered, total=self.total),
            deadline_s=deadline_s,
            digests_after=self.digests_after,
            abandoned=[records_pb2.EpochEnd(epoch=epoch, total=total) for epoch, total in self.abandoned],
            abandoned_from=self.abandoned_from,
            labels=to_messages(self.labels),
            at_end=self.at_end,
        )


def _abandoned_before(box: Box, position: Position) -> tuple[int, list[tuple[int, dict[int, int]]]]:
    """Return the epochs that the box's loop abandoned before this position, at most EPOCHS_SENT, and the epoch from
    which on the list is complete. An entry is (epoch, {slot: the slot's total when the loop left the epoch}). Slots
    that had already ended the epoch are missing in the entry."""
    left: list[tuple[int, dict[int, int]]] = []
    for epoch in reversed(box.abandoned):
        if epoch >= position.epoch:
            continue
        start = box.position_before(box.abandoned[epoch])
        there = None if start is None else advance(start, box.abandoned[epoch], box.ends, box.abandoned)
        if there is None or there.epoch != epoch or len(left) == EPOCHS_SENT:
            return epoch + 1, left
        left.append((epoch, {k: there.total[k] for k in there.live}))
    return 0, left


def _has_seen_end(box: Box, slot: int, epoch: int, total: int) -> bool:
    """Return whether the box's loop has reached the end of the slot's epoch after the slot's batch `total`."""
    return epoch not in box.abandoned and box.ends.get((slot, epoch)) == total


@dataclass(frozen=True)
class _Answer:
    slot_request: SlotStateRequest
    answer: pb.StateAnswer
    data: bytes


@dataclass
class BoxState:
    """States of one box's slots at a step, in order of the slots, and the box's position there. A state is a
    WorkerRecord, with what Penstock knows of the slot, and the bytes of the loader's state."""

    records: list[tuple[pb.WorkerRecord, bytes]]
    position: records_pb2.BoxPosition | None = None
    final: int | None = None
    """Last step of the box if its epoch had ended before the requested step. The states are then those after this last
    step, and are valid until the box takes another step. None: the states are those at the requested step."""

    @property
    def size(self) -> int:
        return sum(len(data) for _, data in self.records)

    @cached_property
    def heads(self) -> list[bytes]:
        """Serialised StatePart of each slot, without the loader's state. The first one contains the box's position."""
        return [
            pb.StatePart(record=record, position=None if index else self.position).SerializeToString()
            for index, (record, _) in enumerate(self.records)
        ]

    @property
    def message_size(self) -> int:
        """Size in bytes of a message with all states of the box; an upper bound."""
        return self.size + sum(len(head) + 8 for head in self.heads)


@dataclass
class GatheredState:
    """Complete result of a state query."""

    records: list[tuple[pb.WorkerRecord, bytes]]
    positions: dict[int, records_pb2.BoxPosition]
    finals: dict[int, int]
    """Box -> its last step, for each box whose epoch had ended before the requested step. The result has the final
    states of these boxes, and is valid until one of them takes another step."""


@dataclass(eq=False)
class StateQuery:
    """Query for the states of all slots of a run at one step, shared by all callers that request this step."""

    run: str
    attempt: int
    step: int
    serial: int = 0
    """Serial number of the query, unique also across restarts. It is part of each request's id, so that a repeated
    query sends new requests."""
    num_boxes: int = 1
    at_once: int = 1 << 30
    """Largest number of slots with an open request at the same time."""
    callers: int = 0
    deadline: float = 0.0
    """Latest deadline of the query's callers, in monotonic seconds."""
    requests: dict[str, SlotStateRequest] = field(default_factory=dict)
    by_worker: dict[str, dict[str, SlotStateRequest]] = field(default_factory=dict)
    """Worker -> its open requests, by request id."""
    boxes: dict[int, BoxState] = field(default_factory=dict)
    """Complete boxes whose states are still in memory, by number."""
    complete: int = 0
    """Number of boxes of which all slots have answered for the final plan."""
    released: bool = False
    """True if states were dropped from memory after they were sent, so that no further caller can join the query."""
    sent: dict[int, int] = field(default_factory=dict)
    """Complete box -> number of the present callers to which its states were sent."""
    coming: dict[str, int] = field(default_factory=dict)
    """Request id -> size of its answer in bytes, for answers that are being received."""
    held: int = 0
    """Number of bytes of answers that are in memory or being received."""
    changed: list[SlotStateRequest] = field(default_factory=list)
    """Requests to workers that were opened or withdrawn since the workers were last told."""
    completed: list[int] = field(default_factory=list)
    """Numbers of the boxes that became complete since the callers were last told."""
    failure: PenstockError | None = None
    restarts: int | None = None
    """Value of `Attempt.restarts` for which the present answers are valid. A caller that has got some of them must not
    get others after a change."""
    _asked_boxes: int = 0
    """Number of boxes whose slots have been asked so far. Boxes are begun in the order of their numbers."""
    _open_requests: dict[int, dict[str, SlotStateRequest]] = field(default_factory=dict)
    """Open requests, by id, of each box that was begun and is not yet complete."""
    _answers: dict[tuple[int, int], _Answer] = field(default_factory=dict)
    _rounds: dict[tuple[int, int], int] = field(default_factory=dict)
    _denied: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)
    """(box, slot) -> position that the slot's worker refused without reporting a new end of an epoch; the ends of
    epochs known then; the epochs abandoned by then. The worker would refuse the position again, so the slot gets no new
    request until one of the three has changed."""
    _starts: dict[int, Position] = field(default_factory=dict)
    """Box -> the newest reported position after which digests were requested. It is still used if later reports have
    replaced it in the cluster state."""
    _missing: dict[int, list[str]] = field(default_factory=dict)
    """Box -> what is missing for its completion, apart from answers of workers; as text."""

    def topic(self, box: int) -> tuple[str | int, ...]:
        """Return the topic that is announced when the box is complete. If the query fails, the topics of all boxes are
        announced."""
        return ("state", self.serial, box)

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Key of the requested state. Callers that request the same key share the query."""
        return (self.run, self.attempt, self.step, "")

    @property
    def done(self) -> bool:
        return self.failure is not None or self.complete == self.num_boxes

    @property
    def result(self) -> GatheredState | None:
        """Result with the states of all boxes; None while the query is not complete, and after states were dropped."""
        if self.failure is not None or len(self.boxes) < self.num_boxes:
            return None
        states = sorted(self.boxes.items())
        return GatheredState(
            [record for _, state in states for record in state.records],
            {number: state.position for number, state in states if state.position is not None},
            self.finals,
        )

    @property
    def finals(self) -> dict[int, int]:
        return {number: state.final for number, state in self.boxes.items() if state.final is not None}

    def waits_for(self) -> str:
        """Return a text that names the slots and boxes for which the query still waits."""
        asked = [f"box {w.key.box} slot {w.key.slot} on worker {w.worker}" for w in self.requests.values()]
        missing = [what for _, box in sorted(self._missing.items()) for what in box]
        later = self.num_boxes - self._asked_boxes
        return ", ".join([*missing, *asked, *([f"{later} boxes after these"] if later > 0 else [])])

    def is_next(self, slot_request: SlotStateRequest) -> bool:
        return slot_request.key.box == min(self._open_requests, default=self._asked_boxes)

    def fail(self, error: PenstockError) -> None:
        self.failure = error
        self.ask_no_more()

    def ask_no_more(self) -> None:
        for number in list(self._open_requests):
            self._ask(number, {})
        self._open_requests.clear()
        self._missing.clear()
        self._starts.clear()
        self._answers.clear()
        self.held = sum(state.size for state in self.boxes.values())
        self.coming.clear()

    def refresh(self, attempt: Attempt, box: int | None = None) -> None:
        """Plan the requests again from the present cluster state. `box`: the box that changed; None: all boxes."""
        if self.done:
            return
        try:
            if attempt.restarts != self.restarts:
                self._begin_again(attempt)
            if not attempt.any_live():  # the end of the last box decides about all that are waited for
                box = None
            for number in list(self._open_requests) if box is None else [box] if box in self._open_requests else []:
                self._refresh(attempt, number)
            self._begin_boxes(attempt)
        except PenstockError as error:
            self.fail(error)

    def restarted(self) -> StateUnavailableError:
        """Return the error for a caller that has got states which do not belong to the present answers."""
        return StateUnavailableError(
            f"{self.title}: the run's loaders were restarted from a saved state while this state was sent, because a "
            "worker was lost: save again"
        )

    def _begin_again(self, attempt: Attempt) -> None:
        """Drop all answers: the slots' loaders have been started anew, from another state, and count from there."""
        self.ask_no_more()
        self.boxes.clear()
        self.sent.clear()
        self._rounds.clear()
        self._denied.clear()
        self.held = self.complete = self._asked_boxes = 0
        self.restarts = attempt.restarts

    def _begin_boxes(self, attempt: Attempt) -> None:
        """Begin with further boxes, as long as the limit on open requests allows it."""
        while self._asked_boxes < self.num_boxes:
            if self._open_requests and len(self.requests) + attempt.num_workers > self.at_once:
                return
            number = self._asked_boxes
            self._asked_boxes += 1
            self._open_requests[number] = {}
            self._refresh(attempt, number)

    def _ask(self, number: int, slot_requests: dict[str, SlotStateRequest]) -> None:
        """Replace the open requests of box `number` by `slot_requests` (request id -> request)."""
        before = self._open_requests.get(number, {})
        for request, slot_request in before.items():
            if request not in slot_requests:
                del self.requests[request]
                del self.by_worker[slot_request.worker][request]
                if not self.by_worker[slot_request.worker]:
                    del self.by_worker[slot_request.worker]
                self.held -= self.coming.pop(request, 0)
                self.changed.append(slot_request)
        for request, slot_request in slot_requests.items():
            if request not in before:
                self.requests[request] = slot_request
                self.by_worker.setdefault(slot_request.worker, {})[request] = slot_request
                self.changed.append(slot_request)
        self._open_requests[number] = slot_requests

    def _refresh(self, attempt: Attempt, number: int) -> None:
        requests: dict[str, SlotStateRequest] = {}
        missing = self._missing[number] = []
        denied: list[str] = []
        doubtful: list[str] = []
        box = attempt.boxes.get(number)
        if box is None:
            missing.append(f"box {number} (has not opened the run)")
            return
        if not box.reported and box.presence is BoxPresence.LIVE:
            missing.append(f"box {number} (has not reported since the coordinator started)")
            self._ask(number, {})
            return
        state = BoxState([])
        start, position = self._position(box, state, doubtful)
        start = max(start, self._starts.get(number, start), key=lambda at: at.step)
        self._starts[number] = start
        if box.presence is BoxPresence.GONE:
            if not attempt.any_live():
                raise StateUnavailableError(
                    f"the state of run {self.run} at step {self.step} is not available, because its training processes "
                    f"have stopped reporting (also that of box {number}), and their workers were freed. Retry once the "
                    "training processes report again; if they are dead, resume from an earlier state"
                )
            missing.append(
                f"box {number} (its training process has stopped reporting, and its workers were freed: if the process "
                "is dead, start the job again)"
            )
            self._ask(number, {})
            return
        behind = attempt.unreported_abandonment(box, self.step)
        if behind is not None:
            other = attempt.abandoned_after[behind]
            missing.append(
                f"box {number} (has not reported a step beyond {behind}, after which box {other} abandoned an epoch)"
            )
            self._ask(number, {})
            return
        abandoned_from, left = _abandoned_before(box, position)
        at_end = any(other.epoch_ended and other.step == self.step for other in attempt.boxes.values())
        for slot in box.slots:
            k = slot.key.slot
            place = (position.epoch, position.delivered[k], position.total[k])
            have = self._answers.get((number, k))
            if (
                have is not None
                and (have.slot_request.epoch, have.slot_request.delivered, have.slot_request.total) == place
            ):
                continue
            if self._denied.get((number, k)) == (place, box.ends, box.abandoned):
                denied.append(f"{slot} on worker {slot.worker}")
                continue
            if slot.phase == pb.FAILED and slot.error is not None:
                raise self._of_slot(error_of(slot.error), slot.key, slot.worker)
            if slot.phase == pb.READY:
                rounds, after = self._rounds.get((number, k), 0), start.total[k]
                abandoned = tuple((epoch, totals[k]) for epoch, totals in left if k in totals)
                slot_request = SlotStateRequest(
                    slot.key,
                    slot.generation,
                    slot.worker,
                    self.step,
                    *place,
                    after,
                    rounds,
                    self.serial,
                    abandoned=abandoned,
                    abandoned_from=abandoned_from,
                    labels=box.labels_to(position.epoch),
                    at_end=at_end and not _has_seen_end(box, k, position.epoch, position.total[k]),
                )
                requests[slot_request.id] = slot_request
            elif slot.phase == pb.STARTING:
                missing.append(f"{slot} (starting on worker {slot.worker})")
            else:
                missing.append(f"{slot} (waiting for a worker)")
        self._ask(number, requests)
        if requests or missing:
            return
        if denied or doubtful:
            raise ProtocolError(
                f"the state of run {self.run} at step {self.step} cannot be computed: the workers disagree about the "
                "batch after which an epoch ended. Check that the loader is deterministic in "
                f"{', '.join(denied + doubtful)}"
            )
        self._record_digest(box, start, position)
        position.labels = box.labels_to(position.epoch)
        state.position = position.to_proto()
        self._assemble(attempt, number, state)
        self._completed(number, state)

    def _completed(self, number: int, state: BoxState) -> None:
        del self._open_requests[number], self._missing[number]
        self._starts.pop(number, None)
        self.boxes[number], self.sent[number] = state, 0
        self.complete += 1
        self.completed.append(number)

    def _position(self, box: Box, state: BoxState, doubtful: list[str]) -> tuple[Position, Position]:
        """Return two positions of the box: the reported one from which the plan starts, and the computed one at the
        query's step. `doubtful`: list to which the box's name is added if the computed position is still uncertain.
        Raises StateUnavailableError."""
        where = f"step {self.step} of run {self.run}: box {box.number}"
        if box.presence is BoxPresence.CLOSED and not any(slot.worker for slot in box.slots):
            raise StateUnavailableError(
                f"{where} has closed and its workers were freed: save the state before any rank closes its Appliance"
            )
        if box.presence is BoxPresence.CLOSED and not box.reported:
            raise StateUnavailableError(
                f"{where} has closed, and the coordinator has restarted since and lost the last position of the box: "
                "save the state before any rank closes its Appliance"
            )
        if self.step < box.launch_step and not box.epoch_ended:
            raise StateUnavailableError(
                f"{where}: this launch {box.launched}, and earlier states are not kept: request step {box.launch_step} "
                "or a later one"
            )
        at = self.step
        if box.epoch_ended and box.step < self.step:
            at = state.final = box.step
        at = max(at, box.launch_step)
        start = box.position_before(at)
        # A restarted coordinator has every epoch start, but the workers may have dropped snapshots before the window.
        unkept = box.restored and start is box.start and at < box.step - box.retention
        if start is None or unkept:
            raise StateUnavailableError(
                f"{where} is more than retention_steps={box.retention} steps past that step, so the state was dropped: "
                "request a later step, or raise retention_steps"
            )
        position = advance(start, at, box.ends, box.abandoned)
        if sum(position.total) - sum(start.total) != at - start.step or box.is_refuted(position):
            # Some ends of epochs are not known yet. Requests can be sent, and their answers will tell the ends.
            doubtful.append(f"box {box.number}")
        return start, position

    @property
    def title(self) -> str:
        """Name of the query in messages."""
        return f"state of run {self.run} at step {self.step}"

    def _of_slot(self, error: PenstockError, key: SlotKey, worker: str) -> PenstockError:
        on = f" on worker {worker}" if worker else ""
        message = f"{self.title}: box {key.box} slot {key.slot}{on}: {error.message}"
        return error_named(type(error).__name__, message, error.remote_traceback)

    def answered(self, attempt: Attempt, answer: pb.StateAnswer, data: bytes) -> None:
        """Record a worker's answer to a request. An answer to a request that was withdrawn changes nothing."""
        slot_request = self.requests.get(answer.request)
        if slot_request is None or answer.worker != slot_request.worker:
            return
        box = attempt.boxes[slot_request.key.box]
        if answer.HasField("error"):
            self.fail(self._of_slot(error_of(answer.error), slot_request.key, slot_request.worker))
            return
        if answer.ended:
            self._ended(attempt, box, slot_request, answer)
            return
        if len(answer.digests) > max(0, slot_request.total - answer.digests_after):
            raise InvalidArgumentError(
                f"a worker's answer must have at most one digest for each of batches {answer.digests_after + 1} to "
                f"{slot_request.total}, got {len(answer.digests)}. {SAME_RELEASE}"
            )
        place = (slot_request.key.box, slot_request.key.slot)
        before = self._answers.get(place)
        self.held += len(data) - self.coming.pop(answer.request, 0) - (len(before.data) if before else 0)
        self._answers[place] = _Answer(slot_request, owned(answer), data)
        self.refresh(attempt, slot_request.key.box)

    def _ended(self, attempt: Attempt, box: Box, slot_request: SlotStateRequest, answer: pb.StateAnswer) -> None:
        if (answer.ended_epoch, answer.ended_total) >= (slot_request.epoch, slot_request.total):
            error = ProtocolError(
                f"an epoch end in the answer must be before batch {slot_request.total} of epoch {slot_request.epoch}, "
                f"got the end of epoch {answer.ended_epoch} after batch {answer.ended_total}: check that the loader is "
                "deterministic"
            )
            self.fail(self._of_slot(error, slot_request.key, slot_request.worker))
            return
        slot, before = (box.number, slot_request.key.slot), dict(box.ends)
        reported = [(end.epoch, end.total) for end in answer.ends]
        for epoch, total in [*reported, (answer.ended_epoch, answer.ended_total)]:
            # An abandoned epoch ended where the loop left it, even if the worker had produced more: the smaller total
            # counts.
            end = (slot_request.key.slot, epoch)
            box.ends[end] = min(total, box.ends.get(end, total))
        self._rounds[slot] = self._rounds.get(slot, 0) + 1
        if box.ends == before:
            place = (slot_request.epoch, slot_request.delivered, slot_request.total)
            self._denied[slot] = (place, before, dict(box.abandoned))
        self.refresh(attempt, box.number)

    def _record_digest(self, box: Box, start: Position, position: Position) -> None:
        """Compute the box's stream digest at `position`, from the digest at the reported position `start` and the
        digests of the batches since, which the workers sent."""
        position.chain = box.chain(position.step)
        if position.chain is None:
            digests: dict[tuple[int, int], int] = {}
            for slot in box.slots:
                have = self._answers[box.number, slot.key.slot]
                first = have.answer.digests_after + 1
                batches = enumerate(have.answer.digests, first)
                digests |= {(slot.key.slot, total): digest for total, digest in batches}
            position.chain = chain_at(start, position.step, box.ends, box.abandoned, digests)

    def _assemble(self, attempt: Attempt, number: int, state: BoxState) -> None:
        box = attempt.boxes[number]
        for slot in box.slots:
            have = self._answers.pop((number, slot.key.slot))
            answer, epoch = have.answer, have.slot_request.epoch
            # A runner that took over may not have come to the end that the loop has seen.
            seen = _has_seen_end(box, slot.key.slot, epoch, have.slot_request.total)
            capabilities = answer.capabilities if answer.HasField("capabilities") else slot.capabilities
            record = pb.WorkerRecord(
                local_worker_id=slot.key.slot,
                num_workers_per_box=attempt.num_workers,
                num_boxes=attempt.num_boxes,
                box=number,
                step=self.step,
                worker_step=have.slot_request.total,
                samples_streamed=answer.samples_streamed,
                state_bytes=len(have.data),
                epoch=epoch,
                capabilities=capabilities,
                digest=answer.digest,
                next_digest=answer.next_digest,
                next_epoch=answer.next_epoch or (seen and not answer.next_digest),
                chain=answer.chain,
            )
            state.records.append((record, have.data))


# ---- tasks for one worker, which wait and answer as a state query does


@dataclass(frozen=True)
class TaskRequest(SlotStateRequest):
    """Request to one worker to aggregate the states in a blob (uploaded data), or to try a change of a mixture."""

    blob: str = ""
    trial: pb.MixtureTrial | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        return f"{super().id}:{self.blob}"

    def request(self, deadline_s: float) -> pb.StateRequest:
        request = super().request(deadline_s)
        if self.trial is None:
            request.aggregate_blob = self.blob
        else:
            request.mixture.CopyFrom(self.trial)
        return request


@dataclass(eq=False)
class Aggregation(StateQuery):
    """Query for an aggregation of states by the loader's aggregate_state_dict, for a training job that cannot build the
    loader itself, for example because the data that input_fn reads are only on the workers' machines. The client
    uploads the workers' states as a blob. Any worker of the box can aggregate them, because every worker returns the
    same result: the first ready slot of the box `box` is asked. The result counts as the state of box 0 of a run with
    one box, so `StateQuery` needs no other code to wait for it and send it."""

    box: int = 0
    blob: str = ""
    trial: pb.MixtureTrial | None = None
    slot: int | None = None
    """Number of the slot that is asked; None: the first slot that is ready."""

    @property
    def key(self) -> tuple[str, int, int, str]:
        return (self.run, self.attempt, self.step, self.blob)

    def is_next(self, slot_request: SlotStateRequest) -> bool:
        return True

    def refresh(self, attempt: Attempt, box: int | None = None) -> None:
        super().refresh(attempt)  # the query has one box, number 0, whichever box its request is for

    def _refresh(self, attempt: Attempt, number: int) -> None:
        box = attempt.boxes.get(self.box)
        if box is None:
            raise StateUnavailableError(
                f"the states of run {self.run} cannot be aggregated yet, because box {self.box}, whose worker does "
                "this, has not opened the run: retry once the box has opened the run"
            )
        able = box.slots if self.slot is None else [box.slots[self.slot]]
        ready = next((slot for slot in able if slot.phase == pb.READY), None)
        self._missing[number] = [] if ready is not None else [f"a worker of box {self.box}"]
        slot_requests: dict[str, SlotStateRequest] = {}
        if ready is not None:
            task = TaskRequest(
                *(ready.key, ready.generation, ready.worker, self.step, 0, 0, 0, 0, 0, self.serial),
                blob=self.blob,
                trial=self.trial,
            )
            slot_requests[task.id] = task
        self._ask(number, slot_requests)

    def answered(self, attempt: Attempt, answer: pb.StateAnswer, data: bytes) -> None:
        slot_request = self.requests.get(answer.request)
        if slot_request is None or answer.worker != slot_request.worker:
            return
        if answer.HasField("error"):
            self.fail(self._of_slot(error_of(answer.error), slot_request.key, slot_request.worker))
            return
        self.held += len(data) - self.coming.pop(answer.request, 0)
        self._ask(0, {})
        record = pb.WorkerRecord(box=slot_request.key.box, local_worker_id=slot_request.key.slot, state_bytes=len(data))
        self._completed(0, BoxState([(record, data)]))


@dataclass(eq=False)
class MixtureTrial(Aggregation):
    """Query for the trial of a change of a mixture's weights, before the change is made. Only user code knows the
    sources of a mixture. So a helper process of one slot makes the loader and applies the change. It returns the
    change's position in the order of samples, and the weights of all sources. A source that is added may be missing on
    a worker, so a change that adds sources is tried on each worker of the run. `blob`: key of the change and number of
    the trial, because queries with the same `blob` would count as one query."""

    epoch: int = 0
    """Epoch in which the boxes are expected to be at the step of the change."""
    changes: int = 0
    """Number of earlier changes of the run's mixture."""

    @property
    def title(self) -> str:
        return f"trial of a change of the mixture of run {self.run}"
