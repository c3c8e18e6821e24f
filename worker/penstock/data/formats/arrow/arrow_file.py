"""Samples of Arrow IPC files, in the file format and in the stream format: a row is a sample, a file is a shard.

A row is read by itself (arrow_columns.py), so rows in any order cost the same. Rows of a record batch that follow each
other are read together, in half the time. If rows are small and many of them are read, the bytes around them are kept
in memory (kept_spans.py). Files with compressed record batches, or with columns that are not stored row by row
(dictionaries), are read by whole record batches. Such record batches are blocks of their shard, like the row groups of
Parquet: a shuffle keeps the samples of a block near each other, and decoded blocks share one memory limit per process
(decoded_blocks.py).

A remote file may be fetched in parts (ranges/file_ranges.py): record batches that are blocks, or spans of some record
batches. The reader of a part also has the file's header: all that comes before the first record batch.

Hugging Face datasets maps its files into memory; this reader does not, because a mapped file that is truncated kills
its reader (SIGBUS).
"""

from __future__ import annotations

import bisect
import importlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from penstock.data.batch_columns import Columns, by_number, joined
from penstock.data.formats.arrow.arrow_columns import Batch, Column, column_plans
from penstock.data.formats.arrow.ipc_messages import (
    BATCH,
    DICTIONARY,
    SCHEMA,
    BatchLayout,
    Message,
    layout_of,
    messages,
    messages_between,
)
from penstock.data.formats.arrow.kept_spans import KeptSpans
from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.fields import names
from penstock.data.formats.parquet.parquet_columns import Column as DecodedColumn
from penstock.data.formats.parquet.parquet_columns import column_of
from penstock.data.formats.ranges.file_ranges import file_range, part_shard, spans_of
from penstock.data.formats.raw_files import check_size, unreadable
from penstock.data.formats.shards import ReadOptions, Shard, ShardFile, StoredFile
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import DatasetError, ShardCorruptError
from penstock.runtime.process.free_memory import free_memory

__all__ = [
    "ArrowReader",
    "check_arrow",
    "check_same_columns",
    "header_shard",
    "index_arrow",
    "open_arrow",
    "open_arrow_part",
    "read_header",
]

KEPT_LAYOUTS = 256
"""Largest number of record batches whose layouts are kept in memory."""
LARGE = 16 << 10
"""Mean size of a row in bytes from which rows are read one by one, because reading several together copies them
twice."""
TOGETHER = 4
"""Smallest number of rows that are read together; fewer are read faster one by one."""
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def _pyarrow() -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise DatasetError("Arrow files need the package pyarrow. Run pip install 'penstock[parquet]'") from error


@dataclass(frozen=True, slots=True)
class ArrowPart:
    """Part of an Arrow file that the cache stores as a file of its own."""

    header: bytes
    """Bytes of the whole file before its first record batch."""
    begin: int
    """Offset of the part's first byte, counted in the whole file."""
    first: int
    """Number of the part's first row, counted in the whole file."""


