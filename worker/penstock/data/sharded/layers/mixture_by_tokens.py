"""Schedule of a mixture whose weights are shares of tokens.

Documents are yielded whole, so shares can be exact only to within one document. A source is eligible if its tokens do
not exceed its share of all tokens so far. Of the eligible sources, the next is the one whose next document would finish
first in a mixture that interleaves single tokens. This is worst-case fair weighted fair queueing (J. Bennett and H.
Zhang, "WF2Q", INFOCOM 1996), whose deviation is at most the longest document, up or down, for any number of sources.
(If the source that is furthest behind were chosen, it would fall behind more with each additional source.) A document's
length must be known before the choice, so one document of each source is read ahead. The saved position lies before
that document, so no document is lost.

All counts are integers, and each shard has its own. A shard moves between workers together with its counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.data.sharded.layers.layer import NUMBER_LIMIT
from penstock.data.sharded.layers.mixture_members import MixtureMembers
from penstock.data.sharded.protocol import NOWHERE, Origin, Token, cursor_origin
from penstock.proto.errors import DatasetError, StateCorruptError

__all__ = ["ByTokens", "given_of"]


def given_of(token: Token | None, count: int) -> list[int]:
    """Return the number of text tokens that each of `count` sources has given, from `token`, the mixture's saved
    position in a shard. Raises StateCorruptError for an invalid one."""
    if token is None:
        return [0] * count
    given = token.get("given")
    if isinstance(given, list) and len(given) == count and all(type(n) is int and 0 <= n < NUMBER_LIMIT for n in given):
        return list(given)
    raise StateCorruptError(
        f"the saved position of a Mixture(by='tokens') of {count} sources is damaged: {token!r:.200}. "
        "Load an older state"
    )


class ByTokens:
    """Cursor of one shard of a mixture whose weights are shares of tokens."""

    def __init__(
        self,
        members: MixtureMembers,
        parts: tuple[int, ...],
        ended: set[int],
        stop: str,
        index: int,
        given: list[int],
        where: str,
        names: tuple[str, ...],
    ) -> None:
        self._members, self._parts, self._ended, self._stop = members, parts, ended, stop
        self._index, self._given, self._where, self._names = index, given, where, names
        self._next: dict[int, tuple[int, Any, Token, Origin]] = {}
        """Next document of each source, by the source's number: (number of text tokens, document, the source's token
        (position) before it, its origin in the source)."""
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

    def token(self) -> Token:
        tokens = self._members.tokens()
        for number, (_, _, before, _) in self._next.items():
            tokens[number] = before
        return {"index": self._index, "ended": sorted(self._ended), "given": self._given.copy(), "sources": tokens}

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

    def _due(self) -> int | None:
        """Return the number of the source that gives the next document; None if the shard has ended."""
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
                continue  # it has given more than its share
            until = given + (self._next[number][0] if number in self._next else 0)
            if best < 0 or until * self._parts[best] < due * part:
                best, due = number, until
        return best

    def _read(self, number: int) -> bool:
        """Read a source's next document. Return False if the source has ended."""
        cursor = self._members.moving(number)
        before = cursor.token()
        for document in cursor:
            self._next[number] = (self._length(document, number), document, before, cursor_origin(cursor))
            return True
        if self._stop == "never":
            raise DatasetError(f"sources[{number}] of a Mixture must be endless, as it declares, but has ended")
        return False

    def _end(self, numbers: list[int]) -> None:
        """Mark these sources as ended. The other sources get their turns, and shares are counted from zero again."""
        for number in numbers:
            self._ended.add(number)
            self._members.drop(number)
        self._given = [0] * len(self._given)

    def _length(self, document: Any, number: int) -> int:
        if isinstance(document, (torch.Tensor, np.ndarray)) and document.ndim == 1:
            return len(document)
        if isinstance(document, (list, tuple)):
            return len(document)
        raise DatasetError(
            f"sources[{number}] of a Mixture(by='tokens'), {self._where}: each sample must be a tensor, an array or a "
            f"list of token ids with one dimension, got {type(document).__name__}. Tokenize them by Mapped, or use "
            "by='samples'"
        )
