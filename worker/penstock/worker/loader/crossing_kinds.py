"""The choice of how a loader that was restored within an epoch enters the next one (its *crossing*): pure functions.
epoch_crossing.py carries them out. Needs no torch, because the daemon compares the findings of its helpers."""

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
"""Crossings, the most careful last; "" = not known yet."""


def more_careful(one: str, other: str) -> str:
    """Return the more careful of two crossings, which may still be right where the other is wrong."""
    return max(one, other, key=WAYS.index)


def to_try(known: str) -> tuple[str, ...]:
    """Return the crossings that a verification tries: the known one, then more careful ones. REPLAY is not among them,
    because it needs no trial: it is used if all others fail."""
    return WAYS[WAYS.index(known or KEPT) : WAYS.index(REPLAY)]


def first_choice(known: str, *, methods: int, whole: bool, untouched: bool, strays: bool) -> str:
    """Return the crossing to use, as far as it is known; "" if it must be found out by trying.

    Args:
        known: crossing found so far, see `StreamHistory.crossing`.
        methods: how many of the four state methods the loader has.
        whole: the loader's stream can be replayed from the beginning.
        untouched: the loader has yielded nothing since it was restored, and may not know that it is within an epoch.
        strays: after the restore the loader drew other random numbers than the loader that streamed.
    """
    if methods == 4 and not whole:
        return KEPT  # its stream began on another topology, so it cannot be compared with a new loader
    if strays:
        return REPLAY
    return "" if known == KEPT and untouched else known


@dataclass(frozen=True)
class First:
    """First batch of an epoch and the loader's state after it."""

    digest: int | None
    """Digest of the batch, None if the epoch has none."""
    behind: bytes
    """Loader's state after the batch, and the random generators; b"" if not available."""
    failure: str = ""
    """Error that the loader raised instead; "" = none."""

    def alike(self, other: First) -> bool:
        """Return whether both have the same batch, or the same error."""
        return (self.digest, self.failure) == (other.digest, other.failure)


def are_one(kept: First, fresh: First, *, awaited: int | None, whole: bool) -> bool:
    """Return whether KEPT and FRESH give the same epoch; then FRESH can be used.

    An equal first batch is enough only if the stream cannot be replayed; otherwise the states after it must be equal
    too. `awaited`: digest of the batch that followed when a state was saved at this epoch's end, None if not known; a
    crossing with another batch is wrong.
    """
    same = fresh == kept or (fresh.alike(kept) and not whole)
    return same and (awaited is None or awaited == fresh.digest)


def the_right_one(right: First, kept: First, fresh: First) -> str:
    """Return the crossing whose epoch equals that of a loader replayed from the beginning."""
    return KEPT if right == kept else FRESH if right == fresh else REPLAY
