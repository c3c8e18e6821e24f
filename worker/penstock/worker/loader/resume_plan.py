"""The ways in which a slot can resume from a state of the same topology, best first. Pure functions; start.py carries
the ways out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["ResumeKind", "ResumeWay", "resume_ways", "rotations"]


class ResumeKind(Enum):
    """Kind of data from which a resume starts."""

    OWN_METHODS = "own methods"
    """The state aggregated over all workers: the loader takes its part of it by its own methods."""
    RESTART_POINT = "restart point"
    """The saved restart point: restore it, and replay the batches since."""
    BEGINNING = "beginning"
    """The beginning of the stream: call input_fn again, and replay all batches."""


@dataclass(frozen=True)
class ResumeWay:
    """Way to resume a slot."""

    kind: ResumeKind
    first: int | None = None
    """Slot of the box that is made as worker 0; None unless the loader resumes by its own methods only."""
    doubted: bool = False
    """Flag that this way counts only if it leads other slots of the box to their right batches too: one slot alone may
    yield the right batch by chance."""


def rotations(turn: int, own: int, other: int, *, whole: bool) -> list[ResumeWay]:
    """Return the ways to resume by the loader's own methods. They differ in which slot of the box is made as worker 0.

    In most loaders slot 0 is always worker 0. A loader that counts the samples of all workers begins each launch with
    worker 0. Its slot whose turn it was must then become worker 0, so that each slot continues with its own batches.
    The next batches show which kind a loader is. If they cannot, the result is empty.

    Args:
        turn: the slot whose turn it was; 0 if both kinds of loader give the same, or no batch can be compared.
        own: digest of this slot's next batch when the state was saved, 0 if not known.
        other: digest of the next batch of the slot that is `turn` slots further.
        whole: whether the stream can be replayed from the beginning.
    """
    if not turn:
        return [ResumeWay(ResumeKind.OWN_METHODS, 0)]
    if own in (0, other) and whole:
        return []
    return [ResumeWay(ResumeKind.OWN_METHODS, 0, True), ResumeWay(ResumeKind.OWN_METHODS, turn, True)]


def resume_ways(
    *, methods: int, turns: list[ResumeWay] | None, whole: bool, replays: bool, total: int
) -> list[ResumeWay]:
    """Return the ways to resume, in the order in which they are tried; at least one.

    Args:
        methods: number of the four state methods that the loader has.
        turns: result of `rotations`, for a loader that is resumed by its own methods only; None for any other loader.
        whole: whether the stream can be replayed from the beginning.
        replays: whether a loader that was resumed by its own methods began its next epoch with a wrong batch. All
            workers of the box are then replayed, so that their own states are counted from the same position.
        total: batches of the slot before the saved restart point; 0 if it is the beginning.
    """
    beginning = ResumeWay(ResumeKind.BEGINNING)
    if turns is not None and whole and replays:
        return [beginning]
    if turns is not None:
        ways = [*turns]
    else:
        ways = [ResumeWay(ResumeKind.OWN_METHODS if methods == 4 else ResumeKind.RESTART_POINT)]
    return [*ways, beginning] if whole and (methods == 4 or total > 0) else ways
