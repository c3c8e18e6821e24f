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
    "EpochBeginning",
    "first_choice",
    "lead_to_same_epoch",
    "more_careful",
    "right_crossing",
    "to_try",
]

KEPT, FRESH, REPLAY = "kept", "fresh", "replay"
WAYS = ("", KEPT, FRESH, REPLAY)
"""Names of the crossings (ways in which a restored loader enters the next epoch), in the order in which they replace
each other when one has proved wrong. They are explained in epoch_crossing.py; "" = not known yet."""


def more_careful(one: str, other: str) -> str:
    """Return the one of two crossings (ways in which a restored loader enters the next epoch) that is later in WAYS. It
    is used for a loader for which the other one has proved wrong."""
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
        untouched: True if the loader has yielded nothing since it was restored. The next iter() of such a loader may
            continue the restored epoch instead of beginning the next one.
        strays: True if the restored loader drew other random numbers than the loader that streamed.
    """
    if methods == 4 and not whole:
        return KEPT  # a new loader yields other batches, for example because the stream began with other workers
    if strays:
        return REPLAY
    return "" if known == KEPT and untouched else known


@dataclass(frozen=True)
class EpochBeginning:
    """Beginning of an epoch, as one crossing leads to it: the first batch, and the loader's state after this batch."""

    digest: int | None
    """Digest of the first batch; None if the epoch has no batch."""
    state_after: bytes
    """State of the loader and of the random generators after the first batch, as bytes; b"" if it cannot be taken."""
    failure: str = ""
    """Text of the error that the loader raised instead of opening the epoch or making its first batch; "" = no
    error."""

    def alike(self, other: EpochBeginning) -> bool:
        """Return True if both epochs begin with the same batch, or fail with the same error."""
        return (self.digest, self.failure) == (other.digest, other.failure)


def lead_to_same_epoch(kept: EpochBeginning, fresh: EpochBeginning, *, awaited: int | None, whole: bool) -> bool:
    """Return True if the crossings KEPT (the restored loader) and FRESH (a new one from input_fn) lead to the same next
    epoch, so that FRESH can be used.

    Args:
        kept: beginning of the next epoch with KEPT.
        fresh: beginning of the next epoch with FRESH.
        awaited: digest of the epoch's first batch, if it was recorded with a state saved at the end of the previous
            epoch; None if not known. A crossing that leads to another batch is wrong.
        whole: True if the stream can be replayed from the beginning. Then the states after the first batch must be
            equal too. Otherwise an equal first batch is enough.
    """
    same = fresh == kept or (fresh.alike(kept) and not whole)
    return same and (awaited is None or awaited == fresh.digest)


def right_crossing(right: EpochBeginning, kept: EpochBeginning, fresh: EpochBeginning) -> str:
    """Return the crossing (way into the next epoch) that leads to the right next epoch: KEPT or FRESH, or REPLAY if
    both are wrong.

    right: beginning of the next epoch with a loader that was replayed from the beginning. kept, fresh: beginning of the
    next epoch with the crossings KEPT and FRESH.
    """
    return KEPT if right == kept else FRESH if right == fresh else REPLAY
