"""Decisions on how a loader that was restored within an epoch gets into the next one: pure functions over values.
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
"""The more careful the later; "" is not known yet."""


def more_careful(one: str, other: str) -> str:
    """Return the one of two crossings that may still be right after the other was found wrong."""
    return max(one, other, key=WAYS.index)


def to_try(known: str) -> tuple[str, ...]:
    """Return the crossings that a verification tries, beginning with the known one: none that is less careful, and not
    REPLAY, which is what remains if all others fail."""
    return WAYS[WAYS.index(known or KEPT) : WAYS.index(REPLAY)]


def first_choice(known: str, *, methods: int, whole: bool, untouched: bool, strays: bool) -> str:
    """Return the crossing that is right by what is known, "" if it must be found out by trying.

    Args:
        known: `Past.rewinds`.
        methods: how many of the four state methods the loader has.
        whole: its stream can be replayed from the beginning.
        untouched: it has yielded nothing since it was restored, and may not know that it is within an epoch.
        strays: after the restore it drew other random numbers than the loader that streamed.
    """
    if methods == 4 and not whole:
        return KEPT  # its stream began on another topology: there is no other word than its own
    if strays:
        return REPLAY
    return "" if known == KEPT and untouched else known


@dataclass(frozen=True)
class First:
    """First batch of an epoch and the state behind it."""

    digest: int | None
    """Digest of its first batch, None if it has none."""
    behind: bytes
    """Loader's state after it, and the generators; b"" if not available."""
    failure: str = ""
    """Error that the loader raised instead; "" = none."""

    def alike(self, other: First) -> bool:
        """Return whether the batch is the same."""
        return (self.digest, self.failure) == (other.digest, other.failure)


def are_one(kept: First, fresh: First, *, awaited: int | None, whole: bool) -> bool:
    """Return whether KEPT and FRESH give the same epoch, so that FRESH can be used.

    An equal first batch alone is not enough, unless the stream cannot be replayed and nothing better is known.
    `awaited`: the digest of the batch that came when a state was saved there; crossings with another one are wrong.
    """
    same = fresh == kept or (fresh.alike(kept) and not whole)
    return same and (awaited is None or awaited == fresh.digest)


def the_right_one(right: First, kept: First, fresh: First) -> str:
    """Return the crossing whose epoch equals that of a loader replayed from the beginning."""
    return KEPT if right == kept else FRESH if right == fresh else REPLAY
