"""Samples of Parquet files: a row is a sample, a file is a shard.

mosaicml-streaming 0.13.0 has no Parquet shards, so an index that lists them is an extension of Penstock. It is made
from the files' footers, which contain the number of rows.

Parquet is read by row groups, and rows are requested in any order. Row groups that were read stay in memory, up to
KEPT_BYTES in all; the least recently used one is dropped first. So a file whose row groups fit is read once.

A column of a row group consists of as many arrays as pyarrow makes of it: an array of text has at most 2 GiB, and a row
group may have more.
"""

from __future__ import annotations

import bisect
import importlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.parquet.parquet_footer import footer_bytes, row_groups
from penstock.data.formats.parquet.parquet_values import Value, value_of
from penstock.data.formats.shards import ReadOptions, Shard, ShardFile, StoredFile
from penstock.proto.errors import DatasetError, ShardCorruptError
from penstock.runtime.process.free_memory import free_memory

__all__ = ["KEPT_BYTES", "ParquetReader", "open_parquet", "parquet_shards"]

KEPT_BYTES = 256 << 20
"""Largest size of all row groups that a reader keeps in memory, in bytes. One row group is kept even if it is
larger."""


EXPANDED_BYTES = 64 << 20
"""Largest size in bytes of a text column in one row group that is expanded to one text per row."""


def _pyarrow() -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DatasetError("Parquet files need the package pyarrow: pip install 'penstock[parquet]'") from error


def parquet_shards(files: Iterable[tuple[str, Path | IO[bytes]]]) -> list[Shard]:
    """Return a shard for each file. `files`: (path relative to the dataset's folder, source of the footer) for each.

    All files must have columns of the same names, because a loader makes batches of rows from any of them. Raises
    DatasetError.
    """
    library = _pyarrow()
    shards: list[Shard] = []
    first: tuple[str, list[str]] | None = None
    for name, source in files:
        try:
            if isinstance(source, Path):
                opened = Descriptor(source)  # a plain file, so that pyarrow never waits for a pipe or a device
                footer = library.read_metadata(f"/proc/self/fd/{opened.fileno()}")
                size = os.fstat(opened.fileno()).st_size
            else:
                footer = library.read_metadata(source)
                size = source.seek(0, os.SEEK_END)
            columns = list(footer.schema.to_arrow_schema().names)
        except Exception as error:  # errors of pyarrow, of the system, and of the file's source
            raise ShardCorruptError(f"{name}: it is not a Parquet file: {error}") from error
        if len(set(columns)) != len(columns):
            raise DatasetError(f"{name}: the names of columns must be unique, got {', '.join(columns)}")
        if first is None:
            first = name, columns
        elif set(first[1]) != set(columns):
            raise DatasetError(
                f"all Parquet files of a dataset must have the same columns: {first[0]} has {', '.join(first[1])}, but "
                f"{name} has {', '.join(columns)}. Move files of other data into another folder"
            )
        shards.append(Shard("parquet", footer.num_rows, (ShardFile(StoredFile(name, size)),)))
    return shards


Columns = list[tuple[str, Value, Any]]
"""Columns of a row group: (name, function from a pyarrow scalar to the sample's value, pyarrow array) for each."""


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


def open_parquet(shard: Shard, paths: Sequence[Path], options: ReadOptions) -> ParquetReader:
    del options  # this format has none
    return ParquetReader(shard, paths[0])


class ParquetReader:
    """Reader of a Parquet file, see formats.shards.ShardReader. Values are Python's: None, lists, dictionaries,
    datetimes. Times with nanoseconds are numpy's, see parquet_values.py."""

    def __init__(self, shard: Shard, path: Path) -> None:
        stored = shard.files[0].raw
        self.name = stored.name
        self._reading = threading.Lock()
        """Lock of pyarrow's file object, which is not thread-safe. One thread reads a row group; the others wait, and
        then find it in memory."""
        self._kept: OrderedDict[int, tuple[int, Columns]] = OrderedDict()
        self._kept_bytes = 0
        library = _pyarrow()
        try:
            opened = Descriptor(path)  # a plain file, so that pyarrow never waits for a pipe or a device
            size = os.fstat(opened.fileno()).st_size
            if size != stored.size:
                raise ShardCorruptError(f"{self.name}: {path} has {size} bytes, but its index says {stored.size}")
            self._groups = row_groups(footer_bytes(opened))
            same = f"/proc/self/fd/{opened.fileno()}"
            footer = library.read_metadata(same)
            self._file: Any = library.ParquetFile(same, metadata=footer, read_dictionary=_text_columns(footer))
        except ShardCorruptError:
            raise
        except Exception as error:
            raise ShardCorruptError(f"{self.name}: {path} cannot be read: {error}") from error
        self._begins: list[int] = [0, *itertools.accumulate(group.rows for group in self._groups)]
        if not footer.num_rows == self._begins[-1] == shard.samples:
            self.close()
            raise ShardCorruptError(f"{self.name}: it has {footer.num_rows} rows, but its index says {shard.samples}")

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: a sample's number must be at least 0 and below {len(self)}, got {index}")
        group = bisect.bisect_right(self._begins, index) - 1
        row = index - self._begins[group]
        columns = self._columns(group, index)
        name = ""
        try:
            sample = {}
            for name, value, column in columns:
                sample[name] = value(column[row])
            return sample
        except UnicodeDecodeError as error:
            raise ShardCorruptError(f"{self.name}: sample {index}, column {name!r}: {error}") from error
        except (ValueError, OverflowError) as error:
            raise DatasetError(
                f"{self.name}: sample {index}, column {name!r}: Python cannot hold its value ({error}). Write the "
                "column in another type, such as int64"
            ) from error

    def close(self) -> None:
        """Close the file. Waits until a read in another thread has ended."""
        with self._reading:
            self._kept = OrderedDict()
            self._file = None  # pyarrow closes the file when its last reference is dropped

    def _columns(self, group: int, index: int) -> Columns:
        with self._reading:
            if self._file is None:
                raise ValueError(f"{self.name} is closed")
            kept = self._kept.get(group)
            if kept is not None:
                self._kept.move_to_end(group)
                return kept[1]
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
        needed, free = self._groups[group].nbytes, free_memory()
        if needed > free:
            raise DatasetError(
                f"{self.name}: row group {group} must fit into memory: it takes {needed} bytes, but {free} are free. "
                "Write the file in smaller row groups"
            )
        table = self._table(group, rows)
        if table.num_rows != rows:
            raise ValueError(f"it must have {rows} rows as in the file's footer, got {table.num_rows}")
        columns, size = [], 0
        for name, column in zip(table.column_names, map(_expand_texts, table.columns), strict=True):
            columns.append((name, value_of(column.type), column.chunk(0) if column.num_chunks == 1 else column))
            size += column.nbytes
        self._kept[group] = size, columns
        self._kept_bytes += size
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1][0]
        return columns

    def _table(self, group: int, rows: int) -> Any:
        """Return a row group with `rows` rows. pyarrow puts at most 2 GiB of text into one array of a list column, so a
        larger row group is read in parts."""
        try:
            return self._file.read_row_group(group)
        except NotImplementedError:
            part = rows // 2
            while part:
                try:
                    batches = list(self._file.iter_batches(part, row_groups=[group]))
                    return importlib.import_module("pyarrow").Table.from_batches(batches)
                except NotImplementedError:
                    part //= 4
            raise
