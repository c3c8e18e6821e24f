"""State of a run at a step, collected from all its slots. This module plans the requests; server/service.py waits.

A box's record can be computed from an earlier position and the ends of its slots' epochs
(penstock.proto.state.position), of which the coordinator knows not all. So a query computes each slot's position from
the ends known so far, and asks its worker for the state there. If a worker answers that the epoch ended earlier,
positions are computed again, and answers for unchanged ones are kept. When every slot has answered for the current
plan, the record is complete, and the same for every caller at any time.

Proof. A worker checks of its position (epoch, delivered, total) that the epoch began after total - delivered batches,
and did not end before `total`. If both hold for all slots of a box, the plan has the right start of the epoch, with all
slots live, and every end in it. The rest is arithmetic.

All boxes usually abandon an epoch after the same step, but one reports it first: so the query waits for every box that
has not reported beyond it, which ends, because the box's loop is not in a collective that waits for the caller. It also
waits for a slot that is recovered, and for a silent training process while another box reports. A box whose epoch is
over, and whose loop has not begun another, answers with its state after its last step.

Boxes are collected in order, and a complete one may be sent and dropped before the last is begun. So an error may come
after the records of some boxes.
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
from penstock.proto.rpc.wire_errors import error_of
from penstock.proto.state.epoch_labels import to_messages
from penstock.proto.state.position import Position, advance, chain_at
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

EPOCHS_SENT = 16
"""Most abandoned epochs sent with a request; few slots have more since their last durable snapshot. A state that would
need more is refused."""


@dataclass(frozen=True)
class SlotStateRequest:
    """Request to a worker for the state of a slot at a position, or for another task."""

    key: SlotKey
    worker: str
    message: pb.StateRequest
    """The request without its deadline. Its id is made of its content, so that a late answer is never taken for that
    to another request."""

    @property
    def id(self) -> str:
        return self.message.request

    @property
    def place(self) -> tuple[int, int, int]:
        """Epoch, batches delivered in it, and total."""
        return self.message.epoch, self.message.position.delivered, self.message.position.total

    def request(self, deadline_s: float) -> pb.StateRequest:
        self.message.deadline_s = deadline_s
        return self.message


def _abandoned_before(box: Box, position: Position) -> tuple[int, list[tuple[int, dict[int, int]]]]:
    """Return the epochs that the loop abandoned before this position, at most EPOCHS_SENT, as (epoch, {slot: its total
    then}, without slots that had ended it), and the epoch from which on they are complete."""
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
    """Return whether the box's loop has reached the end of the slot's epoch after batch `total`."""
    return epoch not in box.abandoned and box.ends.get((slot, epoch)) == total


@dataclass(frozen=True)
class _Answer:
    slot_request: SlotStateRequest
    answer: pb.StateAnswer
    data: bytes


@dataclass
class BoxState:
    """States of a box's slots at a step, and its position. A state is a WorkerRecord and the loader's bytes."""

    records: list[tuple[pb.WorkerRecord, bytes]]
    position: records_pb2.BoxPosition | None = None
    final: int | None = None
    """Last step of a box whose epoch had ended before; the states are those after it, valid until its next step."""

    @property
    def size(self) -> int:
        return sum(len(data) for _, data in self.records)

    @cached_property
    def heads(self) -> list[bytes]:
        """Serialised StatePart of each slot, without the loader's state; the first has the box's position."""
        return [
            pb.StatePart(record=record, position=None if index else self.position).SerializeToString()
            for index, (record, _) in enumerate(self.records)
        ]

    @property
    def message_size(self) -> int:
        """Upper bound of the bytes of a message with all states of the box."""
        return self.size + sum(len(head) + 8 for head in self.heads)


@dataclass(eq=False)
class StateQuery:
    """Query for the states of all slots of a run at one step, shared by all callers for it."""

    run: str
    attempt: int
    step: int
    serial: int = 0
    """Serial number, unique also across restarts; in each request's id, so that a repeated query sends new ones."""
    num_boxes: int = 1
    at_once: int = 1 << 30
    """Most slots with an open request at a time."""
    callers: int = 0
    deadline: float = 0.0
    """Latest deadline of the callers, in monotonic seconds."""
    requests: dict[str, SlotStateRequest] = field(default_factory=dict)
    by_worker: dict[str, dict[str, SlotStateRequest]] = field(default_factory=dict)
    """Worker -> its open requests, by request id."""
    boxes: dict[int, BoxState] = field(default_factory=dict)
    """Complete boxes whose states are still in memory."""
    complete: int = 0
    """Boxes of which all slots have answered for the final plan."""
    released: bool = False
    """True if states were dropped after they were sent, so that no further caller can join."""
    sent: dict[int, int] = field(default_factory=dict)
    """Complete box -> present callers to which it was sent."""
    coming: dict[str, int] = field(default_factory=dict)
    """Request id -> bytes of an answer that is being received."""
    held: int = 0
    """Bytes of answers in memory or being received."""
    changed: list[SlotStateRequest] = field(default_factory=list)
    """Requests opened or withdrawn since the workers were last told."""
    completed: list[int] = field(default_factory=list)
    """Boxes that became complete since the callers were last told."""
    failure: PenstockError | None = None
    blob: str = ""
    """Of an Aggregation."""
    restarts: int | None = None
    """`Attempt.restarts` for which the answers are valid: a caller that has some must not get others."""
    _asked_boxes: int = 0
    """Boxes asked so far, in the order of their numbers."""
    _open_requests: dict[int, dict[str, SlotStateRequest]] = field(default_factory=dict)
    """Open requests, by id, of each box that was begun and is not complete."""
    _answers: dict[tuple[int, int], _Answer] = field(default_factory=dict)
    _rounds: dict[tuple[int, int], int] = field(default_factory=dict)
    _denied: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)
    """(box, slot) -> refused position, known ends and abandoned epochs: no new request until one changes."""
    _starts: dict[int, Position] = field(default_factory=dict)
    """Box -> newest position after which digests were requested, also if later reports have replaced it."""
    _missing: dict[int, list[str]] = field(default_factory=dict)
    """Box -> what is missing for it apart from answers, as text."""

    def topic(self, box: int) -> tuple[str | int, ...]:
        """Return the topic announced when the box is complete; if the query fails, those of all boxes are."""
        return ("state", self.serial, box)

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Callers that request the same key share the query."""
        return (self.run, self.attempt, self.step, self.blob)

    @property
    def done(self) -> bool:
        return self.failure is not None or self.complete == self.num_boxes

    @property
    def finals(self) -> dict[int, int]:
        return {number: state.final for number, state in self.boxes.items() if state.final is not None}

    def waits_for(self) -> str:
        """Return a text that names the slots and boxes for which the query waits."""
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
        """Plan the requests again from the cluster state. `box`: the one that changed; None: all."""
        if self.done:
            return
        try:
            if attempt.restarts != self.restarts:
                self._begin_again(attempt)
            if not attempt.live:  # the end of the last box decides about all that are waited for
                box = None
            for number in list(self._open_requests) if box is None else [box] if box in self._open_requests else []:
                self._refresh(attempt, number)
            self._begin_boxes(attempt)
        except PenstockError as error:
            self.fail(error)

    def restarted(self) -> StateUnavailableError:
        """Return the error for a caller whose states do not belong to the present answers."""
        return StateUnavailableError(f"{self.title}: the run was restarted while this state was sent: save again")

    def _begin_again(self, attempt: Attempt) -> None:
        """Drop all answers: the loaders were started anew, from another state, and count from there."""
        self.ask_no_more()
        self.boxes.clear()
        self.sent.clear()
        self._rounds.clear()
        self._denied.clear()
        self.held = self.complete = self._asked_boxes = 0
        self.restarts = attempt.restarts

    def _begin_boxes(self, attempt: Attempt) -> None:
        """Begin with further boxes, as far as the limit on open requests allows."""
        while self._asked_boxes < self.num_boxes:
            if self._open_requests and len(self.requests) + attempt.num_workers > self.at_once:
                return
            number = self._asked_boxes
            self._asked_boxes += 1
            self._open_requests[number] = {}
            self._refresh(attempt, number)

    def _ask(self, number: int, slot_requests: dict[str, SlotStateRequest]) -> None:
        """Replace the open requests of box `number`, by request id."""
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
            if not attempt.live:
                raise StateUnavailableError(
                    f"{self.title}: its training processes have stopped reporting (box {number}), so their workers "
                    "were freed: retry once they report, or resume from an earlier state"
                )
            missing.append(f"box {number} (its training process has stopped reporting, so its workers were freed)")
            self._ask(number, {})
            return
        behind = attempt.unreported_abandonment(box, self.step)
        if behind is not None:
            other = attempt.abandoned_after[behind]
            missing.append(f"box {number} (at step {behind}, where box {other} abandoned an epoch)")
            self._ask(number, {})
            return
        abandoned_from, left = _abandoned_before(box, position)
        labels = to_messages(box.labels_to(position.epoch))
        at_end = any(other.epoch_ended and other.step == self.step for other in attempt.boxes.values())
        for slot in box.slots:
            k = slot.key.slot
            place = (position.epoch, position.delivered[k], position.total[k])
            have = self._answers.get((number, k))
            if have is not None and have.slot_request.place == place:
                continue
            if self._denied.get((number, k)) == (place, box.ends, box.abandoned):
                denied.append(f"{slot} on worker {slot.worker}")
                continue
            if slot.phase == pb.FAILED and slot.error is not None:
                raise self._of_slot(error_of(slot.error), slot.key, slot.worker)
            if slot.phase == pb.READY:
                where = f"{self.run}@{self.attempt}/{number}.{k}#{slot.generation}"
                at = f"{position.epoch}.{position.delivered[k]}.{position.total[k]}"
                # The round gives the request a new id once an answer has reported an end of an epoch instead.
                request_id = f"{where}:{self.step}:{at}:{self._rounds.get((number, k), 0)}:{self.serial}"
                message = pb.StateRequest(
                    request=request_id,
                    **slot.key._asdict(),
                    generation=slot.generation,
                    step=self.step,
                    epoch=position.epoch,
                    position=records_pb2.SlotPosition(delivered=position.delivered[k], total=position.total[k]),
                    digests_after=start.total[k],
                    abandoned=[records_pb2.EpochEnd(epoch=e, total=totals[k]) for e, totals in left if k in totals],
                    abandoned_from=abandoned_from,
                    labels=labels,
                    at_end=at_end and not _has_seen_end(box, k, position.epoch, position.total[k]),
                )
                requests[request_id] = SlotStateRequest(slot.key, slot.worker, message)
            elif slot.phase == pb.STARTING:
                missing.append(f"{slot} (starting on worker {slot.worker})")
            else:
                missing.append(f"{slot} (waiting for a worker)")
        self._ask(number, requests)
        if requests or missing:
            return
        if denied or doubtful:
            raise ProtocolError(
                f"{self.title}: the workers disagree about the batch after which an epoch ended. Check that the loader "
                f"is deterministic in {', '.join(denied + doubtful)}"
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
        """Return the reported position from which the plan starts, and the computed one at the step. A box whose
        computed position is uncertain is added to `doubtful`. Raises StateUnavailableError."""
        where = f"step {self.step} of run {self.run}: box {box.number}"
        if box.presence is BoxPresence.CLOSED and not (box.reported and any(slot.worker for slot in box.slots)):
            raise StateUnavailableError(f"{where} has closed: save the state before any rank closes its Appliance")
        if self.step < box.launch_step and not box.epoch_ended:
            raise StateUnavailableError(f"{where}: this launch {box.launched}: request no earlier step")
        at = self.step
        if box.epoch_ended and box.step < self.step:
            at = state.final = box.step
        at = max(at, box.launch_step)
        start = box.position_before(at)
        # A restarted coordinator has every epoch start, but the workers may have dropped snapshots before the window.
        unkept = box.restored and start is box.start and at < box.step - box.retention
        if start is None or unkept:
            raise StateUnavailableError(
                f"{where} is more than retention_steps={box.retention} steps past it: request a later step"
            )
        position = advance(start, at, box.ends, box.abandoned)
        if sum(position.total) - sum(start.total) != at - start.step or box.is_refuted(position):
            # Some ends of epochs are not known yet. Requests can be sent, and their answers will tell the ends.
            doubtful.append(f"box {box.number}")
        return start, position

    @property
    def title(self) -> str:
        return f"state of run {self.run} at step {self.step}"

    def _of_slot(self, error: PenstockError, key: SlotKey, worker: str) -> PenstockError:
        on = f" on worker {worker}" if worker else ""
        message = f"{self.title}: box {key.box} slot {key.slot}{on}: {error.message}"
        return error_named(type(error).__name__, message, error.remote_traceback)

    def answered(self, attempt: Attempt, answer: pb.StateAnswer, data: bytes) -> None:
        """Record an answer; one to a request that was withdrawn changes nothing."""
        slot_request = self.requests.get(answer.request)
        if slot_request is None or answer.worker != slot_request.worker:
            return
        if answer.HasField("error"):
            self.fail(self._of_slot(error_of(answer.error), slot_request.key, slot_request.worker))
        elif answer.ended:
            self._ended(attempt, attempt.boxes[slot_request.key.box], slot_request, answer)
        else:
            self._take(attempt, slot_request, answer, data)

    def _take(self, attempt: Attempt, slot_request: SlotStateRequest, answer: pb.StateAnswer, data: bytes) -> None:
        most = max(0, slot_request.place[2] - answer.digests_after)
        if len(answer.digests) > most:
            raise InvalidArgumentError(
                f"an answer must have at most {most} digests, got {len(answer.digests)}. {SAME_RELEASE}"
            )
        place = (slot_request.key.box, slot_request.key.slot)
        before = self._answers.get(place)
        self.held += len(data) - self.coming.pop(answer.request, 0) - (len(before.data) if before else 0)
        self._answers[place] = _Answer(slot_request, owned(answer), data)
        self.refresh(attempt, slot_request.key.box)

    def _ended(self, attempt: Attempt, box: Box, slot_request: SlotStateRequest, answer: pb.StateAnswer) -> None:
        asked_epoch, _, total = slot_request.place
        if (answer.ended_epoch, answer.ended_total) >= (asked_epoch, total):
            error = ProtocolError(
                f"an epoch must end before batch {total} of epoch {asked_epoch}, got epoch {answer.ended_epoch} after "
                f"batch {answer.ended_total}: check that the loader is deterministic"
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
            self._denied[slot] = (slot_request.place, before, dict(box.abandoned))
        self.refresh(attempt, box.number)

    def _record_digest(self, box: Box, start: Position, position: Position) -> None:
        """Compute the stream digest at `position`, from that at the reported `start` and the workers' digests since."""
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
            answer, (epoch, _, total) = have.answer, have.slot_request.place
            # A runner that took over may not have come to the end that the loop has seen.
            seen = _has_seen_end(box, slot.key.slot, epoch, total)
            capabilities = answer.capabilities if answer.HasField("capabilities") else slot.capabilities
            record = pb.WorkerRecord(
                local_worker_id=slot.key.slot,
                num_workers_per_box=attempt.num_workers,
                num_boxes=attempt.num_boxes,
                box=number,
                step=self.step,
                worker_step=total,
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


@dataclass(eq=False)
class Aggregation(StateQuery):
    """Query for an aggregation by the loader's aggregate_state_dict, for a job that cannot build the loader itself, as
    the data are only on the workers' machines. The client uploads the states as a blob, and the first ready slot of
    `box` is asked, because every worker returns the same. The result counts as the state of box 0 of a run with one
    box, so `StateQuery` needs no other code."""

    box: int = 0
    trial: pb.MixtureTrial | None = None
    slot: int | None = None
    """None: the first slot that is ready."""

    def is_next(self, slot_request: SlotStateRequest) -> bool:
        return True

    def refresh(self, attempt: Attempt, box: int | None = None) -> None:
        super().refresh(attempt)  # the query has one box, number 0, whichever box its request is for

    def _refresh(self, attempt: Attempt, number: int) -> None:
        box = attempt.boxes.get(self.box)
        if box is None:
            raise StateUnavailableError(f"{self.title}: box {self.box}, which aggregates it, has not opened the run")
        able = box.slots if self.slot is None else [box.slots[self.slot]]
        ready = next((slot for slot in able if slot.phase == pb.READY), None)
        self._missing[number] = [] if ready is not None else [f"a worker of box {self.box}"]
        slot_requests: dict[str, SlotStateRequest] = {}
        if ready is not None:
            task = pb.StateRequest(**ready.key._asdict(), generation=ready.generation, step=self.step)
            task.request = f"{self.run}@{self.attempt}/{ready}#{ready.generation}:{self.step}:{self.serial}:{self.blob}"
            if self.trial is None:
                task.aggregate_blob = self.blob
            else:
                task.mixture.CopyFrom(self.trial)
            slot_requests[task.request] = SlotStateRequest(ready.key, ready.worker, task)
        self._ask(number, slot_requests)

    def _take(self, attempt: Attempt, slot_request: SlotStateRequest, answer: pb.StateAnswer, data: bytes) -> None:
        self.held += len(data) - self.coming.pop(answer.request, 0)
        self._ask(0, {})
        record = pb.WorkerRecord(box=slot_request.key.box, local_worker_id=slot_request.key.slot, state_bytes=len(data))
        self._completed(0, BoxState([(record, data)]))


@dataclass(eq=False)
class MixtureTrial(Aggregation):
    """Query for the trial of a change of a mixture: only user code knows its sources, so a helper process of one slot
    makes the loader and applies it. A source may be missing on a worker, so added ones are tried on each. `blob`:
    key of the change and number of the trial, because queries with the same `blob` count as one."""

    epoch: int = 0
    """Epoch in which the boxes are expected to be at the step."""
    changes: int = 0
    """Number of earlier changes of the run's mixture."""

    @property
    def title(self) -> str:
        return f"trial of a change of the mixture of run {self.run}"
