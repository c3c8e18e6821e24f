"""Cursors of a mixture's sources in one shard, and their part of the mixture's saved position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.data.sharded.protocol import Cursor, SavedPosition
from penstock.proto.errors import DatasetError, StateCorruptError

__all__ = ["MixtureMembers", "ended_early", "members_of"]


def ended_early(number: int) -> DatasetError:
    """Return the error for a mixture's source number `number` whose attribute `endless` is True, but which has
    ended."""
    return DatasetError(
        f"sources[{number}] of a Mixture must be endless, as its attribute `endless` says, but has ended. Set the "
        "attribute to False, so that the Mixture repeats the source"
    )


def members_of(saved: SavedPosition | None, count: int) -> tuple[list[SavedPosition | None], set[int]]:
    """Return the saved position of each of a mixture's `count` sources, and the numbers of the sources that have ended,
    from the mixture's saved position. Sources that were added after it was saved are at their beginning. Raises
    StateCorruptError if it has more than `count` sources, or is damaged."""
    if saved is None:
        return [None] * count, set()
    below, ended = saved.get("sources"), saved.get("ended")
    if isinstance(below, list) and len(below) <= count and isinstance(ended, list):
        numbers = {number for number in ended if type(number) is int and 0 <= number < count}
        if len(numbers) == len(ended):
            return [*below, *([None] * (count - len(below)))], numbers
    raise StateCorruptError(
        f"the saved position of a Mixture of {count} sources is damaged: {saved!r:.200}. Load an older state"
    )


class MixtureMembers:
    """Cursors of a mixture's sources in one shard, opened when they are first read. `saved_positions` asks only those
    cursors that have moved since the last call."""

    def __init__(
        self, opened: Callable[[int, SavedPosition | None], Cursor], saved: Sequence[SavedPosition | None]
    ) -> None:
        self._opened, self._saved = opened, list(saved)
        self._cursors: dict[int, Cursor] = {}
        self._moved: set[int] = set()

    def moving(self, number: int) -> Cursor:
        """Return the cursor of source number `number`. The caller will move it, so its saved position must be taken
        again."""
        if number not in self._cursors:
            self._cursors[number] = self._opened(number, self._saved[number])
        self._moved.add(number)
        return self._cursors[number]

    def saved_positions(self) -> list[SavedPosition | None]:
        for number in self._moved:
            self._saved[number] = self._cursors[number].saved_position()
        self._moved.clear()
        return self._saved.copy()

    def restore(self, saved: Sequence[SavedPosition | None]) -> None:
        """Move the cursors of all sources back to these saved positions."""
        self.close()
        self._saved = list(saved)

    def drop(self, number: int) -> None:
        """Close the cursor of source number `number`, which has ended. Its saved position is no longer needed."""
        cursor = self._cursors.pop(number, None)
        if cursor is not None:
            cursor.close()
        self._moved.discard(number)
        self._saved[number] = None

    def close(self) -> None:
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()
        self._moved.clear()
