"""Pieces of a user's data: indexable, or iterable, or a function that opens one of these, which is closed again. At
most `max_open` are open; the least recently used one is closed first, and all when the last cursor has ended."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Set
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch.utils.data

from penstock.data.arguments import whole
from penstock.data.formats.lance import LanceRows
from penstock.data.formats.megatron import MegatronDocuments
from penstock.data.loading.keyed_random import CONTAINERS
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.sources.isolation import OwnGenerators, SoleWorker
from penstock.data.sharded.sources.opaque import close_quietly
from penstock.data.stop_iteration import forbid_stop_iteration, stop_iteration_error
from penstock.data.streaming_dataset import StreamingDataset
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.proto.state.generators import derive_seed

_NOT_PIECES = (str, bytes, Mapping, Set, torch.utils.data.Dataset, torch.Tensor, np.ndarray)
"""Refused as the argument `pieces`: for example, each element of an array would become a piece."""
_PLAIN = (*CONTAINERS, StreamingDataset, MegatronDocuments, LanceRows)
"""Read without user code, so without drawing; so are pyarrow's tables. A subclass is user code. See `may_draw`."""

_WITH_FINGERPRINT = (StreamingDataset, MegatronDocuments, LanceRows)


class OpenPieces:
    """Open pieces of one source: at most `most`. The key is a piece's number, or the `id()` of its cursor."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._closers: OrderedDict[object, Callable[[], None]] = OrderedDict()

    def used(self, key: object) -> bool:
        """Mark a piece as the most recently used one. Return False if it is not open."""
        if key not in self._closers:
            return False
        self._closers.move_to_end(key)
        return True

    def add(self, key: object, close: Callable[[], None]) -> None:
        """Add an opened piece, after closing the least recently used ones if too many are open."""
        self.close_surplus()
        self._closers[key] = close

    def close_surplus(self) -> None:
        while len(self._closers) >= self.most:
            _, close_oldest = self._closers.popitem(last=False)
            close_oldest()

    def forget(self, key: object) -> None:
        self._closers.pop(key, None)

    def close(self) -> None:
        while self._closers:
            self._closers.popitem(last=False)[1]()


class Pieces:
    def __init__(
        self, pieces: Sequence[Any], counts: Sequence[int] | None, names: Sequence[str] | None, max_open: int
    ) -> None:
        """Check all pieces. If the others are indexable, functions are called: with `counts` only the first; otherwise
        one after the other, until one returns an object that is not indexable."""
        if not isinstance(pieces, Iterable) or isinstance(pieces, _NOT_PIECES):
            raise InvalidArgumentError(
                f"pieces must be a list of pieces, got {type(pieces).__qualname__}. Pass [piece]"
            )
        self._pieces = list(pieces)
        if not self._pieces:
            raise InvalidArgumentError("pieces must have at least one piece, got none. Check how the list is made")
        self.names = None if names is None else [str(name) for name in one_each("names", names, len(self))]
        given = None if counts is None else [_count(number) for number in one_each("counts", counts, len(self))]
        self._nothing_open(max_open)
        self._are_given = given is not None
        """True if the user gave `counts`; False if the pieces were counted."""
        self._functions = {number for number in range(len(self)) if self._is_function(number)}
        self.unreadable = ""
        """Why a function could not open its piece; "" if all could, or were not called. A source whose data are gone
        may be one that a Mixture does not read any more."""
        try:
            lengths = self._lengths(given)
        except OSError as error:
            lengths, self.unreadable = None, f"{error} ({', '.join(getattr(error, '__notes__', ()))})"
        self.by_position = lengths is not None
        self.counts = given if lengths is None else lengths
        self._lists = {n: piece for n, piece in enumerate(self._pieces) if type(piece) in (list, tuple)}
        self.opened.close()
        _all.add(self)

    def _nothing_open(self, max_open: int) -> None:
        self.opened = OpenPieces(max_open)
        self._tables: dict[int, Any] = {}
        """What the functions of indexable pieces have returned, by number."""
        self._readers: set[int] = set()

    def __len__(self) -> int:
        return len(self._pieces)

    def name(self, number: int) -> str:
        return f"piece {number}" + (f" ({self.names[number]})" if self.names is not None else "")

    def sizes(self, number: int) -> Ints:
        """Return the records in each part of a piece: shards or row groups of a StreamingDataset, or the whole."""
        piece = self._pieces[number]
        if isinstance(piece, StreamingDataset):
            return np.concatenate(piece.sizes)
        assert self.counts is not None
        return np.array([self.counts[number]], np.int64)

    def streaming(self, number: int) -> StreamingDataset | None:
        """Return a piece that is a StreamingDataset, whose parts can be prefetched; None for any other."""
        piece = self._pieces[number]
        return piece if isinstance(piece, StreamingDataset) else None

    def fingerprints(self) -> list[str]:
        return [piece.fingerprint for piece in self._pieces if isinstance(piece, _WITH_FINGERPRINT)]

    def skip_failures(self) -> int:
        """Return the largest `skip_failures` of the pieces that are StreamingDatasets."""
        return max((each.skip_failures for each in self._pieces if isinstance(each, StreamingDataset)), default=0)

    def read_by(self, cursor: int) -> None:
        self._readers.add(cursor)

    def left(self, cursor: int) -> None:
        """Remove a cursor that has ended. After the last one, all pieces are closed."""
        if cursor in self._readers:
            self._readers.remove(cursor)
            if not self._readers:
                self.opened.close()

    # ---- indexable pieces

    def record(self, number: int, offset: int) -> Any:
        if number in self._functions:
            table = self._table(number)
        else:
            table = self._pieces[number]
        try:
            return _row(table, offset)
        except StopIteration as error:
            raise stop_iteration_error(f"record {offset} of {self.name(number)}") from error
        except IndexError as error:
            raise DatasetError(
                f"{self.name(number)} must have record {offset}, because {self._known(number)} ({error})"
            ) from error

    def listed(self, found: Sequence[tuple[int, int]]) -> list[Any] | None:
        """Return records in the fastest way; None if a piece is no list or tuple or lacks one: use `record` then."""
        pieces = self._lists
        try:
            return [pieces[piece][offset] for piece, offset in found]
        except LookupError:
            return None

    def may_draw(self, number: int) -> bool:
        """Return True if reading a record may draw random numbers: user code reads it, or clips are random."""
        piece = self._tables.get(number) if number in self._functions else self._pieces[number]
        plain = type(piece) in _PLAIN or hasattr(piece, "to_pylist")
        return not plain or getattr(piece, "clips_draw", False) is True

    def _known(self, number: int) -> str:
        assert self.counts is not None
        count = f"{self.counts[number]} records"
        return f"counts says that it has {count}" if self._are_given else f"it had {count} when the source was made"

    def _table(self, number: int) -> Any:
        table = self._tables.get(number)
        if table is None:
            self.opened.close_surplus()
            table = self._open_table(number)
            if not _is_indexable(table):
                close_quietly(table)
                raise DatasetError(
                    f"{self.name(number)} must have len() and [i] like the others, got {type(table).__qualname__}"
                )
            assert self.counts is not None
            self._check_length(number, len(table), self.counts[number])
            self._keep(number, table)
        else:
            self.opened.used(number)
        return table

    def _open(self, number: int) -> Any:
        try:
            with SoleWorker(nullcontext()):
                opened = self._pieces[number]()
        except StopIteration as error:
            raise stop_iteration_error(f"the function that opens {self.name(number)}") from error
        except Exception as error:
            error.add_note(f"raised by the function that opens {self.name(number)}")
            raise
        _refuse_unordered(f"{self.name(number)} opens", opened)
        return opened

    def _open_table(self, number: int) -> Any:
        """Open an indexable piece, with generators seeded for it, because it may be opened several times."""
        with OwnGenerators(derive_seed(0, "opens", number)):
            return self._open(number)

    def _keep(self, number: int, table: Any) -> None:
        self.opened.add(number, lambda: close_quietly(self._tables.pop(number)))
        self._tables[number] = table

    # ---- iterable pieces

    def stream(self, number: int) -> tuple[Callable[[], Any], bool]:
        """Return a function that opens a piece, and True if the result is the user's own, which is not closed."""
        piece = self._pieces[number]
        return (partial(self._open, number), False) if number in self._functions else ((lambda: piece), True)

    def as_iterable(self, piece: Any) -> Any:
        """Return an iterable over the records of a piece. (A source may have pieces of both kinds.)"""
        return _Rows(piece) if _is_indexable(piece) else piece

    # ---- checks

    def _is_function(self, number: int) -> bool:
        piece = self._pieces[number]
        _refuse_unordered(f"{self.name(number)} is", piece)
        if _is_indexable(piece):
            return False
        if hasattr(type(piece), "__iter__"):
            if isinstance(piece, Iterator):
                raise InvalidArgumentError(
                    f"{self.name(number)} must be readable repeatedly, got {type(piece).__qualname__}. Pass a function"
                )
            return False
        if not callable(piece):
            raise InvalidArgumentError(
                f"{self.name(number)} must be indexable or iterable, or a function, got {type(piece).__qualname__}"
            )
        return True

    def _lengths(self, given: Sequence[int] | None) -> list[int] | None:
        """Return the number of records in each piece if all are indexable; None otherwise."""
        lengths = list(given or [0] * len(self))
        own = [number for number in range(len(self)) if number not in self._functions]
        indexable = [number for number in own if _is_indexable(self._pieces[number])]
        for number in indexable:
            lengths[number] = len(self._pieces[number])
            if given is not None:
                self._check_length(number, lengths[number], given[number])
        if len(indexable) < len(own):
            return None
        # With counts, only the first piece is opened to find out its kind; the others are assumed to be of the same
        # kind.
        for number in sorted(self._functions)[: None if given is None else 1]:
            self.opened.close_surplus()
            table = self._open_table(number)
            if not _is_indexable(table):
                close_quietly(table)
                return None
            lengths[number] = len(table)
            if given is not None:
                self._check_length(number, lengths[number], given[number])
            self._keep(number, table)
        return lengths

    def _check_length(self, number: int, length: int, given: int) -> None:
        if length != given:
            was = "as counts says" if self._are_given else "as at first"
            raise DatasetError(f"{self.name(number)} must have {given} records, {was}, got {length}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": OpenPieces(self.opened.most), "_tables": {}, "_readers": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _all.add(self)


def one_each(name: str, values: Sequence[Any], pieces: int) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise InvalidArgumentError(f"{name} must be a list with one entry for each piece, got {values!r:.200}")
    values = list(values)
    if len(values) != pieces:
        raise InvalidArgumentError(f"{name} must have one entry for each of {pieces} pieces, got {len(values)}")
    return values


_all: weakref.WeakSet[Pieces] = weakref.WeakSet()


def _forked() -> None:
    """Let a forked child open its own pieces: an inherited file has one position in both processes."""
    for pieces in list(_all):
        pieces._nothing_open(pieces.opened.most)


os.register_at_fork(after_in_child=_forked)


class _Rows:
    """Records of an indexable piece, in order. The state of its iterator is the next one's number."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __iter__(self) -> _RowIterator:
        return _RowIterator(self._table)

    def close(self) -> None:
        close_quietly(self._table)


class _RowIterator(Iterator[Any]):
    def __init__(self, table: Any) -> None:
        self._table, self._next = table, 0

    def __next__(self) -> Any:
        if self._next >= len(self._table):
            raise StopIteration
        self._next += 1
        with forbid_stop_iteration(f"record {self._next - 1}"):
            return _row(self._table, self._next - 1)

    def state_dict(self) -> int:
        return self._next

    def load_state_dict(self, state: int) -> None:
        self._next = state


def _refuse_unordered(what: str, piece: Any) -> None:
    kind = type(piece).__qualname__
    if isinstance(piece, str | bytes | Mapping):
        raise InvalidArgumentError(
            f"{what} a {kind}, not a sequence of records. Pass its records, or a function that opens it"
        )
    if isinstance(piece, Set) and not isinstance(piece, KeysView | ItemsView):
        raise InvalidArgumentError(f"{what} a {kind}, whose order differs between processes. Pass a sorted list")
    if hasattr(piece, "iloc"):
        raise InvalidArgumentError(f"{what} a {kind}, which iterates over columns. Pass pyarrow.Table.from_pandas()")


def _is_indexable(piece: Any) -> bool:
    if isinstance(piece, torch.utils.data.IterableDataset):
        return False
    return hasattr(type(piece), "__len__") and hasattr(type(piece), "__getitem__")


def _row(table: Any, offset: int) -> Any:
    if hasattr(table, "to_pylist") and hasattr(table, "column_names"):
        if offset >= len(table):
            raise IndexError(f"a row's number must be at least 0 and below {len(table)}, got {offset}")
        return table.slice(offset, 1).to_pylist()[0]
    return table[offset]


def _count(value: int) -> int:
    number = whole("counts", value)
    if number is None or number < 0:
        raise InvalidArgumentError(f"each of counts must be at least 0, got {number}")
    return number
