"""Bringing a loader to where a slot starts: what a runner does with its source before the first batch, and what whoever
makes its stream again must do in the same order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import ReplayMismatchError, StateMismatchError
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.crossing_kinds import REPLAY
from penstock.worker.loader.epoch_crossing import catch_up, travel
from penstock.worker.loader.restart_points import END, UNFIT, RestartPoint, StreamHistory, StreamPosition
from penstock.worker.loader.restorable_loader import RestorableLoader

__all__ = ["start"]

_log = logging.getLogger("penstock.worker")

Keep = Callable[[RestartPoint, bool], None]
Seek = Callable[[int, int, int], None]


def start(source: RestorableLoader, resume: dict[str, Any] | None, keep: Keep, seek: Seek) -> None:
    """Start a built source as its assignment says.

    Args:
        resume: decoded blob of the assignment's resume, None to start from nothing.
        keep: gets each restart point, and whether the stream comes from there and needs no proof of it.
        seek: replays to a place, (total, epoch, digest of that batch or 0).
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
                f"{source.name}: the state holds nothing for this slot, and a loader with "
                f"{source.capabilities.state_methods or 'none'} of the four state methods cannot take another's"
            )
        source.resume_by_own_methods(resume["aggregated"], resume["strict"])
        keep(source.open_epoch(step=point.step), True)
        return
    # Over the end of the epoch, if it had ended when the state was saved: for this slot, or for all.
    epoch = point.epoch if a.slot in point.live else point.epoch + 1
    _Resume(source, part, own.total, point.epoch, epoch, keep, seek).run()