class _ArrowFile:
    """Open Arrow file, or a part of one, with the offsets of its record batches."""

    def __init__(self, path: Path, name: str, part: ArrowPart | None = None) -> None:
        arrow = _pyarrow()
        self.name = name
        self._header, self._begin = (part.header, part.begin) if part else (b"", 0)
        self.first = part.first if part else 0
        """Number of this object's first row, counted in the whole file."""
        try:
            self.file: Descriptor | None = Descriptor(path)
            self.size = os.fstat(self.file.fileno()).st_size
        except OSError as error:
            raise ShardCorruptError(
                f"{name}: {path} cannot be read: {error}. Check that the file exists and that this user may read it"
            ) from error
        self.dictionaries: list[Message] = []
        self.batches: list[tuple[int, int, int, int]] = []
        """For each record batch: (offset of its message, offset of the message's body, size of the body in bytes,
        number of dictionaries that it may need). In the stream format these are the dictionaries before its message; in
        the file format, where a dictionary may also lie behind, all of them."""
        rows = [0]
        self.compressed = False
        try:
            found = messages(self._read, self.size) if part is None else self._messages_of(part)
            self.head = next(found)
            if self.head.kind != SCHEMA:
                raise ValueError("the file must begin with a schema")
            self.schema = arrow.ipc.read_schema(arrow.py_buffer(self._bytes(self.head)))
            self.names: list[str] = list(self.schema.names)
            """Names of the file's columns."""
            self.plans = column_plans(self.schema)
            """Reader of single rows of each column; None if a column of the file cannot be read row by row."""
            for message in found:
                if message.kind == BATCH:
                    layout = layout_of(message.metadata)
                    rows.append(layout.rows)
                    self.compressed |= layout.compressed
                    self.batches.append((message.begin, message.body, message.body_size, len(self.dictionaries)))
                elif message.kind == DICTIONARY:
                    self.dictionaries.append(message)
        except DatasetError:
            raise
        except Exception as error:  # errors of pyarrow, of the system, and of damaged metadata
            if isinstance(error, OSError) and error.errno is not None:  # pyarrow's own OSError has no number
                raise unreadable(name, error) from error
            raise ShardCorruptError(f"{name} must be an Arrow IPC file: {error}. Write the file again") from error
        self.begins: list[int] = list(itertools.accumulate(rows))
        """Number of the first row of each record batch, then the number of all rows."""
        self.blocks = tuple(rows[1:])
        """Number of rows of each record batch."""

    def _messages_of(self, part: ArrowPart) -> Iterator[Message]:
        yield from messages_between(self._read, 0, len(part.header))
        yield from messages_between(self._read, part.begin, part.begin + self.size)

    def layout(self, number: int) -> BatchLayout:
        begin, body, _, _ = self.batches[number]
        data = self.read(begin, body - begin)
        return layout_of(data[8 if data[:4] == END[:4] else 4 :])

    def whole(self, first: int, end: int) -> Any:
        """Return record batches `first` to `end` - 1, which must follow each other in the file, as a pyarrow table."""
        arrow = _pyarrow()
        begin, _, _, dictionaries = self.batches[first]
        _, body, size, _ = self.batches[end - 1]
        needed, free = body + size - begin, free_memory()
        if needed > free:
            raise DatasetError(
                f"{self.name}: {self._rows_text(first, end)} must fit into memory: they take at least {needed} bytes, "
                f"but {free} are free. Write the file in smaller record batches"
            )
        # A stream of the schema, the dictionaries, and these record batches alone.
        parts = [self._bytes(message) for message in (self.head, *self.dictionaries[:dictionaries])]
        before = b"".join(parts)
        stream = np.empty(len(before) + needed + len(END), np.uint8)  # filled in place: `join` would copy the batches
        stream[: len(before)] = np.frombuffer(before, np.uint8)
        self.fill(stream[len(before) : -len(END)], begin)
        stream[-len(END) :] = np.frombuffer(END, np.uint8)
        with arrow.ipc.open_stream(arrow.py_buffer(stream)) as reader:
            table = reader.read_all()
        if table.num_rows != self.begins[end] - self.begins[first]:
            raise self.changed(first, end)
        table.validate(full=True)
        return table

    def changed(self, first: int, end: int) -> ShardCorruptError:
        """Return the error for record batches `first` to `end` - 1 that have another number of rows than before."""
        return ShardCorruptError(
            f"{self.name} must not change while it is read, but {self._rows_text(first, end)} did. Index the folder "
            "again, and open the dataset again"
        )

    def _rows_text(self, first: int, end: int) -> str:
        rows = f"samples {self.first + self.begins[first]} to {self.first + self.begins[end] - 1}"
        return f"{rows} (a record batch)" if end == first + 1 else rows

    def read(self, begin: int, size: int) -> bytes:
        """Return `size` bytes from offset `begin` of the whole file. Raises ShardCorruptError if the file has become
        shorter."""
        file = self.file
        if file is None:
            raise ValueError(f"{self.name} is closed: open the dataset again to read from it")
        try:
            data = file.read(size, begin - self._begin)
        except OSError as error:
            raise unreadable(self.name, error) from error
        if len(data) != size:
            self._truncated(begin, size, len(data))
        return data

    def fill(self, array: np.ndarray[Any, Any], begin: int) -> None:
        """Fill an array with bytes from offset `begin` of the whole file. Raises as `read` does."""
        file = self.file
        if file is None:
            raise ValueError(f"{self.name} is closed: open the dataset again to read from it")
        try:
            done = file.read_into(array, begin - self._begin)
        except OSError as error:
            raise unreadable(self.name, error) from error
        if done != array.nbytes:
            self._truncated(begin, array.nbytes, done)

    def _truncated(self, begin: int, size: int, left: int) -> NoReturn:
        raise ShardCorruptError(
            f"{self.name} is truncated: {left} of the {size} bytes from byte {begin} are left. Write the file again, "
            "and do not change it while it is read"
        )

    def _read(self, begin: int, size: int) -> bytes:
        file = self.file
        if file is None:
            raise ValueError(f"{self.name} is closed: open the dataset again to read from it")
        in_header = begin < len(self._header)
        return self._header[begin : begin + size] if in_header else file.read(size, begin - self._begin)

    def _bytes(self, message: Message) -> bytes:
        """Return the bytes of an Arrow IPC message: the schema, or a dictionary."""
        size = message.end - message.begin
        data = self._read(message.begin, size)
        if len(data) != size:
            self._truncated(message.begin, size, len(data))
        return data


