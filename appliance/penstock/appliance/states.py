"""The state of a run at a step, gathered from all its slots. Planning only: who waits, and how long, is elsewhere.

A box's record at a step follows from an earlier position and from where passes ended (penstock.proto.position). The
coordinator has positions that the box reported; ends it learns. So a gathering goes in rounds: plan with the ends known
so far, ask every slot's worker for its state at its planned position, and when one answers "my pass ended earlier",
note the end and plan again. Answers for positions that did not change are kept. When every slot has answered for the
plan as it stands, the record is complete, and it is the same whoever asks, and when.

Why that is enough. A worker checks two things about (epoch, delivered, total): that its pass of that epoch began after
total - delivered batches, and that it did not end before total. If that holds for all slots of a box, then the plan's
epoch began where it truly did, with all slots live, and nobody ended in it unnoticed; the rest is arithmetic.

A slot that is being recovered is waited for: its request goes to the new owner once that is ready. A box whose one pass
is over answers with its final state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.appliance.model import Attempt, Box, Place, SlotKey
from penstock.proto.channel import error_of
from penstock.proto.errors import (
    PenstockError,
    ProtocolError,
    StateUnavailableError,
    error_named,
)
from penstock.proto.position import Position, advance, chain_at
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2


@dataclass(frozen=True)
class Want:
    """One slot's state, asked from its present owner."""

    key: SlotKey
    generation: int
    worker: str
    step: int
    epoch: int
    delivered: int
    total: int
    digests_after: int = field(compare=False)
    """The slot's total at the nearest position that the box reported: from there on the digests of its batches are
    asked for, to go on with the box's flight record."""
    round: int
    """How often the slot has answered with an end so far: a question asked again is a new one."""

    @property
    def id(self) -> str:
        """Made of what is asked, so that a repeated or late answer can never be taken for another one."""
        where = f"{self.key.run}@{self.key.attempt}/{self.key.box}.{self.key.slot}"
        return f"{where}#{self.generation}:{self.step}:{self.epoch}.{self.delivered}.{self.total}:{self.round}"

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
        )


@dataclass(frozen=True)
class _Answer:
    want: Want
    answer: pb.StateAnswer
    data: bytes


@dataclass
class Gathered:
    """A finished gathering."""

    records: list[tuple[pb.WorkerRecord, bytes]]
    positions: dict[int, records_pb2.BoxPosition]
    finals: dict[int, int]
    """Box -> its last step, for boxes that had passed their end: the result holds while they stay there."""

    @property
    def size(self) -> int:
        return sum(len(data) for _, data in self.records)


