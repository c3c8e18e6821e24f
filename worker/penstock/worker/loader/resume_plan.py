"""Ways in which a slot can resume from a state that was saved with the same numbers of boxes and workers, best first.
The functions are pure; start.py tries the ways."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["ResumeKind", "ResumeWay", "resume_ways", "rotations"]


class ResumeKind(Enum):
    """Kind of data from which a resume starts."""

    OWN_METHODS = "own methods"
    """State aggregated over all workers, from which the loader loads its part by its own methods
    (deaggregate_state_dict, then load_state_dict)."""
    RESTART_POINT = "restart point"
    """Restart point of the slot in the saved state. It is restored, and the batches since are replayed."""
    BEGINNING = "beginning"
    """Beginning of the stream: input_fn is called again, and all batches are replayed."""


@dataclass(frozen=True)
class ResumeWay:
    """Way to bring a slot's loader to the saved position."""

    kind: ResumeKind
    first: int | None = None
    """Number of the slot of the box (data-parallel rank) that is worker 0 for user code from now on; None unless the
    loader resumes by its own methods only."""
    doubted: bool = False
    """True if this way needs a check on other slots of the box: it is used only if they too get their right batches by
    it. A single slot may get the right batch by chance."""


def rotations(turn: int, own: int, other: int, *, whole: bool) -> list[ResumeWay]:
    """Return the ways to resume a loader by its own methods (deaggregate_state_dict, then load_state_dict). They differ
    in the slot that becomes worker 0 for user code.

    For most loaders slot 0 is always worker 0. But a loader that counts the samples of all workers yields the next
    batch of the box from worker 0 after a resume. Then the slot whose turn it was must become worker 0, so that each
    slot continues with its own batches. The next batches show which kind a loader is. The result is empty if they
    cannot show it and the stream can be replayed from the beginning instead.

    Args:
        turn: the slot whose turn it was when the state was saved; 0 if the two kinds of loader need not be told apart,
            because that slot is slot 0 or the saved digests cannot be used.
        own: digest of this slot's next batch when the state was saved, 0 if not known.
        other: digest of the next batch of the slot that is `turn` slots further, 0 if not known.
        whole: True if the stream can be replayed from the beginning.
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
        whole: True if the stream can be replayed from the beginning.
        replays: True if any slot's loader of the box, resumed by its own methods, began its next epoch with a wrong
            batch. All slots are then replayed, so that all loaders count from the beginning of the run.
        total: number of the slot's batches before the saved restart point; 0 at the beginning.
    """
    beginning = ResumeWay(ResumeKind.BEGINNING)
    if turns is not None and whole and replays:
        return [beginning]
    if turns is not None:
        ways = [*turns]
    else:
        ways = [ResumeWay(ResumeKind.OWN_METHODS if methods == 4 else ResumeKind.RESTART_POINT)]
    return [*ways, beginning] if whole and (methods == 4 or total > 0) else ways
