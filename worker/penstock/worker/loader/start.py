"""The start of a slot: steps that bring a new loader to the slot's start position, before its first batch. A replay of
the stream repeats the same steps in the same order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import ReplayMismatchError, StateMismatchError
from penstock.proto.state.position import linked
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.epoch_goal import EpochGoal, reach
from penstock.worker.loader.positioned_loader import PositionedLoader
from penstock.worker.loader.restart_plan import Leg, first_fit
from penstock.worker.loader.restart_points import END, UNFIT, RestartPoint, StreamHistory, StreamPosition
from penstock.worker.loader.travel import catch_up, replay
from penstock.worker.loader.vouched_resume import record_of, resume_vouched

__all__ = ["compare_record", "saved_goal", "start"]

Keep = Callable[[RestartPoint, bool], None]
Go = Callable[[Leg], object]


def start(source: PositionedLoader, resume: dict[str, Any] | None, keep: Keep, go: Go) -> None:
    """Bring a newly built loader to the start position that its assignment names.

    Args:
        source: the loader, after `build`.
        resume: decoded state to resume from; None to start from the beginning.
        keep: called for each restart point on the way, with the restart point and a flag. True means that all later
            batches of the slot are made from this restart point.
        go: replays a leg; see travel.py.
    """
    a = source.assignment
    point, slots = a.start, a.start.slots
    own = slots[a.slot] if len(slots) > a.slot else records_pb2.SlotPosition()
    source.position = StreamPosition(point.epoch, own.delivered, own.total, 0)
    resume = None if a.resume.anew else resume  # it has only what `compare_record` needs
    source.learn_resume(resume)
    if resume is None:
        keep(source.open_epoch(step=point.step), True)
        return
    part = resume["slots"].get(a.slot) if a.resume.same_topology else None
    if part is None:
        if source.capabilities.state_methods != 4:
            raise StateMismatchError(
                f"{source.name}: the state was saved with another number of boxes or workers. To load such a state, "
                f"the loader must have all four state methods, got {source.capabilities.state_methods or 'none'}. Use "
                "the numbers of boxes and workers with which the state was saved, or add aggregate_state_dict and "
                "deaggregate_state_dict to the loader"
            )
        source.resume_by_own_methods(resume["aggregated"], resume["strict"])
        source.history = replace(source.history, first=resume.get("first", 0))
        keep(source.open_epoch(step=point.step), True)
        if source.by_own_methods and a.box == a.slot == 0:
            _refuse_beginning(source)
        return
    if source.is_pure:
        goal = saved_goal(source, resume)
        way = first_fit(goal.ways, lambda point: reach(source, goal, point, go), UNFIT, source.log_unfit)
        keep(source.marked(way), True)
        return
    # The next epoch, if this slot had ended its epoch when the state was saved.
    epoch = point.epoch if a.slot in point.live else point.epoch + 1
    if source.is_vouched:
        resume_vouched(source, part, epoch, keep, go)
        return
    _Resume(source, part, own.total, point.epoch, epoch, keep).run()


def _refuse_beginning(source: PositionedLoader) -> None:
    """Raise ReplayMismatchError if a loader that was resumed on another topology begins with the run's first batch,
    although another one was due: its methods have lost its position."""
    step, first = source.assignment.start.step, source.history.first
    if not first:
        return
    batch = source.peek()
    if batch is not END and ReplayDigest(cover=cover_of(source.assignment.loader.options)).take(batch)[0] == first:
        raise ReplayMismatchError(
            f"{source.name}: resumed at step {step} on other numbers of boxes or workers, the loader begins again with "
            "the run's first batch: its deaggregate_state_dict or load_state_dict loses the position. Let them compute "
            "this worker's position from the states of all old workers, or resume on the saved numbers. If this batch "
            "is right, use load_state_dict(state, strict=False)"
        )


def compare_record(source: PositionedLoader, resume: dict[str, Any] | None) -> None:
    """If the numbers of boxes and workers have changed, make the last delivered batch of one slot of the saved run
    again, as that slot; at the end of a pure loader's epoch the next one's first batch, if it was made. Call this
    before `source.build`, in a process in which the loader is not built later, if the loader may be pure.

    Raises ReplayMismatchError if it is another batch.
    """
    found = record_of(source.assignment, resume)
    if found is None:
        return
    there, state = found
    beside = source.another(there)
    replay_digest = ReplayDigest(cover=cover_of(there.loader.options))

    def seen(batch: Any) -> None:
        beside.digest, samples = replay_digest.take(batch)
        beside.chain = linked(beside.chain, replay_digest.link)
        beside.position.samples += samples

    def go(leg: Leg) -> None:
        replay(beside, leg, seen)

    try:
        beside.build()
        if beside.is_pure:
            beside.learn_resume(state)
            goal = _next_beginning(beside, saved_goal(beside, state))
            first_fit(goal.ways, lambda way: reach(beside, goal, way, go), UNFIT, beside.log_unfit)
            return
        start(beside, state, lambda point, begins: None, go)
    finally:
        beside.drop()


def _next_beginning(source: PositionedLoader, goal: EpochGoal) -> EpochGoal:
    """Return the beginning of the next epoch, if the goal is the end of one and the first batch after it is known, so
    that this one batch is compared and not the epoch made again."""
    if not (goal.ends and (goal.epoch + 1, goal.total) in source.awaited):
        return goal
    return replace(EpochGoal.beginning(goal.epoch + 1, goal.total, 0), seeds=goal.seeds)


def saved_goal(source: PositionedLoader, resume: dict[str, Any]) -> EpochGoal:
    """Return the position at which a pure loader resumes on the topology on which the state was saved."""
    a = source.assignment
    part = resume["slots"][a.slot]
    if source.capabilities.state_methods == 4:  # only the aggregated state holds the loader's own
        part = part | {"user": source.deaggregate(resume["aggregated"], resume["strict"])}
    goal = EpochGoal.saved(a, part)
    return goal if source.trusts_history(part) else replace(goal, chain=0, next_digest=0, ends=False, seeds=())


def _leads_on(beside: PositionedLoader, slot: int, worker: int, resume: dict[str, Any]) -> bool:
    """Return True if another slot of the box (data-parallel rank) would also continue with its right batch. To find
    out, make that slot's loader and resume it by its own methods, as worker number `worker`. The right batch is the one
    that followed in that slot when the state was saved. Return True also if its digest is not known.

    beside: loader of the slot that resumes. slot: number of the other slot.
    """
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
        batch = source.peek()
        link_of = ReplayDigest(cover=cover_of(a.loader.options)).link_of
        return batch is not END and link_of(batch) == part["next_digest"]
    except UNFIT:
        return False


class _Resume:
    """Resume of a slot with four methods on the saved numbers of boxes and workers, from the saved state alone. The
    next batch must be the one that followed when the state was saved."""

    def __init__(
        self, source: PositionedLoader, part: dict[str, Any], total: int, epoch: int, then: int, keep: Keep
    ) -> None:
        self._source, self._part = source, part
        self._keep_for_good = keep
        self._kept: list[tuple[RestartPoint, bool]] = []
        """Restart points reached by the way that is being tried; dropped if the way is wrong."""
        self._total, self._epoch, self._then = total, epoch, then
        self._point = RestartPoint.of(part)
        launch = replace(source.history.launch, samples=part.get("samples", 0))
        self._history = self._point.history.of(launch)
        """History of the stream up to the saved position. `_point` is the restart point, which may lie far before that
        position."""
        self._as_saved = source.trusts_history(part)
        if not self._as_saved:
            self._history = StreamHistory(launch)

    def run(self) -> None:
        turns = self._turns()
        first_fit(turns, lambda first: self._in_turn(first, doubted=len(turns) > 1), UNFIT, self._source.log_unfit)
        for point, start in self._kept:
            self._keep_for_good(point, start)

    def _turns(self) -> list[int]:
        """Return the slots of the box that may become worker 0 for user code, in the order in which they are tried.

        For most loaders slot 0 is always worker 0. But a loader that counts the samples of all workers yields the next
        batch of the box from worker 0 after a resume. Then the slot whose turn it was must become worker 0, so that
        each slot continues with its own batches. The next batches show which kind a loader is. If they are not
        compared, the slot whose turn it was is worker 0, as in cstorch.
        """
        point = self._source.assignment.start
        turn = point.live[point.cursor] if point.live else 0
        return [0, turn] if turn and self._as_saved else [turn]

    def _in_turn(self, first: int, doubted: bool) -> None:
        """Resume the loader by its own methods with slot `first` as worker 0. If `doubted` is True, first check that
        other slots of the box continue with their right batches, because a single slot may be right by chance."""
        self._kept.clear()
        source = self._source
        a, resume = source.assignment, source.resume
        slots = len(a.start.slots)
        others = sorted({0, 1, slots - 1} - {a.slot}) if doubted else []
        for slot in others:
            source.drop()
            if not _leads_on(source, slot, (slot - first) % slots, cast(dict[str, Any], resume)):
                raise ReplayMismatchError(
                    f"{source.name}: resumed from the state after batch {self._total} of this slot, worker slot {slot} "
                    "of the box would continue with another batch than when the state was saved. Run penstock doctor "
                    "to find why"
                )
        self._by_own_methods((a.slot - first) % slots)
        self._arrive()

    def _keep(self, point: RestartPoint, *, start: bool = True) -> None:
        self._kept.append((point, start))

    def _by_own_methods(self, worker: int) -> None:
        source, resume, restart = self._source, self._source.resume, self._part["restart"]
        assert resume is not None
        source.learn_skips(self._point)
        source.history = self._history
        source.make_as(worker)
        source.resume_by_own_methods(resume["aggregated"], resume["strict"])
        source.position, source.digest = StreamPosition(*restart["at"]), restart["digest"]
        self._keep(source.open(step=source.assignment.start.step, rng_after=restart.get("rng", b"")))
        if self._at_an_end:
            self._cross_saved_end()

    @property
    def _at_an_end(self) -> bool:
        """True if the slot had reached the end of an epoch when the state was saved."""
        return bool(self._next_epoch > self._part["restart"]["at"][0])

    @property
    def _next_epoch(self) -> int:
        """Epoch of the batch after the saved position."""
        return self._epoch + 1 if self._as_saved and self._part.get("next_epoch") else self._then

    def _cross_saved_end(self) -> None:
        """Advance a loader that was saved at the end of an epoch to the next epoch. The loader's next batch shows
        whether the loader ends the saved epoch first or yields a batch of the next epoch at once."""
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
            self._compare_next()
        if source.peek() is not END:
            source.end_previous_epoch_first(position, to, epoch_start)
        catch_up(source, self._then)

    def _arrive(self) -> None:
        """Compare the loader's next batch with the one that followed when the state was saved. Do nothing if the digest
        of that batch was not saved."""
        source = self._source
        if not (self._part.get("next_digest", 0) and self._as_saved) or self._at_an_end:
            return
        if not source.is_open:
            self._keep(source.open_epoch(step=source.assignment.start.step), start=False)
        if source.peek() is END and self._part.get("next_epoch"):
            return  # compared when that epoch is opened
        self._compare_next()

    def _compare_next(self) -> None:
        """Raise ReplayMismatchError unless the next batch is the one that followed when the state was saved."""
        source = self._source
        batch = source.peek()
        link_of = ReplayDigest(cover=cover_of(source.assignment.loader.options)).link_of
        if batch is END or link_of(batch) != self._part["next_digest"]:
            cause = "Its state_dict() must describe the position after the last batch that it has yielded"
            raise ReplayMismatchError(
                f"{source.name}: resumed from its state after batch {self._total} of the slot, the loader "
                f"{'ends its epoch instead of yielding' if batch is END else 'yields another batch than'} the batch "
                f"that followed when the state was saved. {cause}: run penstock doctor. If you changed the data or the "
                "code on purpose, use load_state_dict(state, strict=False)"
            )
