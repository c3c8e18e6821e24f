"""The start of a slot: steps that bring a new loader to its start position. A replay repeats them in the same order.

A vouched loader is restored from before the last delivered batch, and the batches up to the position are made again.
The last must be the delivered one: this finds other data, other code and generators that the loader does not save. A
loader with four methods then loads its part of the aggregated state. A difference is an error: there is no second way,
because the loader's word is that its states are right.

On another topology the record's own box and slot are made once more, with the record's numbers: each slot compares one,
before it makes its own loader (`compare_record`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import ReplayMismatchError, StateMismatchError
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.epoch_goal import EpochGoal
from penstock.worker.loader.restart_plan import Leg, Target, first_fit
from penstock.worker.loader.restart_points import END, UNFIT, RestartPoint, StreamHistory, StreamPosition
from penstock.worker.loader.slot_loader import SlotLoader, part_of
from penstock.worker.loader.travel import Go, catch_up, cause_of, reach_any, replay, travel

_log = logging.getLogger("penstock.worker")

Keep = Callable[[RestartPoint, bool], None]


def start(source: SlotLoader, resume: dict[str, Any] | None, keep: Keep, go: Go) -> None:
    """Bring a built loader to the start position that its assignment names. resume: None to start from the beginning.
    keep: called with each restart point on the way; True: all later batches are made from it. go: replays a leg
    (travel.py)."""
    a = source.assignment
    point, slots = a.start, a.start.slots
    slot_position = slots[a.slot] if len(slots) > a.slot else records_pb2.SlotPosition()
    source.position = StreamPosition(point.epoch, slot_position.delivered, slot_position.total, 0)
    resume = None if a.resume.anew else resume  # it has only what `compare_record` needs
    source.learn_resume(resume)
    if resume is None:
        keep(source.open_epoch(step=point.step), True)
        return
    part = part_of(a, resume)
    if part is None:
        _resume_on_other_topology(source, resume, keep)
    elif source.is_pure:
        keep(source.marked(reach_any(source, saved_goal(source, resume), go)), True)
    else:
        # The next epoch, if this slot had ended its epoch when the state was saved.
        epoch = point.epoch if a.slot in point.live else point.epoch + 1
        if source.is_vouched:
            _resume_vouched(source, part, epoch, keep, go)
        else:
            _FourMethodResume(source, part, slot_position.total, point.epoch, epoch, keep).run()


def _resume_on_other_topology(source: SlotLoader, resume: dict[str, Any], keep: Keep) -> None:
    if source.capabilities.state_methods != 4:
        raise StateMismatchError(
            f"{source.name}: to resume on other numbers of boxes or workers, the loader needs four state methods, got "
            f"{source.capabilities.state_methods or 'none'}. Use the saved numbers, or add the methods"
        )
    a = source.assignment
    source.resume_by_own_methods(resume["aggregated"], resume["strict"])
    source.history = replace(source.history, first=resume.get("first", 0))
    keep(source.open_epoch(step=a.start.step), True)
    if source.by_own_methods and a.box == a.slot == 0:
        _refuse_beginning(source)


def _refuse_beginning(source: SlotLoader) -> None:
    """Raise ReplayMismatchError if a loader resumed on another topology begins with the run's first batch, although
    another was due: it has lost its position."""
    step, first = source.assignment.start.step, source.history.first
    if not first:
        return
    batch = source.peek()
    if batch is not END and ReplayDigest(cover=cover_of(source.assignment.loader.options)).take(batch)[0] == first:
        raise ReplayMismatchError(
            f"{source.name}: resumed at step {step} on other numbers of boxes or workers, the loader begins again with "
            "the run's first batch: its deaggregate_state_dict or load_state_dict loses the position. Resume on the "
            "saved numbers, or with load_state_dict(state, strict=False) if this batch is right"
        )


def saved_goal(source: SlotLoader, resume: dict[str, Any]) -> EpochGoal:
    a = source.assignment
    part = resume["slots"][a.slot]
    if source.capabilities.state_methods == 4:  # only the aggregated state holds the loader's own
        part = part | {"user": source.deaggregate(resume["aggregated"], resume["strict"])}
    goal = EpochGoal.saved(a, part)
    return goal if source.trusts_history(part) else replace(goal, chain=0, next_digest=0, ends=False, seeds=())


def _require_next(source: SlotLoader, digest: int, cause: str) -> None:
    link = source.peek_link()
    if link != digest:
        how = "ends its epoch instead of yielding" if link is None else "yields another batch than"
        total = source.assignment.start.slots[source.assignment.slot].total
        raise ReplayMismatchError(
            f"{source.name}: resumed after batch {total} of the slot, the loader {how} the saved next batch. {cause}"
        )


# ---- loaders that vouch for their states


def _resume_vouched(source: SlotLoader, part: dict[str, Any], then: int, keep: Keep, go: Go) -> None:
    """Bring the loader to a saved state's position on the saved topology. then: the next epoch, if this slot had ended
    its own."""
    a = source.assignment
    compares, point = source.trusts_history(part), RestartPoint.of(part)
    launch = replace(source.history.launch, samples=part.get("samples", 0))
    history = point.history.of(launch) if compares else StreamHistory(launch)
    digest = part["digest"] if compares else 0
    target = Target(a.start.epoch, a.start.slots[a.slot].total, dict(history.abandoned), digest)
    if source.capabilities.state_methods == 4:
        if compares and point.state is not None:
            _make_again(source, replace(point, history=history), target, go)
        _load_aggregated(source, part, history, keep)
    else:
        source.restore(replace(point, history=history))
        keep(source.marked(point), True)
    travel(source, target, go)
    catch_up(source, then)
    if not (compares and part.get("next_digest")):
        return
    if not source.is_open:
        keep(source.open_epoch(step=a.start.step), False)
    if not (part.get("next_epoch") and source.peek_link() is None):  # else compared when the next epoch is opened
        _require_next(source, part["next_digest"], cause_of(source))


def _make_again(source: SlotLoader, point: RestartPoint, target: Target, go: Go) -> None:
    try:
        source.restore(point)
    except StateMismatchError as error:  # such as other ranges to skip, which only an aggregated state may have
        _log.info("%s: the last delivered batch is not compared: %s", source.name, error.message)
        return
    travel(source, target, go)


def _load_aggregated(source: SlotLoader, part: dict[str, Any], history: StreamHistory, keep: Keep) -> None:
    if source.capabilities.is_iterator:
        source.begin()
    source.abort()
    source.learn_skips(RestartPoint.of(part))
    source.history = history
    _open_by_own_methods(source, part, keep)


def _open_by_own_methods(source: SlotLoader, part: dict[str, Any], keep: Keep) -> None:
    resume, restart = source.resume, part["restart"]
    assert resume is not None
    source.resume_by_own_methods(resume["aggregated"], resume["strict"])
    source.position, source.digest = StreamPosition(*restart["at"]), restart["digest"]
    keep(source.open(step=source.assignment.start.step, rng_after=restart.get("rng", b"")), True)


# ---- other numbers of boxes and workers


def record_of(
    assignment: records_pb2.WorkerAssignment, resume: dict[str, Any] | None
) -> tuple[records_pb2.WorkerAssignment, dict[str, Any]] | None:
    """Return what a slot compares before it resumes on another topology: the assignment of one slot of the saved run,
    and the state from which that would resume. None: nothing."""
    changed = not assignment.resume.same_topology
    record = resume.get("records", {}).get(assignment.slot) if resume is not None and changed else None
    if resume is None or record is None:
        return None
    if RestartPoint.of(record["part"]).history.launch.worker is not None:
        return None  # the loader resumes by its own four methods only
    there = records_pb2.WorkerAssignment()
    there.CopyFrom(assignment)
    there.box, there.slot, there.num_boxes, there.num_workers_per_box = record["place"]
    there.start.ParseFromString(record["position"])
    there.resume.same_topology, there.resume.anew = True, False
    return there, {**resume, "slots": {there.slot: record["part"]}}


def compare_record(source: SlotLoader, resume: dict[str, Any] | None) -> None:
    """On another topology, make the last delivered batch of a slot of the saved run again, as that slot (at a pure
    epoch's end, the next one's first batch), and raise ReplayMismatchError for another one; not if the loader says that
    it has, for example, another batch size. For a pure loader, call this before `source.build` in a process in which
    the loader is not built later."""
    record = record_of(source.assignment, resume)
    if record is None:
        return
    there, state = record
    beside = source.another(there)
    replay_digest = ReplayDigest(cover=cover_of(there.loader.options))

    def go(leg: Leg) -> None:
        replay(beside, leg, lambda batch: beside.count_replayed(batch, replay_digest))

    try:
        beside.build()
        beside.learn_resume(state)
        if not beside.trusts_history(state["slots"][there.slot]):
            _log.info("%s: what was delivered is not compared: the loader has other settings now", source.name)
        elif beside.is_pure:
            reach_any(beside, _next_beginning(beside, saved_goal(beside, state)), go)
        else:
            start(beside, state, lambda point, begins: None, go)
    finally:
        beside.drop()


def _next_beginning(source: SlotLoader, goal: EpochGoal) -> EpochGoal:
    """Return the next epoch's beginning if the goal is an epoch's end and the batch after it is known: only that is
    compared."""
    if not (goal.ends and (goal.epoch + 1, goal.total) in source.awaited):
        return goal
    return replace(EpochGoal.beginning(goal.epoch + 1, goal.total, 0), seeds=goal.seeds)


# ---- four methods


class _FourMethodResume:
    """Resume with four methods on the saved topology, from the saved state alone. The next batch must be the one that
    followed."""

    def __init__(self, source: SlotLoader, part: dict[str, Any], total: int, epoch: int, then: int, keep: Keep) -> None:
        self._source, self._part = source, part
        self._keep_for_good = keep
        self._kept: list[tuple[RestartPoint, bool]] = []
        self._total, self._epoch, self._then = total, epoch, then
        self._point = RestartPoint.of(part)
        """May lie far before the saved position."""
        launch = replace(source.history.launch, samples=part.get("samples", 0))
        self._as_saved = source.trusts_history(part)
        self._history = self._point.history.of(launch) if self._as_saved else StreamHistory(launch)

    def run(self) -> None:
        turns = self._turns()
        first_fit(turns, lambda first: self._in_turn(first, doubted=len(turns) > 1), UNFIT, self._source.log_unfit)
        for point, begins in self._kept:
            self._keep_for_good(point, begins)

    def _turns(self) -> list[int]:
        """Return the slots that may become worker 0 for user code, in the order in which they are tried: for most
        loaders slot 0. But one that counts all workers' samples yields the box's next batch from worker 0 after a
        resume; then it must be the slot whose turn it was, so that each continues with its own batches. The next
        batches show which kind it is. If they are not compared, it is the slot whose turn it was, as in cstorch."""
        point = self._source.assignment.start
        turn = point.live[point.cursor] if point.live else 0
        return [0, turn] if turn and self._as_saved else [turn]

    def _in_turn(self, first: int, doubted: bool) -> None:
        """Resume with slot `first` as worker 0. If `doubted`, check other slots first, because one may be right by
        chance."""
        self._kept.clear()
        source = self._source
        a = source.assignment
        slots = len(a.start.slots)
        for slot in sorted({0, 1, slots - 1} - {a.slot}) if doubted else []:
            source.drop()
            if not _leads_on(source, slot, (slot - first) % slots, cast(dict[str, Any], source.resume)):
                raise ReplayMismatchError(
                    f"{source.name}: resumed after batch {self._total} of this slot, slot {slot} would continue "
                    "with another batch than the saved run: run penstock doctor"
                )
        source.learn_skips(self._point)
        source.history = self._history
        source.make_as((a.slot - first) % slots)
        _open_by_own_methods(source, self._part, self._keep)
        if self._next_epoch > self._part["restart"]["at"][0]:
            self._cross_saved_end()
        elif self._part.get("next_digest", 0) and self._as_saved:
            self._arrive()

    def _keep(self, point: RestartPoint, begins: bool) -> None:
        self._kept.append((point, begins))

    @property
    def _next_epoch(self) -> int:
        return self._epoch + 1 if self._as_saved and self._part.get("next_epoch") else self._then

    def _cross_saved_end(self) -> None:
        """Advance from a saved epoch's end to the next epoch. The next batch shows whether the loader ends the saved
        epoch first."""
        source, (first, _), to = self._source, self._kept[-1], self._next_epoch
        position, epoch_start = source.position.copy(), first
        known = bool(self._as_saved and self._part["next_digest"])
        while source.peek() is END and known and source.position.epoch < to:
            source.next()
            epoch_start = source.open(step=source.assignment.start.step)
        if source.peek() is not END and source.position.epoch < to:
            source.enter(to)
            self._kept[-1] = replace(first, history=source.history.before(position.epoch)), True
            epoch_start = replace(first, position=replace(position, epoch=to, delivered=0), history=source.history)
        if known:
            self._require_next()
        if source.peek() is not END:
            source.end_previous_epoch_first(position, to, epoch_start)
        catch_up(source, self._then)

    def _arrive(self) -> None:
        source = self._source
        if not source.is_open:
            self._keep(source.open_epoch(step=source.assignment.start.step), False)
        if source.peek_link() is None and self._part.get("next_epoch"):
            return  # compared when that epoch is opened
        self._require_next()

    def _require_next(self) -> None:
        _require_next(
            self._source,
            self._part["next_digest"],
            "Its state_dict() must describe the position after the last batch that it has yielded: run penstock "
            "doctor. If you changed the data or the code on purpose, use load_state_dict(state, strict=False)",
        )


def _leads_on(beside: SlotLoader, slot: int, worker: int, resume: dict[str, Any]) -> bool:
    """Return True if `slot`, made and resumed as worker `worker`, also continues with the batch that followed there, or
    if that is not known. beside: loader of the slot that resumes."""
    a, part = beside.assignment, resume["slots"].get(slot)
    if part is None or not part["next_digest"]:
        return True
    assignment = records_pb2.WorkerAssignment()
    assignment.CopyFrom(a)
    assignment.slot = slot
    source, step = beside.another(assignment), a.start.step
    try:
        source.build()
        source.make_as(worker)
        source.resume_by_own_methods(resume["aggregated"], resume["strict"])
        source.position = StreamPosition(*part["restart"]["at"])
        source.open(step=step, rng_after=part["restart"].get("rng", b""))
        if source.peek() is END:
            source.next()
            source.open(step=step)
        return bool(source.peek_link() == part["next_digest"])
    except UNFIT:
        return False
