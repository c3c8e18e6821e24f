"""Samples of Parquet files: a row is a sample, a file is a shard, a row group is a block of it. Texts are decoded as
they are, up to 2.5 times as fast as pyarrow's dictionaries, and the only way for DELTA encodings. But a text of a
dictionary page may stand for a million rows, so bytes are counted batch by batch, and a column above the limit is read
as a dictionary (`_table`)."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.data.formats.columnar.columns import ChosenRows, Column
from penstock.data.formats.columnar.common_types import check_types, common_types_of
from penstock.data.formats.columnar.reader import Block, BlocksReader
from penstock.data.formats.contents import CHANGED, check_content, of_footer
from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.fields import names
from penstock.data.formats.file_ranges import part_shard
from penstock.data.formats.parquet.footer import (
    DELTA_LENGTH,
    DELTA_PREFIX,
    PAGE_HEADER_BYTES,
    TEXT,
    dictionary_bytes,
    tail_of,
)
from penstock.data.formats.parquet.shards import Footer, footer_of, pyarrow_parquet
from penstock.data.formats.parquet.table_files import TABLE_FILE, TableView
from penstock.data.formats.raw_files import check_samples, open_file
from penstock.data.formats.shards import ReadOptions, Shard
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import DatasetError, ShardCorruptError
from penstock.runtime.process.free_memory import free_memory

EXPANDED_BYTES = 64 << 20
"""Most bytes of a column's texts in a row group for which each row gets its own, if the file has less than half of it.
A larger column stays a dictionary."""
BATCH_BYTES = 256 << 20
"""Most bytes of texts that are decoded before they are counted, if four times as much is free."""
LARGE_ROW_BYTES = 4096
"""Mean size of rows above which a look-up among the batches costs less than to copy them together."""
PAST_END = 128
"""Bytes after a column's end that pyarrow may ask for, because old writers understated its size."""


def check_parquet(settings: dict[str, Any]) -> None:
    """Column names are optional, because a file describes its own columns. Raises InvalidField."""
    if "column_names" in settings:
        names(settings, "column_names")
    check_types(settings)


def read_footer(shard: Shard, path: Path) -> Footer:
    return footer_of(shard, path.read_bytes())


def open_row_group(shard: Shard, part: int, path: Path, table: Footer, options: ReadOptions) -> ParquetReader:
    """`table`: footer of the whole file (`format_table.PartReading.open`)."""
    del options
    return ParquetReader(part_shard(shard, part), path, RowGroupPart(table, part, shard.ranges[2 * part], shard.size))


@dataclass(frozen=True, slots=True)
class RowGroupPart:
    footer: Footer
    group: int
    begin: int
    """Offset of the row group's first byte in the whole file."""
    size: int
    """Size of the whole file, in bytes."""


@dataclass(frozen=True, slots=True)
class _Text:
    """Leaf column of texts in a row group, which may take more memory than its bytes in the file."""

    path: str
    is_nested: bool
    values: int
    largest: int
    """Upper bound of a text's size in bytes."""
    stored: int
    """Size of the column in bytes in the file, decompressed."""
    is_delta: bool
    """True if pyarrow cannot read the column as a dictionary."""

    @property
    def limit(self) -> int:
        return max(EXPANDED_BYTES, 2 * self.stored)


def _whole_footer(shard: Shard, opened: Descriptor, path: Path) -> Footer:
    tail = tail_of(opened)
    check_content(shard, of_footer(tail), path)
    return Footer.parse(tail)