@dataclass
class Gathering:
    run: str
    attempt: int
    step: int
    askers: int = 0
    deadline: float = 0.0
    """Of the most patient asker."""
    requests: dict[str, Want] = field(default_factory=dict)
    failure: PenstockError | None = None
    result: Gathered | None = None
    _answers: dict[tuple[int, int], _Answer] = field(default_factory=dict)
    _rounds: dict[tuple[int, int], int] = field(default_factory=dict)
    _denied: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)
    """What a slot was asked, and what was known, when it answered with an end that was known: the mistake is with
    another slot, so it is not asked again before more is known."""
    _missing: list[str] = field(default_factory=list)
    _anchors: dict[int, Position] = field(default_factory=dict)
    """Where each box's plan starts from."""

    @property
    def topic(self) -> tuple[str, str, int, int, str]:
        return ("state", self.run, self.attempt, self.step, "")

    @property
    def key(self) -> tuple[str, int, int, str]:
        """What askers of the same thing share."""
        return (self.run, self.attempt, self.step, "")

    @property
    def done(self) -> bool:
        return self.failure is not None or self.result is not None

    def waits_for(self) -> str:
        """Everybody who has not answered yet, by name."""
        asked = [f"box {w.key.box} slot {w.key.slot} on worker {w.worker}" for w in self.requests.values()]
        return ", ".join([*self._missing, *asked])

    def fail(self, error: PenstockError) -> None:
        self.failure = error
        self.requests = {}

    def refresh(self, attempt: Attempt) -> None:
        """Plans again, from the books as they are now."""
        if self.done:
            return
        try:
            self._refresh(attempt)
        except PenstockError as error:
            self.fail(error)

    def _refresh(self, attempt: Attempt) -> None:
        requests: dict[str, Want] = {}
        missing: list[str] = []
        positions: dict[int, Position] = {}
        finals: dict[int, int] = {}
        denied: list[str] = []
        doubtful: list[str] = []
        for number in range(attempt.num_boxes):
            box = attempt.boxes.get(number)
            if box is None:
                missing.append(f"box {number} (it has not opened the run)")
                continue
            if not box.told and box.place is Place.LIVE:
                missing.append(f"box {number} (it has not reported since the coordinator was started)")
                continue
            positions[number] = position = self._position(box, finals, doubtful)
            if box.place is Place.GONE:
                missing.append(f"box {number} (its training job is not heard of)")
                continue
            for slot in box.slots:
                k = slot.key.slot
                place = (position.epoch, position.delivered[k], position.total[k])
                have = self._answers.get((number, k))
                if have is not None and (have.want.epoch, have.want.delivered, have.want.total) == place:
                    continue
                if self._denied.get((number, k)) == (place, box.ends, box.cuts):
                    denied.append(f"{slot} on worker {slot.worker}")
                    continue
                if slot.phase == pb.FAILED and slot.error is not None:
                    raise self._of_slot(error_of(slot.error), slot.key, slot.worker)
                if slot.phase == pb.READY:
                    rounds = self._rounds.get((number, k), 0)
                    after = self._anchors[number].total[k]
                    want = Want(slot.key, slot.generation, slot.worker, self.step, *place, after, rounds)
                    requests[want.id] = want
                elif slot.phase == pb.STARTING:
                    missing.append(f"{slot} (being started on worker {slot.worker})")
                else:
                    missing.append(f"{slot} (no worker has it)")
        self.requests, self._missing = requests, missing
        if (denied or doubtful) and not requests and not missing:
            raise ProtocolError(
                f"state of run {self.run} at step {self.step}: the workers do not agree where passes ended; what the "
                f"others said cannot be for {', '.join(denied + doubtful)}"
            )
        if not requests and not missing:
            self._record_flights(attempt, positions)
            self.result = self._assemble(attempt, positions, finals)

    def _position(self, box: Box, finals: dict[int, int], doubtful: list[str]) -> Position:
        where = f"step {self.step} of run {self.run}: box {box.number}"
        if box.place is Place.CLOSED and not any(slot.worker for slot in box.slots):
            raise StateUnavailableError(
                f"{where} has closed and its workers are gone: take the state before any box closes its appliance"
            )
        if box.place is Place.CLOSED and not box.told:
            raise StateUnavailableError(
                f"{where} has closed, and where it ended is not known since the coordinator was started again: take "
                "the state before any box closes its appliance"
            )
        if self.step < box.base.step and not box.pass_ended:
            raise StateUnavailableError(f"{where} started this attempt at step {box.base.step}")
        at = self.step
        if box.pass_ended and box.step < self.step:
            at = finals[box.number] = box.step
        at = max(at, box.base.step)
        anchor = box.anchor(at)
        if anchor is None:
            raise StateUnavailableError(f"{where} has left that step behind its retention window")
        position = advance(anchor, at, box.ends, box.cuts)
        if sum(position.total) - sum(anchor.total) != at - anchor.step:
            # Some ends are known and others, of earlier passes, are not: good enough to ask with, never to answer with.
            doubtful.append(f"box {box.number}")
        self._anchors[box.number] = anchor
        return position

    def _of_slot(self, error: PenstockError, key: SlotKey, worker: str) -> PenstockError:
        on = f" on worker {worker}" if worker else ""
        message = f"state of run {self.run} at step {self.step}: box {key.box} slot {key.slot}{on}: {error.message}"
        return error_named(type(error).__name__, message, error.remote_traceback)

    def answered(self, attempt: Attempt, answer: pb.StateAnswer, data: bytes) -> None:
        """Takes a worker's answer; one to a request that is no longer open changes nothing."""
        want = self.requests.get(answer.request)
        if want is None or answer.worker != want.worker:
            return
        box = attempt.boxes[want.key.box]
        if answer.HasField("error"):
            self.fail(self._of_slot(error_of(answer.error), want.key, want.worker))
            return
        if answer.ended:
            self._ended(attempt, box, want, answer)
            return
        self._answers[want.key.box, want.key.slot] = _Answer(want, answer, data)
        self.refresh(attempt)

    def _ended(self, attempt: Attempt, box: Box, want: Want, answer: pb.StateAnswer) -> None:
        if (answer.ended_epoch, answer.ended_total) >= (want.epoch, want.total):
            error = ProtocolError(
                f"it says that epoch {answer.ended_epoch} ended after batch {answer.ended_total}, when asked for epoch "
                f"{want.epoch}, batch {want.total}"
            )
            self.fail(self._of_slot(error, want.key, want.worker))
            return
        slot, before = (box.number, want.key.slot), dict(box.ends)
        told = [(end.epoch, end.total) for end in answer.ends]
        for epoch, total in [*told, (answer.ended_epoch, answer.ended_total)]:
            # A pass that the loop left ended there, whatever the worker had produced ahead: the smaller total holds.
            end = (want.key.slot, epoch)
            box.ends[end] = min(total, box.ends.get(end, total))
        self._rounds[slot] = self._rounds.get(slot, 0) + 1
        if box.ends == before:
            place = (want.epoch, want.delivered, want.total)
            self._denied[slot] = (place, before, dict(box.cuts))
        self.refresh(attempt)

    def _record_flights(self, attempt: Attempt, positions: dict[int, Position]) -> None:
        """The chain of each box, from its last report and the workers' digests since."""
        digests: dict[int, dict[tuple[int, int], int]] = {number: {} for number in positions}
        for (number, k), have in self._answers.items():
            first = have.answer.digests_after + 1
            digests[number] |= {(k, first + index): digest for index, digest in enumerate(have.answer.digests)}
        for number, position in positions.items():
            box = attempt.boxes[number]
            position.chain = box.chain(position.step)
            if position.chain is None:
                position.chain = chain_at(self._anchors[number], position.step, box.ends, box.cuts, digests[number])

    def _assemble(self, attempt: Attempt, positions: dict[int, Position], finals: dict[int, int]) -> Gathered:
        records = []
        for (number, k), have in sorted(self._answers.items()):
            answer = have.answer
            slot = attempt.boxes[number].slots[k]
            traits = answer.traits if answer.HasField("traits") else slot.traits
            record = pb.WorkerRecord(
                local_worker_id=k,
                num_workers_per_box=attempt.num_workers,
                num_boxes=attempt.num_boxes,
                box=number,
                step=self.step,
                worker_step=have.want.total,
                samples_streamed=answer.samples_streamed,
                state_bytes=len(have.data),
                epoch=have.want.epoch,
                traits=traits,
                digest=answer.digest,
            )
            records.append((record, have.data))
        return Gathered(records, {number: at.to_proto() for number, at in positions.items()}, finals)
