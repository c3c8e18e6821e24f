"""The choice of a *crossing*: the way in which a loader that was restored within an epoch enters the next epoch.

Pure functions; epoch_crossing.py carries the choice out. Needs no torch, because the daemon also compares crossings
that its helper processes found.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "FRESH",
    "KEPT",
    "REPLAY",
    "WAYS",
    "First",
    "are_one",
    "first_choice",
    "more_careful",
    "the_right_one",
    "to_try",
]

KEPT, FRESH, REPLAY = "kept", "fresh", "replay"
WAYS = ("", KEPT, FRESH, REPLAY)
"""Names of the crossings, the most careful last; "" = not known yet."""


def more_careful(one: str, other: str) -> str:
    """Return the more careful of two crossings. It may be right where the less careful one is wrong."""
    return max(one, other, key=WAYS.index)


def to_try(known: str) -> tuple[str, ...]:
    """Return the crossings that a verification tries: first the known one, then more careful ones. REPLAY is left out,
    because it needs no trial: it is used if all others fail."""
    return WAYS[WAYS.index(known or KEPT) : WAYS.index(REPLAY)]


def first_choice(known: str, *, methods: int, whole: bool, untouched: bool, strays: bool) -> str:
    """Return the crossing to use; "" if it is not known and must be found by trying.

    Args:
        known: crossing found so far, see `StreamHistory.crossing`.
        methods: number of the four state methods that the loader has.
        whole: whether the loader's stream can be replayed from the beginning.
        untouched: whether the loader has yielded nothing since it was restored. Such a loader may continue the epoch
            instead of beginning the next one.
        strays: whether the restored loader drew other random numbers than the loader that streamed.
    """
    if methods == 4 and not whole:
        return KEPT  # its stream began on another topology, so it cannot be compared with a new loader
    if strays:
        return REPLAY
    return "" if known == KEPT and untouched else known


@dataclass(frozen=True)
class First:
    """First batch of an epoch, and the loader's state after this batch."""

    digest: int | None
    """Digest of the first batch; None if the epoch has no batch."""
    behind: bytes
    """State of the loader and of the random generators after the first batch; b"" if not available."""
    failure: str = ""
    """Error that the loader raised instead of opening the epoch; "" = none."""

    def alike(self, other: First) -> bool:
        """Return whether both epochs begin with the same batch, or fail with the same error."""
        return (self.digest, self.failure) == (other.digest, other.failure)


def are_one(kept: First, fresh: First, *, awaited: int | None, whole: bool) -> bool:
    """Return whether the crossings KEPT and FRESH lead to the same next epoch, so that FRESH can be used.

    Args:
        kept: beginning of the next epoch with KEPT.
        fresh: beginning of the next epoch with FRESH.
        awaited: digest of the batch that followed when a state was saved at this epoch's end, None if not known. A
            crossing that leads to another batch is wrong.
        whole: whether the stream can be replayed from the beginning. If it can, the states after the first batch must
            be equal too. If it cannot, an equal first batch is enough.
    """
    same = fresh == kept or (fresh.alike(kept) and not whole)
    return same and (awaited is None or awaited == fresh.digest)


def the_right_one(right: First, kept: First, fresh: First) -> str:
    """Return the crossing that leads to the right next epoch.

    right: beginning of the next epoch with a loader that was replayed from the beginning. kept, fresh: the same with
    the crossings KEPT and FRESH. REPLAY is returned if both differ from `right`.
    """
    return KEPT if right == kept else FRESH if right == fresh else REPLAY
