"""Samples of Parquet files: a row is a sample, a file is a shard, a row group is a block of it.

A row group is decoded as a whole, and stays in memory until the process's memory limit for decoded blocks is reached
(decoded_blocks.py). A shuffle keeps the samples of a few row groups near each other, so each row group is decoded about
once per epoch.

A column of a row group may consist of several pyarrow arrays, because an array of text has at most 2 GiB.
"""

from __future__ import annotations

import bisect
import importlib
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from penstock.data.batch_columns import Columns as BatchColumns
from penstock.data.batch_columns import by_number, joined
from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.fields import names
from penstock.data.formats.parquet.parquet_columns import Column, column_of
from penstock.data.formats.parquet.parquet_footer import tail_of
from penstock.data.formats.parquet.parquet_ranges import Footer, RowGroupPart, footer_of, opened_range
from penstock.data.formats.parquet.parquet_shards import pyarrow_parquet
from penstock.data.formats.ranges.file_ranges import part_shard
from penstock.data.formats.shards import ReadOptions, Shard
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import DatasetError, ShardCorruptError
from penstock.runtime.process.free_memory import free_memory

__all__ = ["ParquetReader", "check_parquet", "open_parquet", "open_row_group", "read_footer"]

EXPANDED_BYTES = 64 << 20
"""Largest size in bytes of the texts of a column in one row group for which each row gets a text of its own. A larger
column stays a dictionary: each different text once, and for each row the text's number."""

FEW_ROWS = 6
"""Smallest number of rows of one row group for which rows are read column by column. Reading by columns has a higher
fixed cost, and a lower cost for each row."""
LOADING_WAIT_S = 5.0
"""Seconds between two checks of a thread whether another thread still decodes the row group that both need."""

Columns = list[tuple[str, Column]]
"""Columns of a decoded row group, as (name, column) pairs."""


def check_parquet(settings: dict[str, Any]) -> None:
    """Check the settings of a Parquet file's entry in the dataset's index. Column names are optional there, because a
    file describes its own columns. Raises InvalidField."""
    if "column_names" in settings:
        names(settings, "column_names")


def open_parquet(shard: Shard, paths: Sequence[Path], options: ReadOptions) -> ParquetReader:
    """Return a reader of a Parquet shard (the function `Format.open` of this format)."""
    del options  # Parquet has no pickles, and columns are chosen by `select`
    return ParquetReader(shard, paths[0])


def read_footer(shard: Shard, path: Path) -> Footer:
    """Return the footer of a shard's file, read from the file at `path` (`format_table.PartReading.read`)."""
    return footer_of(shard, path.read_bytes())


def open_row_group(shard: Shard, part: int, path: Path, table: Footer, options: ReadOptions) -> ParquetReader:
    """Return a reader of row group number `part`, which lies in a file of its own at `path`
    (`format_table.PartReading.open`). `table`: footer of the whole file."""
    del options
    return ParquetReader(part_shard(shard, part), path, RowGroupPart(table, part, shard.ranges[2 * part], shard.size))


def _text_columns(footer: Any) -> list[str]:
    """Return the paths of all columns of text and bytes in a footer. They are read as pyarrow dictionaries where the
    file stores them so: a text that a million rows share is then in memory once."""
    leaves = (footer.schema.column(number) for number in range(footer.num_columns))
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]


