"""Change of layers in mid-run: packers, filters and functions begin anew, and the position in the documents stays.

The documents are the samples of the lowest Repeated of the stack, or of the data without one. Layers over them hold
some when a state is saved: a window of which some items were yielded, a document that a line has cut. A state names
none of them, but the old layers, made again from their description, can be asked: they read numbered documents from the
saved position on, and origins say which documents each item is made of. A document is

- **seen** if an item before the state's position has a part of it, and no later one: the new layers leave it out;
- **cut** if both have: the new layers read it from its beginning, and the state lists it;
- **unseen** otherwise: the new layers read it.

Documents before the saved position were yielded, by the promise of every source (protocol.py). Old layers with a
function that the new code lacks cannot be made again. That is no loss while none holds a window and no line has to be
skipped: then at most one document is cut, the first from there on that they kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from penstock.data.ordering.order_states import differences
from penstock.data.sharded.layers.chunked import Chunked
from penstock.data.sharded.layers.layer import ANEW, Layer
from penstock.data.sharded.layers.left_out import LEFT_OUT, bits_of, left_out, opened
from penstock.data.sharded.layers.packed import Packed
from penstock.data.sharded.layers.windows import WindowShuffled
from penstock.data.sharded.protocol import (
    Cursor,
    Origin,
    PositionOf,
    SavedPosition,
    ShardedSource,
    cursor_origin,
)
from penstock.proto.errors import InvalidArgumentError, StateCorruptError, StateMismatchError

_NUMBERS = ("index", "window", "done", "offset", "piece", ANEW)
_Levels = list[tuple[int, Mapping[str, Any]]]
"""(number of a layer from the top, its saved position without its source's), in order; twice with LEFT_OUT."""


class Place(NamedTuple):
    """Where a shard continues."""

    saved: SavedPosition
    cut: list[int | None]
    """Index of each cut document in the shard; None if the source does not count them."""


class LayersRestart:
    def __init__(self, was: Mapping[str, Any], new: ShardedSource) -> None:
        """`was`: description of the old source. Raises StateMismatchError if the new one has other documents."""
        layers, stack = [was], [new, *_below(new)]
        while "source" in layers[-1]:
            layers.append(layers[-1]["source"])
        kinds = [one.get("kind") for one in layers]
        layers, documents = layers[: _documents_at(kinds)], layers[_documents_at(kinds)]
        above = stack[: _documents_at([type(one).__name__ for one in stack])]
        self.documents: Any = stack[len(above)]
        if found := differences(documents, self.documents.described()):
            raise StateMismatchError(
                "layers='restart' needs the saved run's documents (the data, or the lowest Repeated), but "
                f"{', '.join(found.values())}. Change only what is above them"
            )
        self.one_to_one = all(
            one.get("kind") == "WindowShuffled" or (one.get("kind") == "Mapped" and not one.get("skip_failures"))
            for one in layers
        )
        """True if the old layers yielded one sample for each document."""
        self._above, self._depth = len(above), len(layers)
        self._numbered = _Numbered(self.documents)
        self._old, self._numbered_old = (_made(layers, below, above) for below in (self.documents, self._numbered))

    def place(
        self, at: tuple[int, int, int], index: int, saved: SavedPosition, count: int, position_of: PositionOf | None
    ) -> Place:
        """Return where shard `at` (shard, epoch, seed) continues after `count` samples of the old layers, of which
        those up to `index` lie before `saved`."""
        levels, documents = self._levels(saved)
        shuffles = _is_cut(levels) and any("window" in one for _, one in levels)  # the first may be any of its window
        if self._old is None and (index < count or shuffles or any(_holds(one) for _, one in levels)):
            raise StateMismatchError(
                f"layers='restart' needs the old functions, because the state has samples in flight in shard {at[0]}. "
                "Keep them for one more step: by layers='restart' leave out what makes windows (Packed's window=, "
                "WindowShuffled, Grouped), and save at an announced step (checkpoint_steps=). Then change the functions"
            )
        if self._old is not None and index < count:
            cursor = opened(self._old, *at, saved, position_of)
            cursor.skip(count - index)
            saved = cursor.saved_position()
            cursor.close()
            levels, documents = self._levels(saved)
        seen = list[int]()
        cut = [0] if _is_cut(levels) else []
        if self._numbered_old is not None and (cut or any(_holds(one) for _, one in levels)):
            self._numbered.begin = documents
            begun = self._begun(levels, at)
            later = self._later(levels, at, max(begun, default=-1), position_of)
            cut, seen = sorted(begun & later), sorted(begun - later)
        indices = _indices(documents, cut)
        documents = left_out(seen, documents)
        base = max([count, *(one[name] for _, one in levels for name in ("index", "window", ANEW) if name in one)])
        return Place(self.anew(base, documents), indices)

    def anew(self, number: int, documents: SavedPosition) -> SavedPosition:
        """Return the saved position of the new layers that begin over a position in the documents."""
        for _ in range(self._above):
            documents = {ANEW: number, "source": documents}
        return documents

    def _levels(self, saved: SavedPosition) -> tuple[_Levels, SavedPosition]:
        """Divide a saved position into those of the layers, and that of the documents."""
        levels, number = _Levels(), 0
        while number < self._depth:
            own: Mapping[str, Any] = {} if saved is None else saved
            if not isinstance(own, Mapping) or any(type(own.get(name, 0)) is not int for name in _NUMBERS):
                raise StateCorruptError(f"the saved position of a layer must be a dict of integers, got {own!r:.200}")
            levels.append((number, {name: value for name, value in own.items() if name != "source"}))
            number += LEFT_OUT not in own
            saved = own.get("source")
        return levels, saved

    def _open(self, levels: _Levels, at: tuple[int, int, int], position_of: PositionOf | None = None) -> Cursor:
        source: Any = self._numbered_old
        for _ in range(levels[0][0]):
            source = source.source
        return opened(source, *at, _joined(levels, {"number": 0}), position_of)

    def _begun(self, levels: _Levels, at: tuple[int, int, int]) -> set[int]:
        """Return the documents behind the saved position of which an item before the state's has a part: by layer,
        those in the items of its window that it has yielded, of the begun first item, or left out below it."""
        found: set[int] = set()
        for number, (layer, own) in enumerate(levels):
            below = levels[number + 1 :]
            if LEFT_OUT in own:
                cursor = self._open(below, at)
                found.update(*(_numbers(cursor) for out, _ in zip(bits_of(own), cursor, strict=False) if out))
            elif own.get("done"):
                cursor = self._open([(layer, {**own, "done": 0}), *below], at)
                found.update(*(_numbers(cursor) for _ in islice(cursor, own["done"])))
            elif own.get("offset") or own.get("piece"):
                begun = {name: 0 for name in ("offset", "piece") if name in own}
                cursor = self._open([(layer, {**own, **begun}), *below], at)
                found.update(_numbers(cursor)[0] for _ in islice(cursor, 1))
            else:
                continue
            cursor.close()
        return found

    def _later(self, levels: _Levels, at: tuple[int, int, int], last: int, position_of: PositionOf | None) -> set[int]:
        """Return the documents of later items, until all up to `last` must have come."""
        cursor, found = self._open(levels, at, position_of), set[int]()
        while self._levels(cursor.saved_position())[1]["number"] <= last and list(islice(cursor, 1)):
            found.update(_numbers(cursor))
        cursor.close()
        return found


class _Numbered(Layer):
    """The documents, each with its number from `begin` on as its source's name."""

    begin: SavedPosition = None

    def described(self) -> dict[str, Any]:
        return self.source.described()

    def open(
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        return _NumberedCursor(opened(self.source, shard, epoch, seed, self.begin, position_of), saved)


class _NumberedCursor(Iterator[Any]):
    def __init__(self, inner: Cursor, saved: SavedPosition) -> None:
        self._inner, self._number = inner, inner.skip((saved or {"number": 0})["number"])

    def __next__(self) -> Any:
        sample = next(self._inner)
        self.origin = Origin(parts=((str(self._number), 1),), source=str(self._number))
        self._number += 1
        return sample

    def skip(self, count: int) -> int:
        passed = self._inner.skip(count)
        self._number += passed
        return passed

    def saved_position(self) -> SavedPosition:
        return {"number": self._number}

    def close(self) -> None:
        self._inner.close()


def _numbers(cursor: Cursor) -> list[int]:
    """Return the numbers of the documents of the item that a cursor yielded last."""
    return [int(source) for source, _ in cursor_origin(cursor).parts]


_PLAIN: dict[Any, Any] = {"Packed": Packed, "Chunked": Chunked, "WindowShuffled": WindowShuffled}
"""Layers without a function."""


def _below(source: Any) -> Iterator[Any]:
    while isinstance(source, Layer):
        yield (source := source.source)


def _documents_at(kinds: Sequence[Any]) -> int:
    """Return the number of the documents in a stack, of which `kinds` are the kinds of source from the top."""
    return max((number for number, kind in enumerate(kinds) if kind == "Repeated"), default=len(kinds) - 1)


def _made(layers: Sequence[Mapping[str, Any]], below: ShardedSource, new: Sequence[Any]) -> ShardedSource | None:
    """Make the old layers over a source; None if the new ones lack a function of theirs."""
    for described in reversed(layers):
        own = {name: value for name, value in described.items() if name not in ("kind", "source")}
        kind = described.get("kind")
        same = [one for one in new if type(one).__name__ == kind and not differences(own, one.settings())]
        if same:
            below = same[0].over(below)
        elif kind in _PLAIN:
            names = {"names": own.pop("renamed", None), "shift": own.pop("shift", True)} if kind == "Packed" else {}
            try:
                below = _PLAIN[kind](below, **own, **names)
            except (TypeError, InvalidArgumentError) as error:
                raise StateMismatchError(f"the layers of the state must be of this version, got {described}") from error
        else:
            return None
    return below


def _joined(levels: _Levels, documents: SavedPosition) -> SavedPosition:
    for _, own in reversed(levels):
        documents = {**own, "source": documents}
    return documents


def _is_cut(levels: _Levels) -> bool:
    return any(one.get("offset") or one.get("piece") for _, one in levels)


def _holds(own: Mapping[str, Any]) -> bool:
    return bool(own.get("done")) or LEFT_OUT in own


def _indices(saved: SavedPosition, numbers: Sequence[int]) -> list[int | None]:
    """Return the indices of samples that are counted from a saved position; None if it does not have its own."""
    if isinstance(saved, Mapping) and LEFT_OUT in saved:
        bits = bits_of(saved)
        kept = np.flatnonzero(~bits).tolist()
        among = [kept[number] if number < len(kept) else len(bits) + number - len(kept) for number in numbers]
        return _indices(saved["source"], among)
    first = saved.get("index") if isinstance(saved, Mapping) else saved or 0
    return [None if first is None else first + number for number in numbers]
