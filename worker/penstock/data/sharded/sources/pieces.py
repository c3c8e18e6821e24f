"""What a user's data consist of, in pieces: lists, tables, datasets, files, streams; opened when they are needed.

A piece is indexable (it has a length, and records by number), or iterable (read along from its beginning), or a
function that opens one or the other. What was opened here is closed here: at most `max_open` at a time, the least
recently used first, and all of them when nobody reads.
"""

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
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.sources.opaque import let_go
from penstock.data.sharded.sources.randomness import OwnGenerators
from penstock.data.sharded.sources.undivided import Undivided
from penstock.data.stop_iteration import no_end, not_an_end
from penstock.data.streaming_dataset import StreamingDataset
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.proto.state.generators import derive_seed

__all__ = ["OpenPieces", "Pieces"]


_NO_LIST = (str, bytes, Mapping, Set, torch.utils.data.Dataset, torch.Tensor, np.ndarray)
"""Taken for a list of pieces, each of their records would be one."""
_PLAIN = (list, tuple, range, np.ndarray, np.memmap, torch.Tensor)
"""Types whose records are read without user code, so that none draws random numbers; StreamingDataset and tables of
pyarrow are such, too."""


class OpenPieces:
    """What is open, the least recently used first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._closers: OrderedDict[object, Callable[[], None]] = OrderedDict()

    def used(self, key: object) -> bool:
        """It was used just now; False if it is not open."""
        if key not in self._closers:
            return False
        self._closers.move_to_end(key)
        return True

    def add(self, key: object, close: Callable[[], None]) -> None:
        """It is open from now on."""
        self.make_room()
        self._closers[key] = close

    def make_room(self) -> None:
        """For one more, before it is opened."""
        while len(self._closers) >= self.most:
            _, close_oldest = self._closers.popitem(last=False)
            close_oldest()

    def forget(self, key: object) -> None:
        """It was closed by someone else."""
        self._closers.pop(key, None)

    def close(self) -> None:
        while self._closers:
            self._closers.popitem(last=False)[1]()


class Pieces:
    """Pieces by number, and their records."""

    def __init__(
        self, pieces: Sequence[Any], counts: Sequence[int] | None, names: Sequence[str] | None, max_open: int
    ) -> None:
        """Looks at all pieces, and opens those whose length must be known and is not said; one at least, to see what
        such functions open.

        Raises InvalidArgumentError for what is no piece, DatasetError for counts that are not so.
        """
        if not isinstance(pieces, Iterable) or isinstance(pieces, _NO_LIST):
            raise InvalidArgumentError(
                f"pieces is a {type(pieces).__qualname__}; give a list of pieces, even if there is only one: [piece]"
            )
        self._pieces = list(pieces)
        if not self._pieces:
            raise InvalidArgumentError("pieces is empty: give one at least")
        self.names = None if names is None else [str(name) for name in self._as_many("names", names)]
        said = None if counts is None else [_count(number) for number in self._as_many("counts", counts)]
        self._nothing_open(max_open)
        self._functions = {number for number in range(len(self)) if self._is_function(number)}
        lengths = self._lengths(said)
        self.by_position = lengths is not None
        """All are indexable."""
        self.counts = said if lengths is None else lengths
        """Records of each, where they are known."""
        self.opened.close()
        _all.add(self)

    def _nothing_open(self, max_open: int) -> None:
        self.opened = OpenPieces(max_open)
        self._tables: dict[int, Any] = {}
        """Those that are open here, by the number of their piece."""
        self._readers: set[int] = set()

    def __len__(self) -> int:
        return len(self._pieces)

    def name(self, number: int) -> str:
        return f"piece {number}" + (f" ({self.names[number]})" if self.names is not None else "")

    def sizes(self, number: int) -> Ints:
        """Records of the piece, in parts that lie together."""
        piece = self._pieces[number]
        if isinstance(piece, StreamingDataset):
            return np.concatenate(piece.sizes)
        assert self.counts is not None
        return np.array([self.counts[number]], np.int64)

    def streaming(self, number: int) -> StreamingDataset | None:
        """The piece, if its parts are fetched ahead."""
        piece = self._pieces[number]
        return piece if isinstance(piece, StreamingDataset) else None

    def fingerprints(self) -> list[str]:
        return [piece.fingerprint for piece in self._pieces if isinstance(piece, StreamingDataset)]

    def read_by(self, cursor: int) -> None:
        """This one reads."""
        self._readers.add(cursor)

    def left(self, cursor: int) -> None:
        """This one reads no more; with the last one all is closed."""
        if cursor in self._readers:
            self._readers.remove(cursor)
            if not self._readers:
                self.opened.close()

    # ---- indexable ones

    def record(self, number: int, offset: int) -> Any:
        """Raises DatasetError if the piece is not as long as it was."""
        if number in self._functions:
            table = self._table(number)
        else:
            table = self._pieces[number]
        try:
            return _row(table, offset)
        except StopIteration as error:
            raise not_an_end(f"record {offset} of {self.name(number)}") from error
        except IndexError as error:
            raise DatasetError(
                f"{self.name(number)}: it has no record {offset}, and {self._known(number)} ({error})"
            ) from error

    def may_draw(self, number: int) -> bool:
        """User code reads its records, and may draw random numbers for them."""
        piece = self._tables.get(number) if number in self._functions else self._pieces[number]
        plain = type(piece) in _PLAIN or type(piece) is StreamingDataset or hasattr(piece, "to_pylist")
        return not plain

    def _known(self, number: int) -> str:
        return f"{self.counts[number]} were said to be there" if self.counts is not None else "was longer before"

    def _table(self, number: int) -> Any:
        table = self._tables.get(number)
        if table is None:
            self.opened.make_room()
            table = self._open_table(number)
            if not _is_indexable(table):
                let_go(table)
                raise DatasetError(
                    f"{self.name(number)} is a {type(table).__qualname__} without length or records by number, and "
                    "other pieces have them. Give counts for none, and all pieces are looked at"
                )
            if self.counts is not None:
                self._check_length(number, len(table), self.counts[number])
            self._keep(number, table)
        else:
            self.opened.used(number)
        return table

    def _open(self, number: int) -> Any:
        """What the piece's function opens."""
        try:
            with Undivided(nullcontext()):
                opened = self._pieces[number]()
        except StopIteration as error:
            raise not_an_end(f"the function that opens {self.name(number)}") from error
        except Exception as error:
            error.add_note(f"raised by the function that opens {self.name(number)}")
            raise
        _refuse_no_set(f"{self.name(number)} opens", opened)
        return opened

    def _open_table(self, number: int) -> Any:
        """The same with random generators of the piece's own: it is opened again whenever it was closed for others."""
        with OwnGenerators(derive_seed(0, "opens", number)):
            return self._open(number)

    def _keep(self, number: int, table: Any) -> None:
        self.opened.add(number, lambda: let_go(self._tables.pop(number)))
        self._tables[number] = table

    # ---- iterable ones

    def stream(self, number: int) -> tuple[Callable[[], Any], bool]:
        """(what gives the piece to iterate over, whether that is the user's own object)."""
        piece = self._pieces[number]
        return (partial(self._open, number), False) if number in self._functions else ((lambda: piece), True)

    def as_iterable(self, piece: Any) -> Any:
        """An indexable one among iterable ones is read along like them."""
        return _Rows(piece) if _is_indexable(piece) else piece

    # ---- looking at them

    def _is_function(self, number: int) -> bool:
        piece = self._pieces[number]
        _refuse_no_set(f"{self.name(number)} is", piece)
        if _is_indexable(piece):
            return False
        if hasattr(type(piece), "__iter__"):
            if isinstance(piece, Iterator):
                raise InvalidArgumentError(
                    f"{self.name(number)} is a {type(piece).__qualname__}, which can be read only once. Give the "
                    "function that makes it: lambda: open_records(path), and not open_records(path)"
                )
            return False
        if not callable(piece):
            raise InvalidArgumentError(
                f"{self.name(number)} is a {type(piece).__qualname__}: it has neither length and records by number, "
                "nor __iter__, and is no function that opens something which has"
            )
        return True

    def _lengths(self, said: Sequence[int] | None) -> list[int] | None:
        """Of all pieces, if all are indexable."""
        lengths = list(said or [0] * len(self))
        own = [number for number in range(len(self)) if number not in self._functions]
        indexable = [number for number in own if _is_indexable(self._pieces[number])]
        for number in indexable:
            lengths[number] = len(self._pieces[number])
            if said is not None:
                self._check_length(number, lengths[number], said[number])
        if len(indexable) < len(own):
            return None
        # Where counts are given the first one is opened to see what it is; the others are taken to be like it.
        for number in sorted(self._functions)[: None if said is None else 1]:
            self.opened.make_room()
            table = self._open_table(number)
            if not _is_indexable(table):
                let_go(table)
                return None
            lengths[number] = len(table)
            if said is not None:
                self._check_length(number, lengths[number], said[number])
            self._keep(number, table)
        return lengths

    def _check_length(self, number: int, length: int, said: int) -> None:
        if length != said:
            raise DatasetError(f"{self.name(number)} has {length} records, and counts says {said}")

    def _as_many(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        if not isinstance(values, Iterable) or isinstance(values, str):
            raise InvalidArgumentError(f"{name}={values!r:.200}: it is a list, with one entry for each piece")
        values = list(values)
        if len(values) != len(self):
            raise InvalidArgumentError(f"{name} has {len(values)} entries for {len(self)} pieces")
        return values

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": OpenPieces(self.opened.most), "_tables": {}, "_readers": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _all.add(self)


_all: weakref.WeakSet[Pieces] = weakref.WeakSet()


def _forked() -> None:
    """A child opens its own: what its parent opened has one position for both, and each would read on where the other
    was."""
    for pieces in list(_all):
        pieces._nothing_open(pieces.opened.most)


os.register_at_fork(after_in_child=_forked)


class _Rows:
    """The records of an indexable piece in turn; its iterator's state is a number."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __iter__(self) -> _RowIterator:
        return _RowIterator(self._table)

    def close(self) -> None:
        let_go(self._table)


class _RowIterator(Iterator[Any]):
    def __init__(self, table: Any) -> None:
        self._table, self._next = table, 0

    def __next__(self) -> Any:
        if self._next >= len(self._table):
            raise StopIteration
        self._next += 1
        with no_end(f"record {self._next - 1}"):
            return _row(self._table, self._next - 1)

    def state_dict(self) -> int:
        return self._next

    def load_state_dict(self, state: int) -> None:
        self._next = state


def _refuse_no_set(what: str, piece: Any) -> None:
    """Raises InvalidArgumentError for what can be iterated over, and is no set of records in an order."""
    kind = type(piece).__qualname__
    if isinstance(piece, str | bytes | Mapping):
        raise InvalidArgumentError(
            f"{what} a {kind}, which is no set of records. Give what was read from it, or a function that opens it"
        )
    if isinstance(piece, Set) and not isinstance(piece, KeysView | ItemsView):
        raise InvalidArgumentError(
            f"{what} a {kind}, whose order is another one in each process, so that workers would read other records. "
            "Give it sorted, as a list"
        )
    if hasattr(piece, "iloc"):
        raise InvalidArgumentError(
            f"{what} a {kind}, whose items are columns. Give pyarrow.Table.from_pandas(...) of it, or its records as a "
            "list"
        )


def _is_indexable(piece: Any) -> bool:
    if isinstance(piece, torch.utils.data.IterableDataset):
        return False
    return hasattr(type(piece), "__len__") and hasattr(type(piece), "__getitem__")


def _row(table: Any, offset: int) -> Any:
    """A record; of a table of columns (pyarrow's) a row as a dict."""
    if hasattr(table, "to_pylist") and hasattr(table, "column_names"):
        if offset >= len(table):
            raise IndexError(f"row {offset} of {len(table)}")
        return table.slice(offset, 1).to_pylist()[0]
    return table[offset]


def _count(value: int) -> int:
    number = whole("counts", value)
    if number is None:
        raise InvalidArgumentError("counts has None: give the number of each piece's records, or no counts at all")
    if number < 0:
        raise InvalidArgumentError(f"counts has {number}: each is at least 0")
    return number