def _expand_texts(column: Any) -> Any:
    """Convert a dictionary column to one text per row, which takes half the time to read. Returns the column unchanged
    if the result would be larger than EXPANDED_BYTES."""
    arrow = importlib.import_module("pyarrow")
    if not arrow.types.is_dictionary(column.type) or column.type.value_type not in (arrow.string(), arrow.binary()):
        return column
    if column.null_count == 0 and all(_has_no_repeats(chunk) for chunk in column.chunks):
        return arrow.chunked_array([chunk.dictionary for chunk in column.chunks], column.type.value_type)
    compute = importlib.import_module("pyarrow.compute")
    size = 0
    for chunk in column.chunks:
        size += compute.sum(compute.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0
    return column.cast(column.type.value_type) if size <= EXPANDED_BYTES else column


def _has_no_repeats(chunk: Any) -> bool:
    """Return True if each text of a dictionary array occurs in one row only, in the order of the rows. The dictionary
    then equals the array."""
    indices = chunk.indices.to_numpy()
    return len(chunk.dictionary) == len(indices) and np.array_equal(indices, np.arange(len(indices)))


class ParquetReader:
    """Reader of a Parquet file, see ShardReader, ColumnReader and BlockReader in formats.shards. Values are Python's:
    None, lists, dictionaries, datetimes. Lists of numbers are numpy arrays (see parquet_columns.py), and times with
    nanoseconds are numpy's (see parquet_scalars.py)."""

    def __init__(self, shard: Shard, path: Path, part: RowGroupPart | None = None) -> None:
        """
        Args:
            shard: entry of the file, or of the row group, in the dataset's index.
            path: path of the file, or of the file of one row group.
            part: position of the row group in the whole file; None: `path` is the whole file.

        Raises ShardCorruptError if the file cannot be read, or differs from its entry in the index.
        """
        stored = shard.files[0].raw
        self.name = stored.name
        self._lock = threading.Lock()
        """Lock of the attributes `_opened`, `_loading` and `_idle`, and of additions to `_kept`. No thread holds it
        while it decodes."""
        self._loading: dict[int, threading.Event] = {}
        """Row groups that a thread is decoding now, by number, with the event that other threads wait for."""
        self._idle: list[Any] = []
        """pyarrow's file objects that no thread uses now. The objects are not thread-safe, so each thread that decodes
        takes one."""
        self._kept: dict[int, Columns] = {}
        """Decoded row groups in memory, by number. The process's MEMORY (decoded_blocks.py) counts their bytes and
        drops them."""
        self._wanted: list[str] | None = None
        """Names of the columns to read; None: all columns."""
        self._leaves: list[int] | None = None
        """Numbers, in the file's schema, of the leaf columns to read; None: all. Parquet stores a nested column as
        several leaf columns, any other column as one."""
        try:
            self._opened: Descriptor | None = Descriptor(path)  # a plain file: pyarrow must not wait for a pipe
            found = os.fstat(self._opened.fileno())
            if found.st_size != stored.size:
                raise ShardCorruptError(
                    f"{self.name}: {path} must have {stored.size} bytes, as the dataset's index lists, got "
                    f"{found.st_size}. Fetch the file again, or index the folder again"
                )
            self._version = found.st_mtime_ns
            footer = Footer.parse(tail_of(self._opened)) if part is None else part.footer
            self._part, self._first = part, 0 if part is None else part.group
            self._groups = footer.groups if part is None else footer.groups[part.group : part.group + 1]
            self._rows_before = sum(group.rows for group in footer.groups[: self._first])
            """Number of the first sample of this reader, counted in the whole file."""
            self._footer, self._schema = footer.metadata, footer.schema
            self._texts = _text_columns(footer.metadata)
            self._idle.append(self._new_file(self._opened))
        except DatasetError:
            raise
        except Exception as error:  # errors of the system, of pyarrow, and of a damaged footer
            if isinstance(error, OSError) and error.errno is not None:  # pyarrow's own OSError has no number
                remedy = "Check that the file exists and that this user may read it"
            else:
                remedy = "Fetch or write the file again"
            raise ShardCorruptError(f"{self.name}: {path} cannot be read: {error}. {remedy}") from error
        self._several = len(self._schema) > 1
        """True if several columns are read: pyarrow then decodes in threads of its own."""
        self._owner = MEMORY.add_owner(self)
        self._begins: list[int] = [0, *itertools.accumulate(group.rows for group in self._groups)]
        rows = self._footer.num_rows if part is None else self._begins[-1]
        if not rows == self._begins[-1] == shard.samples:
            self.close()
            raise ShardCorruptError(
                f"{self.name} must have {shard.samples} rows, as the dataset's index lists, got {rows}. Index the "
                "folder again with index_folder"
            )
        if shard.blocks and shard.blocks != tuple(group.rows for group in self._groups):
            self.close()
            raise ShardCorruptError(
                f"{self.name}: the row groups must have the numbers of rows that the dataset's index lists. The file "
                "was changed: index the folder again with index_folder"
            )

    def __len__(self) -> int:
        return self._begins[-1]

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on. Raises DatasetError if the file lacks one of these columns."""
        known = self._schema.names
        missing = [name for name in columns if name not in known]
        if missing:
            raise DatasetError(
                f"columns must name columns of {self.name}, which has {', '.join(known)}, got {', '.join(missing)}. "
                "Correct the argument `columns`"
            )
        paths = [self._footer.schema.column(leaf).path for leaf in range(len(self._footer.schema))]
        self._leaves = [
            leaf for leaf, path in enumerate(paths) if any(f"{path}.".startswith(f"{name}.") for name in columns)
        ]
        self._wanted, self._several = list(columns), len(columns) > 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = self._group_of(index)
        sample = self._sample(group, index)
        MEMORY.used(self._owner, (group,))
        return sample

    def _sample(self, group: int, index: int) -> dict[str, Any]:
        """Return sample number `index`, which lies in row group `group`."""
        columns = self._columns(group, index)
        row = index - self._begins[group]
        name = ""
        try:
            sample = {}
            for name, column in columns:
                sample[name] = column.at(row)
            return sample
        except (ValueError, OverflowError) as error:
            self._refuse(index, name, error)

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples at these indexes, in this order. Those of one row group are read column by column if they
        are at least FEW_ROWS, or all of the samples."""
        if not rows:
            return []
        if min(rows) < 0 or max(rows) >= len(self):
            self._group_of(min(rows)), self._group_of(max(rows))  # raise IndexError for wrong numbers
        begins = self._begins
        first = bisect.bisect_right(begins, rows[0]) - 1
        if begins[first] <= min(rows) and max(rows) < begins[first + 1]:
            MEMORY.used(self._owner, (first,))
            return self._of_group(first, rows)
        places: dict[int, list[int]] = {}
        for place, index in enumerate(rows):
            places.setdefault(bisect.bisect_right(begins, index) - 1, []).append(place)
        found: list[dict[str, Any]] = [{}] * len(rows)
        for group, own in places.items():
            if len(own) < FEW_ROWS:
                for place in own:
                    found[place] = self._sample(group, rows[place])
                continue
            for place, sample in zip(own, self._of_group(group, [rows[place] for place in own]), strict=True):
                found[place] = sample
        MEMORY.used(self._owner, places)
        return found

    def _of_group(self, group: int, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples with the numbers `rows`, which all lie in row group `group`."""
        begin = self._begins[group]
        columns = self._columns(group, rows[0])
        inside = [row - begin for row in rows]
        try:
            values = [column.many(inside) for _, column in columns]
        except (ValueError, OverflowError):
            return [self[row] for row in rows]  # the error then names the sample
        keys = [name for name, _ in columns]
        if len(keys) == 1:
            return [{keys[0]: value} for value in values[0]]
        return [dict(zip(keys, sample, strict=True)) for sample in zip(*values, strict=True)]

    def get_columns(self, rows: Ints) -> BatchColumns | None:
        """Return the columns of the samples at these indexes, see `formats.shards.columns_of_rows`."""
        low, high = self._group_of(int(rows.min())), self._group_of(int(rows.max()))
        if low == high:
            MEMORY.used(self._owner, (low,))
            return self._batch_of(low, rows)
        groups = np.searchsorted(self._begins, rows, side="right") - 1
        listed = groups.tolist()
        kept = {group: self._kept.get(group) for group in set(listed)}
        MEMORY.used(self._owner, kept)
        loaded = {group: columns for group, columns in kept.items() if columns is not None}
        if len(loaded) < len(kept) or len(rows) >= FEW_ROWS * len(kept):
            # one row group after the other, because all of them may not fit into memory
            parts = ((places, self._batch_of(group, rows[places])) for group, places in by_number(groups))
            return joined(len(rows), list(parts))
        inside = (rows - np.array(self._begins)[groups]).tolist()
        return {
            name: [loaded[group][at][1].view(row) for group, row in zip(listed, inside, strict=True)]
            for at, (name, _) in enumerate(loaded[low])
        }

    def _batch_of(self, group: int, rows: Ints) -> BatchColumns:
        """Return the columns of the samples with the numbers `rows`, which all lie in row group `group`."""
        inside = rows - self._begins[group]
        return {name: column.batch(inside) for name, column in self._columns(group, int(rows[0]))}

    def load(self, block: int) -> None:
        """Decode row group `block`, if it is not in memory."""
        self._columns(block, self._begins[block])

    def drop(self, block: int) -> None:
        """Drop row group `block` from memory."""
        self._kept.pop(block, None)

    def forget(self, block: int) -> None:
        """Mark row group `block` as not needed soon, so that its memory is freed before that of others."""
        MEMORY.release(self._owner, block)

    def close(self) -> None:
        """Close the file. Reads in progress end normally, and the file is closed after the last of them."""
        with self._lock:
            self._opened = None
            self._idle, self._kept = [], {}
        MEMORY.remove_owner(self._owner)

    def _new_file(self, opened: Descriptor) -> Any:
        return pyarrow_parquet().ParquetFile(
            f"/proc/self/fd/{opened.fileno()}" if self._part is None else opened_range(opened, self._part),
            metadata=self._footer,
            read_dictionary=self._texts,
            page_checksum_verification=True,
            pre_buffer=False,  # otherwise pyarrow keeps the compressed bytes of the row group that it read last
        )

    def _group_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: a sample's number must be at least 0 and below {len(self)}, got {index}")
        return bisect.bisect_right(self._begins, index) - 1

    def _refuse(self, index: int, column: str, error: Exception) -> NoReturn:
        where = f"{self.name}: sample {self._rows_before + index}, column {column!r}"
        if isinstance(error, UnicodeDecodeError):
            raise ShardCorruptError(f"{where} cannot be read: {error}. Write the file again") from error
        raise DatasetError(
            f"{where}: Python cannot hold its value ({error}). Write the column in another type, such as int64"
        ) from error

    def _columns(self, group: int, index: int) -> Columns:
        kept = self._kept.get(group)
        if kept is not None:
            return kept
        while True:
            with self._lock:
                opened = self._opened
                if opened is None:
                    raise ValueError(f"{self.name} is closed: open the dataset again to read from it")
                kept = self._kept.get(group)
                if kept is not None:
                    return kept
                loading = self._loading.get(group)
                if loading is None:
                    self._loading[group] = threading.Event()
                    break
            loading.wait(LOADING_WAIT_S)  # the other thread may have failed, so the loop looks again
        try:
            return self._decoded(opened, group, index)
        finally:
            with self._lock:
                self._loading.pop(group).set()

    def _decoded(self, opened: Descriptor, group: int, index: int) -> Columns:
        """Return row group `group`, decoded. `index`: number of the sample that needs it, for errors."""
        number, sample = self._first + group, self._rows_before + index
        try:
            with self._lock:
                file = self._idle.pop() if self._idle else None
            columns = self._read(opened, self._new_file(opened) if file is None else file, group)
        except DatasetError:
            raise
        except MemoryError as error:
            raise DatasetError(
                f"{self.name}: row group {number} must fit into memory: {error}. Write the file in smaller row groups"
            ) from error
        except NotImplementedError as error:
            raise DatasetError(
                f"{self.name}: sample {sample}, row group {number} cannot be read by pyarrow: {error}. Upgrade "
                "pyarrow, or write the column in another type"
            ) from error
        except Exception as error:
            raise ShardCorruptError(
                f"{self.name}: sample {sample}, row group {number} cannot be read: {error}. Write the file again"
            ) from error
        return columns

    def _read(self, opened: Descriptor, file: Any, group: int) -> Columns:
        rows = self._begins[group + 1] - self._begins[group]
        needed = self._needed(group)
        MEMORY.make_room(needed)
        free = free_memory()
        if needed > free:
            raise DatasetError(
                f"{self.name}: row group {self._first + group} must fit into memory: it takes about {needed} bytes, "
                f"but {free} are free. Write the file in smaller row groups"
            )
        table = self._table(file, self._first + group, rows)
        if table.num_rows != rows:
            raise ValueError(f"the row group must have {rows} rows, as the file's footer says, got {table.num_rows}")
        self._check_unchanged(opened)
        arrays = dict(zip(table.column_names, map(_expand_texts, table.columns), strict=True))
        read = table.column_names if self._wanted is None else self._wanted
        columns = [(name, column_of(name, arrays[name])) for name in read]
        with self._lock:
            if self._opened is None:
                return columns
            self._idle.append(file)
            self._kept[group] = columns
        MEMORY.add(self._owner, group, sum(arrays[name].nbytes for name in read))
        return columns

    def _needed(self, group: int) -> int:
        """Return the memory, in bytes, that the columns to read of row group `group` take, estimated from the footer
        (RowGroup.nbytes)."""
        found = self._groups[group]
        return found.nbytes if self._leaves is None else sum(found.column_bytes[leaf] for leaf in self._leaves)

    def _check_unchanged(self, opened: Descriptor) -> None:
        """Raise ShardCorruptError if the file was written to since it was opened, because its row groups may be a mix
        of old and new data."""
        found = os.fstat(opened.fileno())
        if found.st_mtime_ns != self._version:
            raise ShardCorruptError(
                f"{self.name} must not change while it is read, but it was written to since it was opened. Write new "
                "data to a new file, and index this file again if its new content is wanted"
            )

    def _table(self, file: Any, group: int, rows: int) -> Any:
        """Return row group `group`, which has `rows` rows, as a pyarrow table. pyarrow puts at most 2 GiB of text into
        one array of a list column, so a larger row group is read in parts."""
        try:
            return file.read_row_group(group, columns=self._wanted, use_threads=self._several)
        except NotImplementedError:
            part = rows // 2
            while part:
                try:
                    batches = list(file.iter_batches(part, row_groups=[group], columns=self._wanted))
                    return importlib.import_module("pyarrow").Table.from_batches(batches)
                except NotImplementedError:
                    part //= 4
            raise
