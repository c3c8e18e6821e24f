"""Cursors of a mixture's sources in one shard, and their saved positions, which are part of the mixture's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.data.sharded.protocol import Cursor, SavedPosition
from penstock.proto.errors import DatasetError, StateCorruptError

__all__ = ["MixtureMembers", "ended_early", "members_of"]


def ended_early(number: int) -> DatasetError:
    """Return the error to raise when a mixture's source number `number` has ended although its attribute `endless` is
    True."""
    return DatasetError(
        f"sources[{number}] of a Mixture must be endless, as its attribute `endless` says, but has ended. Set the "
        "attribute to False, so that the Mixture repeats the source"
    )


def members_of(saved: SavedPosition | None, count: int) -> tuple[list[SavedPosition | None], set[int]]:
    """Return what a mixture's saved position contains: the saved position of each source, and the numbers of the
    sources that have ended in the shard. Raises StateCorruptError if it is damaged, or has more sources than `count`.

    Args:
        saved: saved position of the mixture; None: the shard's beginning.
        count: number of sources that the mixture has. Sources that were added after the position was saved get None:
            they are at their beginning.
    """
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
    """Cursors of a mixture's sources in one shard. A cursor is opened when it is first read. `saved_positions` takes a
    new saved position only from cursors that may have moved since its last call."""

    def __init__(
        self, opened: Callable[[int, SavedPosition | None], Cursor], saved: Sequence[SavedPosition | None]
    ) -> None:
        self._opened, self._saved = opened, list(saved)
        self._cursors: dict[int, Cursor] = {}
        self._moved: set[int] = set()

    def moving(self, number: int) -> Cursor:
        """Return the cursor of source number `number`, to be moved by the caller. The next call of `saved_positions`
        takes a new saved position from it."""
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
        """Close all cursors, to open them again at these saved positions, one for each source."""
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
