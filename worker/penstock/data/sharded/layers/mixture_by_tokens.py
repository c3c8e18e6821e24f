"""Order of a mixture whose weights are shares of tokens.

Documents are yielded whole, so shares can be exact only to within one document. A source is eligible if its tokens do
not exceed its share of all tokens so far. The next document comes from the eligible source whose next document would
finish first in a mixture that interleaves single tokens. This is worst-case fair weighted fair queueing (J. Bennett and
H. Zhang, "WF2Q", INFOCOM 1996), whose deviation is at most the longest document, up or down, for any number of sources.
(The simpler rule, to choose the source that lacks most tokens, has a deviation that grows with the number of sources.)
A document's length must be known before the choice, so one document of each source is read ahead. The saved position
lies before that document, so no document is lost.

Each shard counts the tokens that each source has given. The counts are integers, and part of the shard's saved
position.

If the weights change with the position, the order consists of phases with constant weights (mixture_order.py). The
counts begin at 0 with each phase that is not a step of a ramp, and with the first step of a ramp. At each further step
a source's count becomes its number of tokens beyond its share, or minus the number of tokens that it lacks, so that
later steps make up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.data.sharded.layers.layer import NUMBER_LIMIT
from penstock.data.sharded.layers.mixture_members import MixtureMembers, ended_early
from penstock.data.sharded.layers.mixture_order import Phase, SegmentedOrder
from penstock.data.sharded.protocol import NOWHERE, Origin, PositionOf, SavedPosition, cursor_origin
from penstock.proto.errors import DatasetError, StateCorruptError

__all__ = ["ByTokens", "TokenWeights"]


class TokenWeights(NamedTuple):
    """Weights of a mixture's sources by the index of a document in one shard."""

    order: SegmentedOrder
    position_of: PositionOf
    changes: bool
    """True if the mixture's weights change with the position."""

    def phase(self, index: int) -> Phase:
        """Return the phase (range of positions with constant weights) of the shard's document number `index`."""
        return self.order.phase(self.position_of(index) if self.changes else 0)

    def last(self, index: int, saved: SavedPosition | None) -> Phase:
        """Return the phase of the document before document number `index`, which is the document that a saved position
        follows. At the shard's beginning (`saved` is None, or `index` 0) return the phase of document `index`."""
        return self.phase(index - 1 if saved is not None and index else index)


def _given_of(saved: SavedPosition | None, count: int, phase: Phase) -> list[int]:
    """Return the number of tokens that each source has given in a phase, according to a mixture's saved position; zeros
    if the position was saved in another phase. Raises StateCorruptError for an invalid saved position.

    Args:
        saved: saved position of the mixture in a shard; None: the shard's beginning.
        count: number of sources. Those that were added after the position was saved have given 0 tokens.
        phase: phase of the document before the saved position.
    """
    if saved is None:
        return [0] * count
    given, begun = saved.get("given"), saved.get("piece", [0, 0])
    least = -NUMBER_LIMIT if "piece" in saved else -1
    if (
        isinstance(given, list)
        and len(given) <= count
        and all(type(n) is int and least < n < NUMBER_LIMIT for n in given)
        and isinstance(begun, list)
    ):
        # The counts are those of another phase if the Schedule was changed after the position was saved.
        kept = given if begun == [phase.segment, phase.start] else []
        return [*kept, *([0] * (count - len(kept)))]
    raise StateCorruptError(
        f"the saved position of a Mixture(by='tokens') of {count} sources is damaged: {saved!r:.200}. "
        "Load an older state"
    )


