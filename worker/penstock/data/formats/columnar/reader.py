"""Reader of files of blocks of rows, decoded column by column: row groups of Parquet, record batches of Arrow. A block
stays in memory until the process's limit (decoded_blocks.py). A shuffle keeps the samples of a few blocks near each
other, so each is decoded about once per epoch."""

from __future__ import annotations

import bisect
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from penstock.data.batch_columns import Columns, by_number, joined
from penstock.data.formats.columnar.columns import (
    Column,
    ConstantColumn,
    column_of,
    constant_column,
    fill_value,
    filled,
)
from penstock.data.formats.columnar.values import storage_of
from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.formats.fields import unknown_columns
from penstock.data.formats.raw_files import unreadable
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError

FEW_ROWS = 6
"""Fewest rows of a block that are read column by column, which costs more in itself and less for each row."""
_NO_CODEC = re.compile(r"not supported by the C\+\+ implementation|codec .* not built")
"""What pyarrow's errors say of a codec that it lacks. (To ask the footer for its codec may end the process.)"""
LOADING_WAIT_S = 5.0
"""Seconds between checks whether another thread still decodes the block that both need."""


class Block(NamedTuple):
    columns: list[tuple[str, Column]]
    nbytes: int
    fetch: Callable[[int, int], None] | None = None
    """(begin, end), to be called before these rows are read; None if all are in memory."""