def _leads_on(a: records_pb2.WorkerAssignment, slot: int, worker: int, resume: dict[str, Any]) -> bool:
    """Whether a loader made as this worker of the box goes on with the batch that came next in this slot."""
    part = resume["slots"].get(slot)
    if part is None or not part["next_digest"]:
        return True
    assignment = records_pb2.WorkerAssignment()
    assignment.CopyFrom(a)
    assignment.slot = slot
    source, step = RestorableLoader(assignment), a.start.step
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
    """On the shape that the state was saved on: in the first way that leads to the batches that were delivered."""

    def __init__(
        self, source: RestorableLoader, part: dict[str, Any], total: int, epoch: int, then: int, keep: Keep, seek: Seek
    ) -> None:
        self._source, self._part, self._seek = source, part, seek
        self._keep_for_good = keep
        self._kept: list[tuple[RestartPoint, bool]] = []
        """Of the way that is tried: what comes of a wrong one must not be restarted from."""
        self._total, self._epoch, self._then = total, epoch, then
        self._point = RestartPoint.of(part)
        launch = replace(source.history.launch, samples=part.get("samples", 0))
        self._history = self._point.history.of(launch).knowing(source.history.crossing)
        """At the place that was saved, to which the restart point may be far."""
        self._as_saved = source.believes(part)
        if not self._as_saved:
            self._history = StreamHistory(launch)

    def run(self) -> None:
        ways = self._ways()
        for number, way in enumerate(ways, 1):
            self._kept.clear()
            try:
                way()
                self._arrive()
                break
            except UNFIT as mismatch:
                if number == len(ways):
                    raise
                if ways[number] == self._from_the_beginning:
                    _log.warning("%s; its stream is made again from the beginning instead", mismatch.message)
        for point, start in self._kept:
            self._keep_for_good(point, start)

    def _ways(self) -> list[Callable[[], None]]:
        """What may lead there, in the order in which it is tried."""
        source, ways = self._source, list[Callable[[], None]]()
        if source.by_own_methods and self._history.whole and self._cannot_go_on:
            return [self._from_the_beginning]
        if source.by_own_methods:
            ways += [partial(self._in_turn, *rotation) for rotation in self._rotations()]
        else:
            ways.append(self._by_own_methods if source.capabilities.state_methods == 4 else self._from_restart_point)
        if self._history.whole and (source.capabilities.state_methods == 4 or self._point.position.total > 0):
            ways.append(self._from_the_beginning)
        return ways

    @property
    def _cannot_go_on(self) -> bool:
        """It was found on one of the box's workers that, resumed, the loader begins its next epoch with a wrong batch.
        All are made again, so that their own states are counted from the same place."""
        resume = self._source.resume
        assert resume is not None
        return any(RestartPoint.of(part).history.crossing == REPLAY for part in resume["slots"].values())

    def _rotations(self) -> list[tuple[int, bool]]:
        """Which slot of the box may be the loader's worker 0, so that all go on with their own batches; and whether
        that is in doubt.

        Most go on as they were. A loader that counts the samples of all workers begins a launch with worker 0, and its
        next batch is that of the slot whose turn it is. The batches tell the two apart: none is left if they cannot.
        """
        a, resume = self._source.assignment, self._source.resume
        slots, point = len(a.start.slots), a.start
        turn = point.live[point.cursor] if point.HasField("first") else 0
        if not (turn and self._as_saved) or resume is None:
            return [(0, False)]
        own, other = (resume["slots"].get((a.slot + ahead) % slots, {}).get("next_digest", 0) for ahead in (0, turn))
        if own in (0, other) and self._history.whole:
            return []
        return [(0, True), (turn, True)]

    def _in_turn(self, first: int, doubted: bool) -> None:
        """Resume the loader by its own methods where slot `first` is its worker 0, if that is right for others of the
        box too: one alone may yield the right batch by chance."""
        source = self._source
        a, resume = source.assignment, source.resume
        slots = len(a.start.slots)
        others = sorted({0, 1, slots - 1} - {a.slot}) if doubted else []
        for slot in others:
            source.drop()
            if not _leads_on(a, slot, (slot - first) % slots, cast(dict[str, Any], resume)):
                raise ReplayMismatchError(
                    f"{source.name}: resumed from its state after batch {self._total}, slot {slot} of the box would go "
                    "on with another batch than the one that came when the state was saved"
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
            self._step_over_the_end()

    def _from_restart_point(self) -> None:
        source = self._source
        source.restore(replace(self._point, history=self._history))
        source.restored &= self._as_saved
        self._keep(source.marked(self._point))  # all that this attempt yields comes from there
        self._go()

    def _from_the_beginning(self) -> None:
        source = self._source
        source.history = self._history
        source.begin()
        self._keep(source.open_epoch())
        self._go()

    @property
    def _at_an_end(self) -> bool:
        """The state was saved where the slot had come to the end of an epoch."""
        return bool(self._next_epoch > self._part["restart"]["at"][0])

    @property
    def _next_epoch(self) -> int:
        """That of the batch that comes next."""
        return self._epoch + 1 if self._as_saved and self._part.get("next_epoch") else self._then

    def _step_over_the_end(self) -> None:
        """Look at the next epoch, be it that the loader ends this one or goes on with that at once."""
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
            source.hold_back(position, to, epoch_start)
        catch_up(source, self._then)

    def _go(self) -> None:
        """The way that the loop went, up to where it was saved."""
        source, digest = self._source, self._part["digest"]
        travel(
            source,
            dict(self._history.abandoned),
            self._total,
            self._epoch,
            lambda total, epoch: self._seek(total, epoch, 0),
        )
        if digest and source.digest and source.digest != digest:
            raise ReplayMismatchError(
                f"{source.name}: brought to where it was saved, batch {self._total} of the slot is not the one that "
                "was delivered; the loader does not reproduce its batches"
            )
        catch_up(source, self._then)

    def _arrive(self) -> None:
        """Compare the next batch, if it is known which one came when the state was saved."""
        source = self._source
        if not (self._part.get("next_digest", 0) and self._as_saved) or (source.by_own_methods and self._at_an_end):
            return
        if not source.is_open:
            self._keep(source.open_epoch(step=source.assignment.start.step), start=False)
        if source.peek() is END and self._part.get("next_epoch"):
            return  # compared where that epoch is opened: see epoch_crossing.py
        self._compare_next()
        if self._part.get("next_epoch"):
            # It goes on with the next epoch's batches and ends no epoch before them: its epochs are no longer those of
            # a loader from the beginning.
            source.history = replace(source.history, whole=False)

    def _compare_next(self) -> None:
        """Raises ReplayMismatchError unless the batch that came when the state was saved comes next."""
        source = self._source
        batch = source.peek()
        take = ReplayDigest(cover=cover_of(source.assignment.loader.options)).take
        if batch is END or take(batch)[0] != self._part["next_digest"]:
            raise ReplayMismatchError(
                f"{source.name}: resumed from its state after batch {self._total} of the slot, it "
                f"{'yields nothing more' if batch is END else 'yields another batch'}, and not the one that came when "
                "the state was saved: its state is not that of the batches it has yielded. If its data or code were "
                "changed on purpose, say so: load_state_dict(state, strict=False)"
            )