def _carried(given: Sequence[int], parts: Sequence[int]) -> list[int]:
    """Return, for each source, by how many tokens it exceeds its share; negative if it has given less. Shares are
    rounded down.

    Args:
        given: number of tokens that each source has given.
        parts: weight of each source as a whole number.
    """
    total, whole = sum(given), sum(parts)
    return [had - part * total // whole for had, part in zip(given, parts, strict=True)]


class ByTokens:
    """Cursor of one shard of a mixture whose weights are shares of tokens."""

    def __init__(
        self,
        members: MixtureMembers,
        weights: TokenWeights,
        ended: set[int],
        stop: str,
        index: int,
        saved: SavedPosition | None,
        where: str,
        names: tuple[str, ...],
    ) -> None:
        self._members, self._weights, self._ended, self._stop = members, weights, ended, stop
        self._index, self._where, self._names = index, where, names
        self._phase = weights.last(index, saved)
        """Phase of the document that was yielded last. It changes only when the next document is chosen, so that a
        saved position does not depend on the weights after it, which may be changed later."""
        self._parts, self._given = self._phase.parts, _given_of(saved, len(names), self._phase)
        self._next: dict[int, tuple[int, Any, SavedPosition, Origin]] = {}
        """Document that was read ahead from each source, by the source's number, as a tuple: number of tokens, the
        document, the source's saved position before the document, the document's origin in the source."""
        self.origin = NOWHERE
        self._over = False

    traced = True

    def __iter__(self) -> ByTokens:
        return self

    def __next__(self) -> Any:
        number = self._due()
        if number is None:
            raise StopIteration
        return self._take(number)

    def skip(self, count: int) -> int:
        for passed in range(count):
            number = self._due()
            if number is None:
                return passed
            self._take(number)
        return count

    def saved_position(self) -> SavedPosition:
        below = self._members.saved_positions()
        for number, (_, _, before, _) in self._next.items():
            below[number] = before
        phase = {"piece": [self._phase.segment, self._phase.start]} if self._weights.changes else {}
        found = {"index": self._index, "ended": sorted(self._ended), "given": self._given.copy(), "sources": below}
        return {**found, **phase}

    def close(self) -> None:
        self._next.clear()
        self._over = True
        self._members.close()

    def _take(self, number: int) -> Any:
        length, document, _, origin = self._next.pop(number)
        self.origin = origin.within(self._names[number])
        self._given[number] += length
        self._index += 1
        return document

    def _enter(self, phase: Phase) -> None:
        """Change to `phase`, the phase of the next document, if it is a new one. Between two steps of one ramp the
        counts of tokens are carried over; otherwise they begin at 0."""
        if phase == self._phase:
            return
        joined = phase.segment == self._phase.segment
        self._given = _carried(self._given, self._parts) if joined else [0] * len(self._given)
        self._phase, self._parts = phase, phase.parts

    def _due(self) -> int | None:
        """Return the number of the source that gives the next document; None if the shard has ended."""
        if self._weights.changes:
            self._enter(self._weights.phase(self._index))
        while not self._over:
            live = [number for number, part in enumerate(self._parts) if part and number not in self._ended]
            missing = [number for number in live if number not in self._next and not self._read(number)]
            if missing and self._stop == "last":
                self._end(missing)
            elif live and (best := self._first_due(live)) in self._next:
                return best
            else:
                self._over = True
        return None

    def _first_due(self, live: list[int]) -> int:
        whole, total = sum(self._parts[number] for number in live), sum(self._given[number] for number in live)
        best, due = -1, 0
        for number in live:
            given, part = self._given[number], self._parts[number]
            if given * whole > part * total:
                continue  # the source has given more than its share
            until = given + (self._next[number][0] if number in self._next else 0)
            if best < 0 or until * self._parts[best] < due * part:
                best, due = number, until
        return best

    def _read(self, number: int) -> bool:
        """Read the next document of source number `number` ahead. Return False if the source has ended."""
        cursor = self._members.moving(number)
        before = cursor.saved_position()
        for document in cursor:
            self._next[number] = (self._length(document, number), document, before, cursor_origin(cursor))
            return True
        if self._stop == "never":
            raise ended_early(number)
        return False

    def _end(self, numbers: list[int]) -> None:
        """Mark these sources as ended. From now on all documents come from the other sources, whose tokens are counted
        from 0 again."""
        for number in numbers:
            self._ended.add(number)
            self._members.drop(number)
        self._given = [0] * len(self._given)

    def _length(self, document: Any, number: int) -> int:
        if isinstance(document, (torch.Tensor, np.ndarray)) and document.ndim == 1:
            return len(document)
        if isinstance(document, (list, tuple)):
            return len(document)
        kind = type(document).__name__
        if isinstance(document, (torch.Tensor, np.ndarray)):
            kind += f" of shape {tuple(document.shape)}"
        raise DatasetError(
            f"sources[{number}] of a Mixture(by='tokens'), {self._where}: each sample must be a tensor, an array or a "
            f"list of token ids with one dimension, got {kind}. Make the token ids by Mapped, or use by='samples'"
        )