NamedColumns = list[tuple[str, DecodedColumn]]
"""Columns of a record batch, or of some rows of one, as (name, column) pairs."""


class ArrowReader:
    """Reader of an Arrow IPC file, see formats.shards.ShardReader. Lists of numbers or bools without nulls are numpy
    arrays of the stored dtype; other values are converted as those of Parquet files (parquet_scalars.py)."""

    def __init__(self, shard: Shard, path: Path, part: ArrowPart | None = None) -> None:
        """
        Args:
            shard: entry of the file, or of the part, in the dataset's index.
            path: path of the file, or of the file of one part.
            part: position of the part in the whole file; None: `path` is the whole file.

        Raises ShardCorruptError if the file cannot be read, or differs from its entry in the index.
        """
        stored = shard.files[0].raw
        self.name = stored.name
        check_size(path, stored)
        self._file = _ArrowFile(path, self.name, part)
        if len(self) != shard.samples:
            raise ShardCorruptError(
                f"{self.name} must have {shard.samples} rows, as the dataset's index lists, got {len(self)}. Index "
                "the folder again"
            )
        self._plans: list[tuple[str, Column]] | None = None if self._file.compressed else self._file.plans
        """Readers of single rows of each column that samples have; None if record batches are read as a whole."""
        self._columns: list[str] = self._file.names
        """Names of the columns that samples have."""
        self._begins = np.array(self._file.begins)
        """First row of each record batch, then the number of rows."""
        self._layouts: dict[int, Batch] = {}
        self._whole: dict[int, NamedColumns] = {}
        """Columns of the decoded record batches in memory, by number of the record batch."""
        self._spans = self._new_spans()
        """Spans of record batches that may be kept in memory; None if this reader never keeps spans, see
        `_new_spans`."""
        self._owner = MEMORY.add_owner(self)
        if shard.blocks and shard.blocks != self._file.blocks:
            self.close()
            raise ShardCorruptError(
                f"{self.name}: the record batches must have the numbers of rows that the dataset's index lists. The "
                "file was changed: index the folder again with index_folder"
            )

    def __len__(self) -> int:
        return self._file.begins[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: a sample's number must be at least 0 and below {len(self)}, got {index}")
        if self._file.file is None:
            raise ValueError(f"{self.name} is closed: open the dataset again to read from it")
        number = bisect.bisect_right(self._file.begins, index) - 1
        row = index - self._file.begins[number]
        column = ""
        try:
            sample: dict[str, Any] = {}
            if self._plans is None:
                for column, values in self._batch(number):
                    sample[column] = values.at(row)
                return sample
            batch = self._layouts.get(number) or self._laid_out(number)
            for column, plan in self._plans:
                sample[column] = plan.value(batch, row)
            return sample
        except DatasetError:
            raise
        except MemoryError as error:
            raise DatasetError(
                f"{self.name}: sample {self._file.first + index} must fit into memory: {error}. Write the file in "
                "smaller record batches, or run fewer workers"
            ) from error
        except Exception as error:  # errors of pyarrow, and of damaged bytes
            if self._file.file is None:
                raise ValueError(f"{self.name} is closed: open the dataset again to read from it") from error
            where = f"sample {self._file.first + index}" + (f", column {column!r}" if column else "")
            raise ShardCorruptError(f"{self.name}: {where} cannot be read: {error}. Write the file again") from error

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples with these numbers, in this order. Consecutive rows of a record batch are read together,
        if there are TOGETHER or more and they are not large."""
        if self._plans is None:
            return [self[row] for row in rows]
        found: list[dict[str, Any]] = []
        for begin, end in _runs(np.array(rows, np.int64), self._begins, 1):
            first, after = rows[begin], rows[begin] + end - begin
            found += self._together(first, after) or [self[row] for row in range(first, after)]
        return found

    def _together(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Return samples `begin` to `end` - 1, which lie in one record batch. Return an empty list if they are few or
        large, or if one of them cannot be read: `__getitem__` then names the sample and the column in its error."""
        try:
            columns = self._run(begin, end)
            values = [column.many(range(end - begin)) for _, column in columns]
        except Exception:
            return []
        names = [name for name, _ in columns]
        return [dict(zip(names, sample, strict=True)) for sample in zip(*values, strict=True)]

    def _run(self, begin: int, end: int) -> NamedColumns:
        """Return the columns of rows `begin` to `end` - 1, which lie in one record batch; an empty list if the rows are
        few or large."""
        if end - begin < TOGETHER or begin < 0 or self._plans is None:
            return []
        number = bisect.bisect_right(self._file.begins, begin) - 1
        first, chunked = begin - self._file.begins[number], _pyarrow().chunked_array
        batch = self._layouts.get(number) or self._laid_out(number)
        if batch.body_size > LARGE * batch.layout.rows:
            return []
        columns = []
        for name, plan in self._plans:
            array = plan.array(batch, first, first + end - begin)
            array.validate(full=True)
            columns.append((name, column_of(name, chunked([array]), plan.declared)))
        return columns

    def get_columns(self, rows: Ints) -> Columns | None:
        """Return the columns of the samples with these numbers, see `formats.shards.columns_of_rows`."""
        if self._file.file is None:
            raise ValueError(f"{self.name} is closed: open the dataset again to read from it")
        parts: list[tuple[Ints, Columns]] = []
        if self._plans is None:
            for number, places in by_number(np.searchsorted(self._file.begins, rows, side="right") - 1):
                inside = rows[places] - self._file.begins[number]
                parts.append((places, {name: column.batch(inside) for name, column in self._batch(number)}))
            return joined(len(rows), parts)
        left = np.arange(len(rows))
        if not self._spans and (columns := self._one_run(rows)):
            return {name: column.batch(left) for name, column in columns}
        if self._spans:
            parts, left = self._spans.read(rows)
        alone = np.zeros(len(rows), np.bool_)
        alone[left] = True
        for begin, end in _runs(rows[left], self._begins, TOGETHER):
            places, first = left[begin:end], int(rows[left[begin]])
            columns = self._run(first, first + end - begin)
            if columns:
                parts.append((places, {name: column.batch(np.arange(end - begin)) for name, column in columns}))
                alone[places] = False
        if alone.any():
            found = [self._found(row) for row in rows[alone].tolist()]
            by_row: Columns = {name: [plan.value(batch, row) for batch, row in found] for name, plan in self._plans}
            parts.append((np.flatnonzero(alone), by_row))
        return joined(len(rows), parts)

    def _one_run(self, rows: Ints) -> NamedColumns:
        """Return the columns of these rows if they follow each other in one record batch, as they do in an epoch that
        is not shuffled. Return an empty list otherwise, or if they are few or large."""
        first, end = int(rows[0]), int(rows[0]) + len(rows)
        if end > self._file.begins[bisect.bisect_right(self._file.begins, first)]:
            return []
        return self._run(first, end) if rows.tolist() == list(range(first, end)) else []

    def _new_spans(self) -> KeptSpans | None:
        """Return new spans, none of which is in memory yet. Return None in three cases: record batches are decoded as a
        whole; other messages lie between them in the file; or only some columns are wanted. (A span is read with all
        columns.)"""
        file = self._file
        ends = [body + size for _, body, size, _ in file.batches]
        if self._plans is None or [begin for begin, _, _, _ in file.batches[1:]] != ends[:-1]:
            return None
        if sorted(self._columns) != sorted(file.names):
            return None
        sizes = [end - begin for end, (begin, _, _, _) in zip(ends, file.batches, strict=True)]
        names = list(self._columns)
        return KeptSpans(file.begins, sizes, lambda first, end: file.whole(first, end).select(names))

    def _found(self, index: int) -> tuple[Batch, int]:
        """Return the record batch that contains row `index` of the file, and the number of the row in it."""
        number = bisect.bisect_right(self._file.begins, index) - 1
        return self._layouts.get(number) or self._laid_out(number), index - self._file.begins[number]

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on. Raises DatasetError if the file lacks one of these columns."""
        names = self._file.names
        missing = [name for name in columns if name not in names]
        if missing:
            raise DatasetError(
                f"{self.name}: columns must be some of {', '.join(names)}, got {', '.join(missing)}. Correct the "
                "argument `columns`"
            )
        self._columns, self._whole = list(columns), {}
        if self._plans is not None:
            plans = dict(self._plans)
            self._plans = [(name, plans[name]) for name in columns]
        self._spans = self._new_spans()

    def close(self) -> None:
        """Close the file. Values that were read stay valid."""
        self._file.file = None
        self._whole, self._layouts = {}, {}
        if self._spans is not None:
            self._spans.clear()
        MEMORY.remove_owner(self._owner)

    def load(self, block: int) -> None:
        """Decode record batch `block`, if it is not in memory. Does nothing if the file's rows are read one by one."""
        if self._plans is None:
            self[self._file.begins[block]]

    def drop(self, block: int) -> None:
        """Drop record batch `block` from memory."""
        self._whole.pop(block, None)
        self._layouts.pop(block, None)

    def forget(self, block: int) -> None:
        """Mark record batch `block` as not needed soon, so that its memory is freed before that of others."""
        MEMORY.release(self._owner, block)

    def _laid_out(self, number: int) -> Batch:
        _, body, size, _ = self._file.batches[number]
        layout = self._file.layout(number)
        if layout.rows != self._file.begins[number + 1] - self._file.begins[number]:
            raise self._file.changed(number, number + 1)
        batch = Batch(layout, body, size, self._file.read, self._file.fill, partial(MEMORY.add, self._owner, number))
        if len(self._layouts) >= KEPT_LAYOUTS:
            for old in list(self._layouts):
                MEMORY.release(self._owner, old)
            self._layouts = {}
        self._layouts[number] = batch
        return batch

    def _batch(self, number: int) -> NamedColumns:
        kept = self._whole.get(number)
        if kept is not None:
            MEMORY.used(self._owner, (number,))
            return kept
        MEMORY.make_room(self._file.batches[number][2])
        batch = self._file.whole(number, number + 1)
        columns = [(name, column_of(name, batch[name])) for name in self._columns]
        self._whole[number] = columns
        MEMORY.add(self._owner, number, batch.nbytes)
        return columns


def _runs(rows: Ints, begins: Ints, fewest: int) -> list[tuple[int, int]]:
    """Return the runs in `rows`: at least `fewest` consecutive row numbers that lie in one record batch. A run is
    (index in `rows` of its first row, index after its last row). `begins`: number of the first row of each record
    batch."""
    if not len(rows):
        return []
    follows = rows[1:] - rows[:-1] == 1
    if np.count_nonzero(follows) < fewest - 1:
        return []
    numbers = np.searchsorted(begins, rows, side="right")
    edges = np.flatnonzero(~follows | (numbers[1:] != numbers[:-1])) + 1
    bounds = np.concatenate([[0], edges, [len(rows)]])
    long = bounds[1:] - bounds[:-1] >= fewest
    return list(zip(bounds[:-1][long].tolist(), bounds[1:][long].tolist(), strict=True))


def open_arrow(shard: Shard, paths: Sequence[Path], options: ReadOptions) -> ArrowReader:
    """Return a reader of an Arrow shard (the function `Format.open` of this format)."""
    del options  # no pickles here, and images stay as stored
    return ArrowReader(shard, paths[0])


def header_shard(shard: Shard) -> Shard:
    """Return a shard without samples: the header of a shard's file (all before the first record batch). The cache
    fetches it alone (`format_table.PartReading.table`)."""
    return Shard("arrow", 0, (file_range(shard, 0, shard.ranges[-1]),))


def read_header(shard: Shard, path: Path) -> bytes:
    """Return the header of a shard's file, read from the file at `path` (`format_table.PartReading.read`)."""
    header = path.read_bytes()
    if len(header) != shard.ranges[-1]:
        raise ValueError(f"the file's header must have {shard.ranges[-1]} bytes, got {len(header)}")
    return header


def open_arrow_part(shard: Shard, part: int, path: Path, table: bytes, options: ReadOptions) -> ArrowReader:
    """Return a reader of part number `part`, which lies in a file of its own at `path`
    (`format_table.PartReading.open`). `table`: header of the whole file."""
    del options
    place = ArrowPart(table, shard.ranges[2 * part], sum(shard.parts[:part]))
    return ArrowReader(part_shard(shard, part), path, place)


def index_arrow(path: Path, name: str) -> Shard:
    """Index an Arrow IPC file: return the shard that describes it. `name`: path of the file, relative to the dataset's
    folder. Raises DatasetError if two columns have the same name, or the file is damaged."""
    file = _ArrowFile(path, name)
    if len(set(file.names)) != len(file.names):
        raise DatasetError(
            f"{name}: the names of columns must be unique, got {', '.join(file.names)}. Write the file with other names"
        )
    blocks = file.blocks if file.compressed or file.plans is None else ()
    shard = Shard(
        "arrow",
        file.begins[-1],
        (ShardFile(StoredFile(name, file.size)),),
        settings={"column_names": file.names},
        blocks=blocks,
        decoded_bytes=sum(size for _, _, size, _ in file.batches) if blocks else 0,
    )
    return _with_parts(shard, file)


def _with_parts(shard: Shard, file: _ArrowFile) -> Shard:
    """Return the shard with its file divided into parts that can be fetched alone: its blocks, or spans of record
    batches. Return the shard unchanged if there would be a single part, or if other messages lie between or after the
    record batches: a part's reader has only the file's header and the part, so it would miss a dictionary there."""
    offsets = [begin for begin, _, _, _ in file.batches]
    ends = [body + size for _, body, size, _ in file.batches]
    if len(offsets) < 2 or offsets[1:] != ends[:-1] or any(each.begin > offsets[0] for each in file.dictionaries):
        return shard
    batches = range(len(offsets) + 1) if shard.blocks else spans_of(np.array([*offsets, ends[-1]]))
    if len(batches) <= 2:
        return shard
    pairs = [(offsets[first], ends[end - 1]) for first, end in itertools.pairwise(batches)]
    spans = (
        ()
        if shard.blocks
        else tuple(file.begins[end] - file.begins[first] for first, end in itertools.pairwise(batches))
    )
    return replace(shard, spans=spans, ranges=(*(at for pair in pairs for at in pair), offsets[0]))


def check_arrow(settings: dict[str, Any]) -> None:
    """Check the settings of an Arrow file's entry in the dataset's index. Raises InvalidField."""
    names(settings, "column_names")


def check_same_columns(shards: Sequence[Shard]) -> None:
    """Raise DatasetError unless the columns of all shards have the same names."""
    for shard in shards:
        first, own = shards[0].settings["column_names"], shard.settings["column_names"]
        if set(first) != set(own):
            raise DatasetError(
                f"all Arrow files of a dataset must have the same columns: {shards[0].name} has {', '.join(first)}, "
                f"but {shard.name} has {', '.join(own)}. Move files of other data into another folder"
            )
