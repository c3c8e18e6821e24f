"""Bringing a loader to where a slot starts, and out of a pass that the loop left: what a runner does with its source
before and between batches, and what whoever makes its stream again must do in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.proto.errors import StateMismatchError
from penstock.proto.v1 import records_pb2
from penstock.worker.source import Base, Place, Source

__all__ = ["catch_up", "leave", "start"]


def start(
    source: Source,
    resume: dict[str, Any] | None,
    keep: Callable[[Base], None],
    seek: Callable[[int, int, int], None],
) -> None:
    """Start a built source as its assignment says.

    Args:
        resume: decoded blob of the assignment's resume, None to start from nothing.
        keep: gets each origin that is taken.
        seek: replays to a place, (total, epoch, digest of that batch or 0).
    """
    a = source.assignment
    base, slots = a.base, a.base.slots
    own = slots[a.slot] if len(slots) > a.slot else records_pb2.SlotPosition()
    source.place = Place(base.epoch, own.delivered, own.total, 0)
    if resume is None:
        keep(source.open_pass(step=base.step))
        return
    part = resume["slots"].get(a.slot) if a.resume.same_shape else None
    if source.traits.state_methods == 4:
        if part is not None:
            source.learn_skips(Base.of(part))
        source.resume_by_own_methods(resume["aggregated"], resume["strict"])
        if part is None:
            keep(source.open_pass(step=base.step))
            return
        source.place = Place(*part["restart"]["at"])
        keep(source.open_pass(step=base.step, rng_after=part["restart"]["rng"]))
    elif part is None:
        raise StateMismatchError(
            f"{source.name}: the state holds nothing for this slot, and a loader with "
            f"{source.traits.state_methods or 'none'} of the four state methods cannot take another's"
        )
    else:
        source.restore(Base.of(part))
        keep(Base.of(part))  # all that this attempt yields comes from there
    seek(own.total, base.epoch, part["digest"])
    # Over the end of the pass, if it had ended when the state was saved: for this slot, or for all.
    catch_up(source, base.epoch if a.slot in base.live else base.epoch + 1)


def catch_up(source: Source, epoch: int) -> None:
    """Go to where pass `epoch` is opened, if the source is not that far, over the end of the pass that it is in and of
    those in between, of which it had no batch. Raises ReplayMismatchError if one comes."""
    while source.place.epoch < epoch:
        if not source.is_open:
            source.open_pass()
        source.reach_end()


def leave(source: Source, epoch: int, total: int) -> None:
    """Leave pass `epoch` after batch `total`, where the source stands, as the loop left it."""
    catch_up(source, epoch)
    if not source.is_open:
        source.open_pass()
    if not source.saves_state:
        source.reseed("left", epoch, total)
    source.leave_pass()
