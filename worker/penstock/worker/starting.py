"""Bringing a loader to where a slot starts: what a runner does with its source before the first batch, and what whoever
makes its stream again must do in the same order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.proto.digest import cover_of
from penstock.proto.errors import ReplayMismatchError, StateMismatchError
from penstock.proto.v1 import records_pb2
from penstock.worker.crossing import catch_up, travel
from penstock.worker.offprint import Offprint
from penstock.worker.restart_points import END, UNFIT, Base, Past, Place
from penstock.worker.source import Source

__all__ = ["start"]

_log = logging.getLogger("penstock.worker")

Keep = Callable[[Base, bool], None]
Seek = Callable[[int, int, int], None]


def start(source: Source, resume: dict[str, Any] | None, keep: Keep, seek: Seek) -> None:
    """Start a built source as its assignment says.

    Args:
        resume: decoded blob of the assignment's resume, None to start from nothing.
        keep: gets each restart point, and whether the stream comes from there and needs no proof of it.
        seek: replays to a place, (total, epoch, digest of that batch or 0).
    """
    a = source.assignment
    base, slots = a.base, a.base.slots
    own = slots[a.slot] if len(slots) > a.slot else records_pb2.SlotPosition()
    source.place = Place(base.epoch, own.delivered, own.total, 0)
    source.resume = resume
    if resume is None:
        keep(source.open_pass(step=base.step), True)
        return
    part = resume["slots"].get(a.slot) if a.resume.same_shape else None
    if part is None:
        if source.traits.state_methods != 4:
            raise StateMismatchError(
                f"{source.name}: the state holds nothing for this slot, and a loader with "
                f"{source.traits.state_methods or 'none'} of the four state methods cannot take another's"
            )
        source.resume_by_own_methods(resume["aggregated"], resume["strict"])
        keep(source.open_pass(step=base.step), True)
        return
    # Over the end of the pass, if it had ended when the state was saved: for this slot, or for all.
    epoch = base.epoch if a.slot in base.live else base.epoch + 1
    _Resume(source, part, own.total, base.epoch, epoch, keep, seek).run()


class _Resume:
    """On the shape that the state was saved on: in the first way that leads to the batches that were delivered."""

    def __init__(
        self, source: Source, part: dict[str, Any], total: int, epoch: int, then: int, keep: Keep, seek: Seek
    ) -> None:
        self._source, self._part, self._seek = source, part, seek
        if part.get("next_epoch"):
            source.awaited[total] = part["next_digest"]
        self._keep_for_good = keep
        self._kept: list[tuple[Base, bool]] = []
        """Of the way that is tried: what comes of a wrong one must not be restarted from."""
        self._total, self._epoch, self._then = total, epoch, then
        self._base = Base.of(part)
        self._past = replace(self._base.past, samples=part.get("samples", 0)).knowing(source.past.rewinds)
        """At the place that was saved, to which the restart point may be far."""
        strict = source.traits.state_methods != 4 or source.resume is None or source.resume["strict"]
        self._as_saved = "past" in part["restart"] and strict and not part.get("changed")
        """Else an older release wrote it, or the user has edited it or does not load it strictly: nothing is known of
        the way there, and the loader's word counts."""
        if not self._as_saved:
            self._past = Past(samples=self._past.samples)

    def run(self) -> None:
        source = self._source
        try:
            if source.traits.state_methods == 4:
                self._by_own_methods()
            else:
                self._from_restart_point()
            self._arrive()
        except UNFIT as mismatch:
            if not self._past.whole or (source.traits.state_methods != 4 and self._base.place.total == 0):
                raise
            _log.warning("%s; its stream is made again from the beginning instead", mismatch.message)
            self._kept.clear()
            self._from_the_beginning()
            self._arrive()
        for base, start in self._kept:
            self._keep_for_good(base, start)

    def _keep(self, base: Base, *, start: bool = True) -> None:
        self._kept.append((base, start))

    def _by_own_methods(self) -> None:
        source, resume, restart = self._source, self._source.resume, self._part["restart"]
        assert resume is not None
        source.learn_skips(self._base)
        source.past = self._past
        source.resume_by_own_methods(resume["aggregated"], resume["strict"])
        source.place, source.digest = Place(*restart["at"]), restart["digest"]
        source.mark_restored()
        source.restored = self._as_saved
        self._keep(source.open(step=source.assignment.base.step, rng_after=restart["rng"]))
        self._go()

    def _from_restart_point(self) -> None:
        source = self._source
        source.restore(replace(self._base, past=self._past))
        source.restored &= self._as_saved
        self._keep(source.marked(self._base))  # all that this attempt yields comes from there
        self._go()

    def _from_the_beginning(self) -> None:
        source = self._source
        source.past = self._past
        source.begin()
        self._keep(source.open_pass())
        self._go()

    def _go(self) -> None:
        """The way that the loop went, up to where it was saved."""
        source, digest = self._source, self._part["digest"]
        travel(
            source, dict(self._past.left), self._total, self._epoch, lambda total, epoch: self._seek(total, epoch, 0)
        )
        if digest and source.digest and source.digest != digest:
            raise ReplayMismatchError(
                f"{source.name}: brought to where it was saved, batch {self._total} of the slot is not the one that "
                "was delivered; the loader does not reproduce its batches"
            )
        catch_up(source, self._then)

    def _arrive(self) -> None:
        """Compare the next batch, if it is known which one came when the state was saved."""
        source, expected = self._source, self._part.get("next_digest", 0)
        if not (expected and self._as_saved):
            return
        if not source.is_open:
            self._keep(source.open_pass(step=source.assignment.base.step), start=False)
        batch = source.peek()
        if batch is END and self._part.get("next_epoch"):
            return  # compared where that epoch is opened: see crossing.py
        take = Offprint(cover=cover_of(source.assignment.loader.options)).take
        if batch is END or take(batch)[0] != expected:
            raise ReplayMismatchError(
                f"{source.name}: resumed from its state after batch {self._total} of the slot, it "
                f"{'yields nothing more' if batch is END else 'yields another batch'}, and not the one that came when "
                "the state was saved: its state is not that of the batches it has yielded. If its data or code were "
                "changed on purpose, say so: load_state_dict(state, strict=False)"
            )
        if self._part.get("next_epoch"):
            # It goes on with the next epoch's batches and ends no pass before them: its passes are no longer those of a
            # loader from the beginning.
            source.past = replace(source.past, whole=False)
