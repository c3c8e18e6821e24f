"""The ways of a slot that resumes on the topology of its state, in their order. Pure; start.py carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["ResumeKind", "ResumeWay", "resume_ways", "rotations"]


class ResumeKind(Enum):
    """Start of a way."""

    OWN_METHODS = "own methods"
    """The loader takes its part of the aggregated state."""
    RESTART_POINT = "restart point"
    """The saved restart point is restored, and the batches since are replayed."""
    BEGINNING = "beginning"
    """input_fn anew, and all batches are replayed."""


@dataclass(frozen=True)
class ResumeWay:
    """A way to resume."""

    kind: ResumeKind
    first: int | None = None
    """Slot of the box that is the loader's worker 0, for a loader that is resumed by its own methods only."""
    doubted: bool = False
    """Flag that other slots of the box must confirm it: one alone may yield the right batch by chance."""


def rotations(turn: int, own: int, other: int, *, whole: bool) -> list[ResumeWay]:
    """Return which slot of the box may be the loader's worker 0, so that all go on with their own batches.

    Most go on as they were. A loader that counts the samples of all workers begins a launch with worker 0, and its next
    batch is that of the slot whose turn it is. The batches tell the two apart: no way is left if they cannot.

    Args:
        turn: the slot whose turn it was; 0 if the two are the same, or no batch can be compared.
        own: digest of this slot's next batch when the state was saved, 0 if it was not known.
        other: the same of the slot that is `turn` further.
        whole: the stream can be made again from the beginning.
    """
    if not turn:
        return [ResumeWay(ResumeKind.OWN_METHODS, 0)]
    if own in (0, other) and whole:
        return []
    return [ResumeWay(ResumeKind.OWN_METHODS, 0, True), ResumeWay(ResumeKind.OWN_METHODS, turn, True)]


def resume_ways(
    *, methods: int, turns: list[ResumeWay] | None, whole: bool, replays: bool, total: int
) -> list[ResumeWay]:
    """Return the ways in the order in which they are tried; at least one.

    Args:
        methods: how many of the four state methods the loader has.
        turns: `rotations`, of a loader that is resumed by its own methods only; None for another.
        whole: the stream can be made again from the beginning.
        replays: it was found that, resumed, such a loader begins its next epoch with a wrong batch. All of the box are
            made again then, so that their own states are counted from the same position.
        total: batches before the saved restart point; one without any is a beginning itself.
    """
    beginning = ResumeWay(ResumeKind.BEGINNING)
    if turns is not None and whole and replays:
        return [beginning]
    if turns is not None:
        ways = [*turns]
    else:
        ways = [ResumeWay(ResumeKind.OWN_METHODS if methods == 4 else ResumeKind.RESTART_POINT)]
    return [*ways, beginning] if whole and (methods == 4 or total > 0) else ways