class BlocksReader(ABC):
    """Base class of readers, see formats.shards. Values are Python's; lists of numbers are numpy arrays (columns.py),
    and times with nanoseconds numpy's (values.py). Thread-safe."""

    block_kind: str
    """What the format calls a block, for errors."""

    def __init__(
        self,
        name: str,
        blocks: Sequence[int],
        names: list[str],
        first_block: int,
        first_row: int,
        types: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`first_block`, `first_row`: numbers in the whole file, for errors, if the reader reads a part of it. `types`:
        those to which columns are cast (common_types.py)."""
        self.name, self._types = name, types
        self._begins = [0, *accumulate(blocks)]
        self._first_block, self._first_row = first_block, first_row
        self._names, self._wanted = names, names
        """Columns of the file, and those of them to read."""
        self._shown = names
        """Columns of samples: those to read, and constants."""
        self._constants: dict[str, ConstantColumn] = {}
        self._fill: Mapping[str, Any] = MappingProxyType({})
        """Values in place of nulls, by column."""
        self._lock = threading.Lock()
        """Lock of `_is_open`, `_loading`, and additions to `_kept`. No thread holds it while it decodes."""
        self._is_open = True
        self._loading: dict[int, threading.Event] = {}
        """Blocks that a thread decodes now, with the event that others wait for."""
        self._kept: dict[int, Block] = {}
        """Blocks in memory. The process's MEMORY counts their bytes and drops them."""
        self._owner = MEMORY.add_owner(self)
        self._marks_use = True
        """True if MEMORY is told of each use, so that it drops the block that was not used for longest."""

    @abstractmethod
    def _decode(self, number: int) -> Block:
        """Return a block with the columns `_wanted`. May raise any error."""

    def _column(self, name: str, chunks: Any) -> Column:
        """Return a column of a block, of the type that all files of the dataset have for it."""
        kind = self._types.get(name)
        try:
            chunks = chunks if kind is None else chunks.cast(kind)
        except ValueError as error:  # pyarrow's errors
            raise DatasetError(
                f"{self.name}: column {name!r} must be readable as {kind}, the type that fits all files: {error}. "
                "Write the file again with this type"
            ) from error
        if name not in self._fill:
            return column_of(name, chunks)
        whole = filled(name, chunks, self._fill[name])
        return column_of(name, whole, chunks.type if whole.type == storage_of(chunks.type) else None)

    @abstractmethod
    def _kind(self, name: str) -> Any:
        """Return a column's type in the file; None if it is known only once a block is decoded."""

    def __len__(self) -> int:
        return self._begins[-1]

    def add_constants(self, values: Mapping[str, int | str | None]) -> None:
        """Give all samples these values, in place of columns of the file of the same names."""
        self._constants = {name: constant_column(name, value) for name, value in values.items()}
        self.select([*(name for name in self._names if name not in values), *values])

    def fill_nulls(self, values: Mapping[str, Any]) -> None:
        """Give samples these values in place of nulls. Raises InvalidArgumentError for one that is not of its column's
        type."""
        self._fill = values
        for name, value in values.items():
            constant = self._constants.get(name)
            kind = (
                constant.kind if constant else self._types.get(name, self._kind(name) if name in self._names else None)
            )
            if kind is None:
                continue
            found = fill_value(name, value, kind)
            if constant and constant.at(0) is None:
                self._constants[name] = constant_column(name, found.as_py(), found.type)

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on. Raises DatasetError if there is no such one."""
        if error := unknown_columns(self.name, columns, [*self._names, *self._constants]):
            raise DatasetError(error)
        self._shown, self._kept = list(columns), {}
        self._wanted = [name for name in columns if name not in self._constants]

    def _check_file(self) -> None:
        """Raise an error if the file is closed, or has changed so that it must not be read."""
        if not self._is_open:
            raise self._closed()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._check_file()
        number = self._number_of(index)
        sample = self._sample(number, index)
        self._used((number,))
        return sample

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Those of one block are read column by column if they are at least FEW_ROWS, or all of the samples."""
        if not rows:
            return []
        self._check_file()
        first, last = self._number_of(min(rows)), self._number_of(max(rows))
        if first == last:
            self._used((first,))
            return self._of_block(first, rows)
        places: dict[int, list[int]] = {}
        for place, index in enumerate(rows):
            places.setdefault(bisect.bisect_right(self._begins, index) - 1, []).append(place)
        samples: list[dict[str, Any]] = [{}] * len(rows)
        for number, inside in places.items():
            if len(inside) < FEW_ROWS:
                for place in inside:
                    samples[place] = self._sample(number, rows[place])
                continue
            for place, sample in zip(inside, self._of_block(number, [rows[place] for place in inside]), strict=True):
                samples[place] = sample
        self._used(places)
        return samples

    def get_columns(self, rows: Ints) -> Columns | None:
        self._check_file()
        low, high = self._number_of(int(rows.min())), self._number_of(int(rows.max()))
        if low == high:
            self._used((low,))
            return self._batch_of(low, rows)
        numbers = np.searchsorted(self._begins, rows, side="right") - 1
        listed = numbers.tolist()
        kept = {number: self._kept.get(number) for number in set(listed)}
        self._used(kept)
        loaded = {number: block for number, block in kept.items() if block is not None}
        if len(loaded) < len(kept) or len(rows) >= FEW_ROWS * len(kept):
            # one block after the other, because all of them may not fit into memory
            parts = ((places, self._batch_of(number, rows[places])) for number, places in by_number(numbers))
            return joined(len(rows), list(parts))
        inside = (rows - np.array(self._begins)[numbers]).tolist()
        for number, row in zip(listed, inside, strict=True):
            if (fetch := loaded[number].fetch) is not None:
                fetch(row, row + 1)
        return {
            name: [loaded[number].columns[place][1].at(row) for number, row in zip(listed, inside, strict=True)]
            for place, name in enumerate(self._shown)
        }

    def load(self, block: int) -> None:
        self._block(block, self._begins[block])

    def drop(self, block: int) -> None:
        self._kept.pop(block, None)

    def forget(self, block: int) -> None:
        """Mark a block as not needed soon, so that its memory is freed before that of others."""
        MEMORY.release(self._owner, block)

    def close(self) -> None:
        """Reads in progress end normally, and the file is closed after the last of them."""
        with self._lock:
            self._is_open = False
            self._kept = {}
        MEMORY.remove_owner(self._owner)

    def _used(self, numbers: Iterable[int]) -> None:
        if self._marks_use:
            MEMORY.used(self._owner, numbers)

    def _number_of(self, index: int) -> int:
        assert 0 <= index < len(self), f"{self.name} has {len(self)} samples"
        return bisect.bisect_right(self._begins, index) - 1

    def _sample(self, number: int, index: int) -> dict[str, Any]:
        block = self._block(number, index)
        row = index - self._begins[number]
        name = ""
        try:
            if block.fetch is not None:
                block.fetch(row, row + 1)
            sample = {}
            for name, column in block.columns:
                sample[name] = column.at(row)
            return sample
        except (ValueError, OverflowError) as error:
            self._refuse(index, name, error)

    def _of_block(self, number: int, rows: Sequence[int]) -> list[dict[str, Any]]:
        begin = self._begins[number]
        block = self._block(number, rows[0])
        first, end = rows[0] - begin, rows[0] - begin + len(rows)
        inside: Sequence[int] = [row - begin for row in rows]
        if inside == list(range(first, end)):
            inside = range(first, end)
        try:
            self._fetch(block, inside)
            values = [column.many(inside) for _, column in block.columns]
        except (ValueError, OverflowError):
            return [self[row] for row in rows]  # the error then names the sample
        names = [name for name, _ in block.columns]
        return [dict(zip(names, sample, strict=True)) for sample in zip(*values, strict=True)]

    def _batch_of(self, number: int, rows: Ints) -> Columns:
        inside = rows - self._begins[number]
        block = self._block(number, int(rows[0]))
        if block.fetch is not None:
            self._fetch(block, inside.tolist())
        return {name: column.batch(inside) for name, column in block.columns}

    def _fetch(self, block: Block, rows: Sequence[int]) -> None:
        if block.fetch is None:
            return
        if isinstance(rows, range):
            block.fetch(rows.start, rows.stop)
            return
        for row in rows:
            block.fetch(row, row + 1)

    def _block(self, number: int, index: int) -> Block:
        """`index`: number of the sample that needs it, for errors."""
        kept = self._kept.get(number)
        if kept is not None:
            return kept
        while True:
            with self._lock:
                if not self._is_open:
                    raise self._closed()
                kept = self._kept.get(number)
                if kept is not None:
                    return kept
                loading = self._loading.get(number)
                if loading is None:
                    self._loading[number] = threading.Event()
                    break
            loading.wait(LOADING_WAIT_S)  # the other thread may have failed, so the loop looks again
        try:
            return self._decoded(number, index)
        finally:
            with self._lock:
                self._loading.pop(number).set()

    def _decoded(self, number: int, index: int) -> Block:
        where = f"{self.name}: sample {self._first_row + index}, {self.block_kind} {self._first_block + number}"
        try:
            block = self._decode(number)
            if self._constants:
                columns = dict(block.columns) | self._constants
                block = block._replace(columns=[(name, columns[name]) for name in self._shown])
        except (DatasetError, InvalidArgumentError):
            raise
        except MemoryError as error:
            raise DatasetError(
                f"{where} must fit into memory: {error}. Write smaller {self.block_kind}s, or run fewer workers"
            ) from error
        except NotImplementedError as error:
            raise DatasetError(
                f"{where} cannot be read by pyarrow: {error}. Upgrade pyarrow, or write the column in another type"
            ) from error
        except Exception as error:  # errors of pyarrow, of the system, and of damaged bytes
            if not self._is_open:
                raise self._closed() from error
            if isinstance(error, OSError) and error.errno is not None:  # pyarrow's own OSError has no number
                raise unreadable(where, error) from error
            if _NO_CODEC.search(str(error)):
                raise DatasetError(
                    f"{where} is compressed in a way that this pyarrow ({version('pyarrow')}) lacks: {error} Write the "
                    "file with zstd, or install a pyarrow that has it"
                ) from error
            raise ShardCorruptError(f"{where} cannot be read: {error}. Write the file again") from error
        with self._lock:
            if not self._is_open:
                return block
            self._kept[number] = block
        MEMORY.add(self._owner, number, block.nbytes)
        return block

    def _closed(self) -> ValueError:
        return ValueError(f"{self.name} is closed: open the dataset again to read from it")

    def _refuse(self, index: int, column: str, error: Exception) -> NoReturn:
        where = f"{self.name}: sample {self._first_row + index}, column {column!r}"
        if isinstance(error, UnicodeDecodeError):
            raise ShardCorruptError(f"{where} cannot be read: {error}. Write the file again") from error
        raise DatasetError(
            f"{where}: Python cannot hold its value ({error}). Write the column in another type, such as int64"
        ) from error
