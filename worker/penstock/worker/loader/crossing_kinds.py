"""Choice of a *crossing*: the way in which a loader that was restored within an epoch enters the next epoch.

The functions are pure; epoch_crossing.py carries the choice out. This module must not import torch, because the daemon
uses it to compare crossings that its helper processes found.
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
"""Names of the crossings (ways in which a restored loader enters the next epoch), the most careful last. They are
explained in epoch_crossing.py; "" = not known yet."""


def more_careful(one: str, other: str) -> str:
    """Return the more careful of two crossings (ways in which a restored loader enters the next epoch), which may be
    right where the other one leads to wrong batches."""
    return max(one, other, key=WAYS.index)


def to_try(known: str) -> tuple[str, ...]:
    """Return the crossings (ways into the next epoch) that a verification tries, in order: `known`, then more careful
    ones. REPLAY is left out, because it is used anyway if all others fail."""
    return WAYS[WAYS.index(known or KEPT) : WAYS.index(REPLAY)]


def first_choice(known: str, *, methods: int, whole: bool, untouched: bool, strays: bool) -> str:
    """Return the crossing (way into the next epoch) to use; "" if it is not known and must be found by trying.

    Args:
        known: crossing found so far, see `StreamHistory.crossing`.
        methods: number of the four state methods that the loader has.
        whole: True if the loader's stream can be replayed from the beginning.
        untouched: True if the loader has yielded nothing since it was restored. Such a loader may continue the epoch
            instead of beginning the next one.
        strays: True if the restored loader drew other random numbers than the loader that streamed.
    """
    if methods == 4 and not whole:
        return KEPT  # the stream began with another number of workers, so a new loader is no standard of comparison
    if strays:
        return REPLAY
    return "" if known == KEPT and untouched else known


@dataclass(frozen=True)
class First:
    """Beginning of an epoch: its first batch, and the loader's state after this batch."""

    digest: int | None
    """Digest of the first batch; None if the epoch has no batch."""
    behind: bytes
    """State of the loader and of the random generators after the first batch, as bytes; b"" if it cannot be taken."""
    failure: str = ""
    """Text of the error that the loader raised instead of opening the epoch; "" = no error."""

    def alike(self, other: First) -> bool:
        """Return True if both epochs begin with the same batch, or fail with the same error."""
        return (self.digest, self.failure) == (other.digest, other.failure)


def are_one(kept: First, fresh: First, *, awaited: int | None, whole: bool) -> bool:
    """Return True if the crossings KEPT and FRESH (the restored loader, and a new one from input_fn) lead to the same
    next epoch, so that FRESH can be used.

    Args:
        kept: beginning of the next epoch with KEPT.
        fresh: beginning of the next epoch with FRESH.
        awaited: digest of the batch that followed when a state was saved at this epoch's end, None if not known. A
            crossing that leads to another batch is wrong.
        whole: True if the stream can be replayed from the beginning. Then the states after the first batch must be
            equal too. Otherwise an equal first batch is enough.
    """
    same = fresh == kept or (fresh.alike(kept) and not whole)
    return same and (awaited is None or awaited == fresh.digest)


def the_right_one(right: First, kept: First, fresh: First) -> str:
    """Return the crossing (way into the next epoch) that leads to the right next epoch: KEPT or FRESH, or REPLAY if
    both are wrong.

    right: beginning of the next epoch with a loader that was replayed from the beginning. kept, fresh: beginning of the
    next epoch with the crossings KEPT and FRESH.
    """
    return KEPT if right == kept else FRESH if right == fresh else REPLAY
