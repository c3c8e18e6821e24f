"""The start of a slot: steps that bring a new loader to the slot's start position, before its first batch. A replay of
the stream repeats the same steps in the same order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import PenstockError, ReplayMismatchError, StateMismatchError
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.crossing_kinds import REPLAY
from penstock.worker.loader.restart_plan import Leg, Target, first_fit
from penstock.worker.loader.restart_points import END, UNFIT, RestartPoint, StreamHistory, StreamPosition
from penstock.worker.loader.restorable_loader import RestorableLoader
from penstock.worker.loader.resume_plan import ResumeKind, ResumeWay, resume_ways, rotations
from penstock.worker.loader.travel import catch_up, travel

__all__ = ["start"]

_log = logging.getLogger("penstock.worker")

Keep = Callable[[RestartPoint, bool], None]
Go = Callable[[Leg], object]


def start(source: RestorableLoader, resume: dict[str, Any] | None, keep: Keep, go: Go) -> None:
    """Bring a newly built loader to the start position that its assignment names.

    Args:
        source: the loader, after `build`.
        resume: decoded state to resume from; None to start from the beginning.
        keep: called for each restart point on the way, with the restart point and a flag. True means that all later
            batches of the slot are made from this restart point, so it needs no verification.
        go: replays a leg; see travel.py.
    """
    a = source.assignment
    point, slots = a.start, a.start.slots
    own = slots[a.slot] if len(slots) > a.slot else records_pb2.SlotPosition()
    source.position = StreamPosition(point.epoch, own.delivered, own.total, 0)
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
        keep(source.open_epoch(step=point.step), True)
        return
    # The next epoch, if this slot had ended its epoch when the state was saved.
    epoch = point.epoch if a.slot in point.live else point.epoch + 1
    _Resume(source, part, own.total, point.epoch, epoch, keep, go).run()


def _leads_on(beside: RestorableLoader, slot: int, worker: int, resume: dict[str, Any]) -> bool:
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
        source.open(step=step, rng_after=part["restart"]["rng"])
        if source.peek() is END:
            source.next()
            source.open(step=step)
        batch = source.peek()
        take = ReplayDigest(cover=cover_of(a.loader.options)).take
        return batch is not END and take(batch)[0] == part["next_digest"]
    except UNFIT:
        return False


class _Resume:
    """Resume of one slot with the saved numbers of boxes and workers. Ways to the saved position are tried one after
    the other, and the first that leads to the delivered batches is used."""

    def __init__(
        self, source: RestorableLoader, part: dict[str, Any], total: int, epoch: int, then: int, keep: Keep, go: Go
    ) -> None:
        self._source, self._part, self._replay = source, part, go
        self._keep_for_good = keep
        self._kept: list[tuple[RestartPoint, bool]] = []
        """Restart points reached by the way that is being tried; dropped if the way is wrong."""
        self._way: ResumeKind | None = None
        """Kind of the way that is being tried; None before the first."""
        self._total, self._epoch, self._then = total, epoch, then
        self._point = RestartPoint.of(part)
        launch = replace(source.history.launch, samples=part.get("samples", 0))
        self._history = self._point.history.of(launch).knowing(source.history.crossing)
        """History of the stream up to the saved position. `_point` is the restart point, which may lie far before that
        position."""
        self._as_saved = source.trusts_history(part)
        if not self._as_saved:
            self._history = StreamHistory(launch)

    def run(self) -> None:
        first_fit(self._ways(), self._take, UNFIT, self._log_failure)
        for point, start in self._kept:
            self._keep_for_good(point, start)

    def _take(self, way: ResumeWay) -> None:
        self._kept.clear()
        self._way = way.kind
        if way.kind is ResumeKind.BEGINNING:
            self._from_the_beginning()
        elif way.kind is ResumeKind.RESTART_POINT:
            self._from_restart_point()
        elif way.first is not None:
            self._in_turn(way.first, way.doubted)
        else:
            self._by_own_methods()
        self._arrive()

    def _log_failure(self, error: Exception, instead: ResumeWay) -> None:
        if instead.kind is ResumeKind.BEGINNING:
            _log.warning("%s; the slot's batches are replayed from the beginning", cast(PenstockError, error).message)

    def _ways(self) -> list[ResumeWay]:
        """Return the ways to the saved position, in the order in which they are tried."""
        source, own = self._source, self._source.by_own_methods
        return resume_ways(
            methods=source.capabilities.state_methods,
            turns=self._rotations() if own else None,
            whole=self._history.complete,
            replays=own and self._history.complete and self._any_wrong_epoch,
            total=self._point.position.total,
        )

    @property
    def _any_wrong_epoch(self) -> bool:
        """True if on any slot of the box the resumed loader began its next epoch with a wrong batch. Then all slots of
        the box are replayed from the beginning, so that all their loaders count batches from there."""
        resume = self._source.resume
        assert resume is not None
        return any(RestartPoint.of(part).history.crossing == REPLAY for part in resume["slots"].values())

    def _rotations(self) -> list[ResumeWay]:
        """Return the ways to resume by the loader's own methods, which differ in the slot of the box that becomes
        worker 0; see `rotations`."""
        a, resume = self._source.assignment, self._source.resume
        slots, point = len(a.start.slots), a.start
        turn = point.live[point.cursor] if point.HasField("first") else 0
        if resume is None or not self._as_saved:
            turn = 0
        parts = resume["slots"] if resume is not None else {}
        own, other = (parts.get((a.slot + ahead) % slots, {}).get("next_digest", 0) for ahead in (0, turn))
        return rotations(turn, own, other, whole=self._history.complete)

    def _in_turn(self, first: int, doubted: bool) -> None:
        """Resume the loader by its own methods with slot `first` as worker 0. If `doubted` is True, first check that
        other slots of the box continue with their right batches, because a single slot may be right by chance."""
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

    def _keep(self, point: RestartPoint, *, start: bool = True) -> None:
        self._kept.append((point, start))

    def _by_own_methods(self, worker: int | None = None) -> None:
        source, resume, restart = self._source, self._source.resume, self._part["restart"]
        assert resume is not None
        source.learn_skips(self._point)
        source.history = self._history
        if worker is not None:
            source.make_as(worker)
        source.resume_by_own_methods(resume["aggregated"], resume["strict"])
        source.position, source.digest = StreamPosition(*restart["at"]), restart["digest"]
        source.mark_restored()
        source.restored = self._as_saved
        self._keep(source.open(step=source.assignment.start.step, rng_after=restart["rng"]))
        if worker is None:
            self._go()
        elif self._at_an_end:
            self._cross_saved_end()

    def _from_restart_point(self) -> None:
        source = self._source
        source.restore(replace(self._point, history=self._history))
        source.restored &= self._as_saved
        self._keep(source.marked(self._point))  # all batches of this attempt come from there
        self._go()

    def _from_the_beginning(self) -> None:
        source = self._source
        source.history = self._history
        source.begin()
        self._keep(source.open_epoch())
        self._go()

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

    def _go(self) -> None:
        """Replay up to the saved position, and compare the last batch with the delivered one. Abandon each epoch that
        the training loop abandoned, at the same batch."""
        source, digest = self._source, self._part["digest"]
        travel(source, Target(self._epoch, self._total, dict(self._history.abandoned)), self._replay)
        if digest and source.digest and source.digest != digest:
            raise ReplayMismatchError(
                f"{source.name}: in a replay up to the saved position, batch {self._total} of the slot is not the one "
                "that was delivered. The loader is not deterministic: run penstock doctor"
            )
        catch_up(source, self._then)

    def _arrive(self) -> None:
        """Compare the loader's next batch with the one that followed when the state was saved. Do nothing if the digest
        of that batch was not saved."""
        source = self._source
        if not (self._part.get("next_digest", 0) and self._as_saved) or (source.by_own_methods and self._at_an_end):
            return
        if not source.is_open:
            self._keep(source.open_epoch(step=source.assignment.start.step), start=False)
        if source.peek() is END and self._part.get("next_epoch"):
            return  # compared when that epoch is opened: see epoch_crossing.py
        self._compare_next()
        if self._part.get("next_epoch"):
            # The loader continues with the next epoch without ending the present one, so its epochs differ from those
            # of a loader replayed from the beginning.
            source.history = replace(source.history, complete=False)

    def _compare_next(self) -> None:
        """Raise ReplayMismatchError unless the next batch is the one that followed when the state was saved."""
        source = self._source
        batch = source.peek()
        take = ReplayDigest(cover=cover_of(source.assignment.loader.options)).take
        if batch is END or take(batch)[0] != self._part["next_digest"]:
            how = "resumed from its state after"
            cause = "Its state_dict() must describe the position after the last batch that it has yielded"
            if self._way is ResumeKind.BEGINNING:
                how, cause = "replayed from the beginning up to", "The loader is not deterministic"
            by_four = source.capabilities.state_methods == 4
            raise ReplayMismatchError(
                f"{source.name}: {how} batch {self._total} of the slot, the loader "
                f"{'ends its epoch instead of yielding' if batch is END else 'yields another batch than'} the batch "
                f"that followed when the state was saved. {cause}: run penstock doctor. If you changed the data or the "
                "code on purpose, "
                f"{'use load_state_dict(state, strict=False)' if by_four else 'start a new run'}"
            )
