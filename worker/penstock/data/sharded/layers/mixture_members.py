"""Cursors of a mixture's sources in one shard, and their entries in the mixture's tokens (positions)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.data.sharded.protocol import Cursor, Token
from penstock.proto.errors import StateCorruptError

__all__ = ["MixtureMembers", "members_of"]


def members_of(token: Token | None, count: int) -> tuple[list[Token | None], set[int]]:
    """Return the tokens (positions) of a mixture's `count` sources, and the numbers of the sources that have ended,
    from the mixture's token. Sources that were added since it was saved are at their beginning. Raises
    StateCorruptError for more sources."""
    if token is None:
        return [None] * count, set()
    tokens, ended = token.get("sources"), token.get("ended")
    if isinstance(tokens, list) and len(tokens) <= count and isinstance(ended, list):
        numbers = {number for number in ended if type(number) is int and 0 <= number < count}
        if len(numbers) == len(ended):
            return [*tokens, *([None] * (count - len(tokens)))], numbers
    raise StateCorruptError(
        f"the saved position of a Mixture of {count} sources is damaged: {token!r:.200}. Load an older state"
    )


class MixtureMembers:
    """Cursors of a mixture's sources in one shard, opened when needed. Only cursors that have moved since their token
    was taken are asked for a new token."""

    def __init__(self, opened: Callable[[int, Token | None], Cursor], tokens: Sequence[Token | None]) -> None:
        self._opened, self._tokens = opened, list(tokens)
        self._cursors: dict[int, Cursor] = {}
        self._moved: set[int] = set()

    def moving(self, number: int) -> Cursor:
        """Return a source's cursor, which the caller will move."""
        if number not in self._cursors:
            self._cursors[number] = self._opened(number, self._tokens[number])
        self._moved.add(number)
        return self._cursors[number]

    def tokens(self) -> list[Token | None]:
        for number in self._moved:
            self._tokens[number] = self._cursors[number].token()
        self._moved.clear()
        return self._tokens.copy()

    def restore(self, tokens: Sequence[Token | None]) -> None:
        """Move the sources back to the positions of these tokens."""
        self.close()
        self._tokens = list(tokens)

    def drop(self, number: int) -> None:
        """Close the cursor of a source that has ended. Its token is not needed any more."""
        cursor = self._cursors.pop(number, None)
        if cursor is not None:
            cursor.close()
        self._moved.discard(number)
        self._tokens[number] = None

    def close(self) -> None:
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()
        self._moved.clear()