class ParquetReader(BlocksReader):
    block_kind = "row group"

    def __init__(self, shard: Shard, path: Path, part: RowGroupPart | None = None) -> None:
        """Raises ShardCorruptError if the file cannot be read, or differs from its entry in the index."""
        stored = shard.files[0].raw
        self.name = stored.name
        self._part = part
        self._idle: list[Any] = []
        """pyarrow's file objects that no thread uses now. Each thread takes one: they are not thread-safe."""
        self._repeated: set[str] = set()
        """Columns that are read as dictionaries, because a row group of theirs exceeded its limit."""
        self._sources: Sequence[str] | None = None
        """Columns of the file to read; None: all."""
        self._leaves: list[int] | None = None
        """Leaf columns to read; None: all. Parquet stores a nested column as several."""
        try:
            opened, _ = open_file(path, self.name, stored.size)  # a plain file: pyarrow must not wait for a pipe
            self._opened: Descriptor | None = opened
            self._version = os.fstat(opened.fileno()).st_mtime_ns
            footer = _whole_footer(shard, opened, path) if part is None else part.footer
            self._metadata, self._schema = footer.metadata, footer.schema
            self._idle.append(self._new_file(opened))
        except DatasetError:
            raise
        except Exception as error:  # errors of the system, of pyarrow, and of a damaged footer
            raise ShardCorruptError(
                f"{self.name}: {path} cannot be read: {error}. Fetch or write the file again"
            ) from error
        first = 0 if part is None else part.group
        self._groups = footer.groups if part is None else footer.groups[first : first + 1]
        self._view = TableView(shard, footer.groups) if shard.format == TABLE_FILE else None
        rows = tuple(group.rows for group in footer.groups)
        counts = rows if self._view is None else self._view.counts
        blocks = counts if part is None else counts[first : first + 1]
        check_samples(self.name, "rows", sum(blocks), shard.samples)
        if part is None:
            check_samples(self.name, "rows", footer.metadata.num_rows, sum(rows))
        if shard.blocks and shard.blocks != blocks:
            raise ShardCorruptError(f"{self.name} must have the row groups that the index lists. {CHANGED}")
        listed = list(self._schema.names) if self._view is None else self._view.names
        super().__init__(stored.name, blocks, listed, first, sum(counts[:first]), common_types_of(shard.settings))
        if self._view is not None:
            self._constants = self._view.constants
            self.select(listed)

    def select(self, columns: Sequence[str]) -> None:
        super().select(columns)
        self._sources = self._wanted if self._view is None else self._view.sources(self._wanted)
        paths = [self._metadata.schema.column(leaf).path for leaf in range(len(self._metadata.schema))]
        self._leaves = [
            leaf for leaf, path in enumerate(paths) if any(f"{path}.".startswith(f"{name}.") for name in self._sources)
        ]

    def _kind(self, name: str) -> Any:
        return self._schema.field(name).type if self._view is None else None

    def close(self) -> None:
        super().close()
        with self._lock:
            self._opened, self._idle = None, []

    def _new_file(self, opened: Descriptor, dictionaries: Sequence[str] = ()) -> Any:
        return pyarrow_parquet().ParquetFile(
            f"/proc/self/fd/{opened.fileno()}" if self._part is None else _opened_range(opened, self._part),
            metadata=self._metadata,
            read_dictionary=list(dictionaries),
            page_checksum_verification=True,
            pre_buffer=False,  # otherwise pyarrow keeps the compressed bytes of the row group that it read last
        )

    def _decode(self, number: int) -> Block:
        with self._lock:
            opened = self._opened
            file = self._idle.pop() if self._idle else None
        if opened is None:
            raise self._closed()
        needed = self._needed(number)
        MEMORY.make_room(needed)
        free = free_memory()
        if needed > free:
            raise DatasetError(
                f"{self.name}: row group {self._first_block + number} must fit into memory: {needed} of {free} bytes"
            )
        file = self._new_file(opened) if file is None else file
        table = self._table(opened, file, number)
        rows = self._groups[number].rows
        if table.num_rows != rows:
            raise ValueError(f"the row group must have {rows} rows, as the file's footer says, got {table.num_rows}")
        self._check_unchanged(opened)
        if self._view is None:
            arrays = dict(zip(table.column_names, map(_expanded, table.columns), strict=True))
        else:
            arrays = {name: _expanded(array) for name, array in self._view.arrays(table, self._wanted).items()}
        live = None if self._view is None else self._view.live(self._first_block + number)
        columns = [(name, self._live_column(name, arrays[name], live)) for name in self._wanted]
        with self._lock:
            if self._is_open:
                self._idle.append(file)
        return Block(columns, sum(arrays[name].nbytes for name in self._wanted))

    def _live_column(self, name: str, array: Any, live: Ints | None) -> Column:
        """Return a column of the rows `live`; None: of all."""
        if live is None:
            return self._column(name, array)
        if importlib.import_module("pyarrow").types.is_nested(array.type):
            return ChosenRows(self._column(name, array), live)
        return self._column(name, array.take(live))

    def _needed(self, number: int) -> int:
        """Return the memory that the columns to read take, estimated from the footer (RowGroup.nbytes)."""
        group = self._groups[number]
        return group.nbytes if self._leaves is None else sum(group.columns[leaf].nbytes for leaf in self._leaves)

    def _check_unchanged(self, opened: Descriptor) -> None:
        """Raise ShardCorruptError if the file was written to since: its row groups may mix old and new data."""
        if os.fstat(opened.fileno()).st_mtime_ns != self._version:
            raise ShardCorruptError(f"{self.name} must not change while it is read. Write new data to a new file")

    def _table(self, opened: Descriptor, file: Any, number: int) -> Any:
        """Return a row group. Columns whose texts would exceed their limit are read as dictionaries."""
        texts = list(self._texts(opened, number))
        for text in texts:
            if text.is_nested and not text.is_delta and text.values * text.largest > EXPANDED_BYTES:
                self._repeated.add(text.path)
        while True:
            dictionaries = [text.path for text in texts if text.path in self._repeated]
            plain = [text for text in texts if text.path not in self._repeated]
            source = self._new_file(opened, dictionaries) if dictionaries else file
            exceeding = set[str]()
            table = self._read(source, number, plain, exceeding)
            if not exceeding:
                return table
            self._repeated |= exceeding

    def _read(self, file: Any, number: int, texts: list[_Text], exceeding: set[str]) -> Any:
        """Return a row group. If a column's texts exceed their limit, stop and add its path to `exceeding`."""
        rows = self._groups[number].rows
        limit = min(BATCH_BYTES, free_memory() // 4)
        at_once = min((limit // max(1, text.largest) for text in texts), default=rows)
        if rows <= at_once:
            return self._read_group(file, number)
        sizes = dict.fromkeys((text.path for text in texts), 0)
        batches = []
        for batch in self._batches(file, number, max(1, at_once)):
            batches.append(batch)
            for text in texts:
                sizes[text.path] += batch.column(text.path.split(".")[0]).nbytes
                if sizes[text.path] <= text.limit:
                    continue
                if not text.is_delta:
                    exceeding.add(text.path)
                elif sizes[text.path] > free_memory():
                    raise MemoryError(f"column {text.path!r} has more than {sizes[text.path]} bytes")
            if exceeding:
                return None
        table = importlib.import_module("pyarrow").Table.from_batches(batches)
        return table if table.nbytes > LARGE_ROW_BYTES * rows else table.combine_chunks()

    def _read_group(self, file: Any, number: int) -> Any:
        """pyarrow puts at most 2 GiB of text into an array of a list column: a larger row group is read in parts."""
        try:
            return file.read_row_group(self._first_block + number, **self._how())
        except NotImplementedError:
            part = self._groups[number].rows // 2
            while part:
                try:
                    batches = list(self._batches(file, number, part))
                    return importlib.import_module("pyarrow").Table.from_batches(batches)
                except NotImplementedError:
                    part //= 4
            raise

    def _batches(self, file: Any, number: int, rows: int) -> Iterator[Any]:
        batches: Iterator[Any] = file.iter_batches(rows, row_groups=[self._first_block + number], **self._how())
        return batches

    def _how(self) -> dict[str, Any]:
        return {
            "columns": self._sources,
            "use_threads": len(self._wanted) > 1,
        }  # pyarrow's threads decode one column each

    def _texts(self, opened: Descriptor, number: int) -> Iterator[_Text]:
        """Yield the columns to read whose texts may take more memory than their bytes."""
        columns = self._groups[number].columns
        begin = 0 if self._part is None else self._part.begin
        for leaf in range(len(columns)) if self._leaves is None else self._leaves:
            column, path = columns[leaf], self._metadata.schema.column(leaf).path
            name, _, within = path.partition(".")
            # an array of a dictionary type has each text once
            if column.kind != TEXT or hasattr(self._schema.field(name).type, "dictionary"):
                continue
            largest = column.stored if DELTA_PREFIX in column.encodings else 0
            if column.dictionary:
                page = opened.read(PAGE_HEADER_BYTES, column.dictionary - begin)
                largest = max(largest, dictionary_bytes(page, column.stored))
            if largest:
                is_delta = not {DELTA_LENGTH, DELTA_PREFIX}.isdisjoint(column.encodings)
                yield _Text(path, bool(within), column.values, largest, column.stored, is_delta)


def _expanded(column: Any) -> Any:
    """Return a dictionary column with a text per row, read in half the time, unless above EXPANDED_BYTES."""
    arrow = importlib.import_module("pyarrow")
    column = _without_views(column)
    if not arrow.types.is_dictionary(column.type) or column.type.value_type not in (arrow.string(), arrow.binary()):
        return column
    compute = importlib.import_module("pyarrow.compute")
    size = 0
    for chunk in column.chunks:
        size += compute.sum(compute.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0
    return column.cast(column.type.value_type) if size <= EXPANDED_BYTES else column


def _without_views(array: Any) -> Any:
    """Return a column of plain texts for one of views, which deltalake's compaction writes: those would be read value
    by value."""
    arrow = importlib.import_module("pyarrow")
    kind = array.type
    is_dictionary = arrow.types.is_dictionary(kind)
    plain = {"string_view": arrow.string(), "binary_view": arrow.binary()}.get(
        str(kind.value_type if is_dictionary else kind)
    )
    if plain is None:
        return array
    if not is_dictionary:
        return array.cast(plain)
    return arrow.chunked_array(
        [arrow.DictionaryArray.from_arrays(each.indices, each.dictionary.cast(plain)) for each in array.chunks],
        arrow.dictionary(kind.index_type, plain),
    )


def _opened_range(opened: Descriptor, part: RowGroupPart) -> Any:
    """Return a file object in which a row group's bytes have their offsets in the whole file."""
    return importlib.import_module("pyarrow").PythonFile(_RangeFile(opened, part), mode="r")


class _RangeFile(io.RawIOBase):
    def __init__(self, opened: Descriptor, part: RowGroupPart) -> None:
        self._opened, self._begin, self._size = opened, part.begin, part.size
        self._end = part.begin + os.fstat(opened.fileno()).st_size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Up to PAST_END bytes after the row group are zeros. Raises OSError for others outside of it."""
        end = min(self._size, self._at + size) if size >= 0 else self._size
        if self._at < self._begin or end > self._end + PAST_END:
            raise OSError(f"bytes {self._at} to {end} must lie in the row group, {self._begin} to {self._end}")
        data = self._opened.read(min(end, self._end) - self._at, self._at - self._begin)
        self._at += len(data)
        past = end - self._at if self._at == self._end else 0
        self._at += past
        return data + bytes(past)
