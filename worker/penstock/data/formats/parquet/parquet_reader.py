"""Samples of Parquet files: a row is a sample, a file is a shard, a row group is a block of it.

A row group is decoded as a whole, and stays in memory as long as the process's memory for decoded blocks lasts (see
decoded_blocks.py). The order of samples keeps those of a few row groups together, so each is decoded about once.

A column of a row group consists of as many arrays as pyarrow makes of it: an array of text has at most 2 GiB, and a row
group may have more.
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

from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.parquet.parquet_columns import Column, column_of
from penstock.data.formats.parquet.parquet_footer import footer_bytes, row_groups
from penstock.data.formats.parquet.parquet_index import pyarrow_parquet
from penstock.data.formats.shards import Shard
from penstock.proto.errors import DatasetError, ShardCorruptError
from penstock.runtime.process.free_memory import free_memory

__all__ = ["ParquetReader"]

EXPANDED_BYTES = 64 << 20
"""Largest size in bytes of a text column in one row group that is expanded to one text per row."""

Columns = list[tuple[str, Column]]
"""Columns of a row group: (name, values by row) for each."""


def _text_columns(footer: Any) -> list[str]:
    """Return the paths of all columns of text and bytes. They are read as pyarrow dictionaries where the file stores
    dictionaries, so a text that a million rows share is in memory once."""
    leaves = (footer.schema.column(number) for number in range(footer.num_columns))
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]


def _expand_texts(column: Any) -> Any:
    """Convert a dictionary column to one text per row, which takes half the time to read. Returns the column unchanged
    if the result would be larger than EXPANDED_BYTES."""
    arrow = importlib.import_module("pyarrow")
    if not arrow.types.is_dictionary(column.type) or column.type.value_type not in (arrow.string(), arrow.binary()):
        return column
    compute = importlib.import_module("pyarrow.compute")
    size = 0
    for chunk in column.chunks:
        size += compute.sum(compute.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0
    return column.cast(column.type.value_type) if size <= EXPANDED_BYTES else column


class ParquetReader:
    """Reader of a Parquet file, see formats.shards.ShardReader, BulkReader and ColumnReader. Values are Python's: None,
    lists, dictionaries, datetimes. Lists of numbers are numpy arrays, see parquet_columns.py; times with nanoseconds
    are numpy's, see parquet_values.py."""

    def __init__(self, shard: Shard, path: Path) -> None:
        stored = shard.files[0].raw
        self.name = stored.name
        self._reading = threading.Lock()
        """Lock of pyarrow's file object, which is not thread-safe. One thread reads a row group; the others wait, and
        then find it in memory."""
        self._kept: dict[int, Columns] = {}
        """Row groups in memory. Counted, and dropped, by MEMORY."""
        self._wanted: list[str] | None = None
        """Names of the columns to read; None: all."""
        self._leaves: list[int] | None = None
        """Numbers of the wanted columns' leaves in the file's schema; None: all."""
        library = pyarrow_parquet()
        try:
            self._opened: Descriptor | None = Descriptor(path)  # a plain file: pyarrow must not wait for a pipe
            found = os.fstat(self._opened.fileno())
            if found.st_size != stored.size:
                raise ShardCorruptError(
                    f"{self.name}: {path} has {found.st_size} bytes, but its index says {stored.size}"
                )
            self._version = found.st_mtime_ns
            self._groups = row_groups(footer_bytes(self._opened))
            same = f"/proc/self/fd/{self._opened.fileno()}"
            footer = library.read_metadata(same)
            self._file: Any = library.ParquetFile(
                same, metadata=footer, read_dictionary=_text_columns(footer), page_checksum_verification=True
            )
        except ShardCorruptError:
            raise
        except Exception as error:
            raise ShardCorruptError(f"{self.name}: {path} cannot be read: {error}") from error
        self._token = MEMORY.add_owner(self)
        self._begins: list[int] = [0, *itertools.accumulate(group.rows for group in self._groups)]
        if not footer.num_rows == self._begins[-1] == shard.samples:
            self.close()
            raise ShardCorruptError(f"{self.name}: it has {footer.num_rows} rows, but its index says {shard.samples}")
        if shard.blocks and shard.blocks != tuple(group.rows for group in self._groups):
            self.close()
            raise ShardCorruptError(
                f"{self.name}: its row groups have other numbers of rows than its index says: make the index again with "
                "index_parquet"
            )

    def __len__(self) -> int:
        return self._begins[-1]

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on. Raises DatasetError for a column that the file has not."""
        known = self._file.schema_arrow.names
        missing = [name for name in columns if name not in known]
        if missing:
            raise DatasetError(
                f"{self.name}: it must have the columns {', '.join(missing)}, which columns= names, got "
                f"{', '.join(known)}"
            )
        paths = [self._file.schema.column(leaf).path for leaf in range(len(self._file.schema))]
        self._leaves = [
            leaf for leaf, path in enumerate(paths) if any(f"{path}.".startswith(f"{name}.") for name in columns)
        ]
        self._wanted = list(columns)

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = self._group_of(index)
        row = index - self._begins[group]
        name = ""
        columns = self._columns(group, index)
        try:
            sample = {}
            for name, column in columns:
                sample[name] = column.at(row)
            return sample
        except (ValueError, OverflowError) as error:
            self._refuse(index, name, error)

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples at these indexes, in this order. Each row group is looked up once."""
        places: dict[int, list[int]] = {}
        for place, index in enumerate(rows):
            places.setdefault(self._group_of(index), []).append(place)
        found: list[dict[str, Any]] = [{}] * len(rows)
        for group, own in places.items():
            if len(own) == 1:
                found[own[0]] = self[rows[own[0]]]
                continue
            begin = self._begins[group]
            columns = self._columns(group, rows[own[0]])
            try:
                values = [column.many([rows[place] - begin for place in own]) for _, column in columns]
            except (ValueError, OverflowError):
                for place in own:  # to name the sample
                    found[place] = self[rows[place]]
                continue
            names = [name for name, _ in columns]
            for place, sample in zip(own, zip(*values, strict=True), strict=True):
                found[place] = dict(zip(names, sample, strict=True))
        return found

    def drop(self, block: int) -> None:
        """Drop a row group from memory."""
        self._kept.pop(block, None)

    def close(self) -> None:
        """Close the file. Waits until a read in another thread has ended."""
        with self._reading:
            self._kept = {}
            MEMORY.remove_owner(self._token)
            self._file = self._opened = None  # pyarrow closes the file when its last reference is dropped

    def _group_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: a sample's number must be at least 0 and below {len(self)}, got {index}")
        return bisect.bisect_right(self._begins, index) - 1

    def _refuse(self, index: int, column: str, error: Exception) -> NoReturn:
        if isinstance(error, UnicodeDecodeError):
            raise ShardCorruptError(f"{self.name}: sample {index}, column {column!r}: {error}") from error
        raise DatasetError(
            f"{self.name}: sample {index}, column {column!r}: Python cannot hold its value ({error}). Write the column "
            "in another type, such as int64"
        ) from error

    def _columns(self, group: int, index: int) -> Columns:
        kept = self._kept.get(group)
        if kept is not None:
            MEMORY.used(self._token, group)
            return kept
        with self._reading:
            if self._file is None:
                raise ValueError(f"{self.name} is closed")
            kept = self._kept.get(group)
            if kept is not None:
                return kept
            try:
                return self._read(group)
            except DatasetError:
                raise
            except MemoryError as error:
                raise DatasetError(
                    f"{self.name}: row group {group} must fit in memory: {error}; write it in smaller row groups"
                ) from error
            except NotImplementedError as error:
                raise DatasetError(
                    f"{self.name}: sample {index}, row group {group}: pyarrow cannot read it: {error}"
                ) from error
            except Exception as error:
                raise ShardCorruptError(f"{self.name}: sample {index}, row group {group}: {error}") from error

    def _read(self, group: int) -> Columns:
        rows = self._begins[group + 1] - self._begins[group]
        needed = self._needed(group)
        MEMORY.make_room(needed)
        free = free_memory()
        if needed > free:
            raise DatasetError(
                f"{self.name}: row group {group} must fit into memory: it takes {needed} bytes, but {free} are free. "
                "Write the file in smaller row groups"
            )
        table = self._table(group, rows)
        if table.num_rows != rows:
            raise ValueError(f"it must have {rows} rows as in the file's footer, got {table.num_rows}")
        self._check_unchanged()
        arrays = dict(zip(table.column_names, map(_expand_texts, table.columns), strict=True))
        names = table.column_names if self._wanted is None else self._wanted
        columns = [(name, column_of(arrays[name])) for name in names]
        self._kept[group] = columns
        MEMORY.add(self._token, group, sum(arrays[name].nbytes for name in names))
        return columns

    def _needed(self, group: int) -> int:
        """Return the smallest number of bytes that the wanted columns of a row group take in memory."""
        found = self._groups[group]
        return found.nbytes if self._leaves is None else sum(found.column_bytes[leaf] for leaf in self._leaves)

    def _check_unchanged(self) -> None:
        """Raise ShardCorruptError if the file was written to since it was opened: its row groups may be those of two
        files."""
        assert self._opened is not None
        found = os.fstat(self._opened.fileno())
        if found.st_mtime_ns != self._version:
            raise ShardCorruptError(
                f"{self.name}: it was written to since it was opened. Write new data to a new file, and index it"
            )

    def _table(self, group: int, rows: int) -> Any:
        """Return a row group with `rows` rows. pyarrow puts at most 2 GiB of text into one array of a list column, so a
        larger row group is read in parts."""
        try:
            return self._file.read_row_group(group, columns=self._wanted)
        except NotImplementedError:
            part = rows // 2
            while part:
                try:
                    batches = list(self._file.iter_batches(part, row_groups=[group], columns=self._wanted))
                    return importlib.import_module("pyarrow").Table.from_batches(batches)
                except NotImplementedError:
                    part //= 4
            raise
