"""Samples of Parquet files: a row is a sample, a file is a shard.

mosaicml-streaming 0.13.0 has no such shards; an index that lists them is our own. It is made from the files' footers,
which say how many rows they have.

Parquet is read by row groups, and rows are asked for in any order: row groups that were read are kept, as many as fit
in KEPT_BYTES, and the one that was longest unused goes first. A file whose row groups fit is read once.

A column of a row group is as many arrays as pyarrow makes of it, and stays so: an array of text has 2 GiB at most, and
a row group may have more.
"""

from __future__ import annotations

import bisect
import importlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from penstock.data.formats.index import INDEX, write_index
from penstock.data.formats.parquet_values import Value, value_of
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.proto.errors import DatasetError, ShardCorruptError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.process.free_memory import free_memory

__all__ = ["KEPT_BYTES", "ParquetReader", "index_parquet", "parquet_shards"]

KEPT_BYTES = 256 << 20
"""Of row groups in memory, in a reader; one is kept however large it is."""


SPREAD_OUT = 64 << 20
"""Bytes of a column of texts, in a row group, up to which rows that have the same text have one each."""


def _pyarrow() -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DatasetError("Parquet files need the package pyarrow: pip install 'penstock[parquet]'") from error


def index_parquet(folder: str | os.PathLike[str]) -> list[Shard]:
    """Write an index of all Parquet files in a folder of this machine and below it, in the order of their paths;
    returns what it lists. Raises DatasetError."""
    root = Path(folder)
    files = sorted(root.rglob("*.parquet"))
    if not files:
        raise DatasetError(f"{root}: no *.parquet in it or below")
    shards = parquet_shards((path.relative_to(root).as_posix(), path) for path in files)
    write_whole(root / INDEX, write_index(shards))
    return shards


def parquet_shards(files: Iterable[tuple[str, Path | IO[bytes]]]) -> list[Shard]:
    """A shard for each file: (its path relative to the dataset's folder, where to read its footer).

    The columns of all must have the same names, for a loader makes batches of rows from any of them. Raises
    DatasetError.
    """
    library = _pyarrow()
    shards: list[Shard] = []
    first: tuple[str, list[str]] | None = None
    for name, source in files:
        try:
            footer = library.read_metadata(source)
            columns = list(footer.schema.to_arrow_schema().names)
            size = source.stat().st_size if isinstance(source, Path) else source.seek(0, os.SEEK_END)
        except Exception as error:  # pyarrow's own errors, the system's, those of whatever the file comes from
            raise ShardCorruptError(f"{name}: no Parquet file: {error}") from error
        if len(set(columns)) != len(columns):
            raise DatasetError(f"{name}: it has a column twice: {', '.join(columns)}")
        if first is None:
            first = name, columns
        elif set(first[1]) != set(columns):
            raise DatasetError(f"{name}: its columns are {columns}, those of {first[0]} are {first[1]}")
        shards.append(Shard("parquet", footer.num_rows, (ShardFile(StoredFile(name, size)),)))
    return shards


Columns = list[tuple[str, Value, Any]]
"""(name, what makes a value of its scalars, pyarrow's array) of each."""


_BYTES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 4}
"""Of a value in memory, by its physical type; of text what it has beside the text: a place, or its number in a
dictionary."""


def _texts(footer: Any) -> list[str]:
    """Return the paths of columns of text and bytes, which are read as dictionaries where they are stored as such: one
    text that a million rows have is in memory once, as it is in the file."""
    leaves = (footer.schema.column(number) for number in range(footer.num_columns))
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]


def _spread_out(column: Any) -> Any:
    """Return a column of a dictionary with a text for each row, of which a value is had in half the time, unless that
    would be large."""
    arrow = importlib.import_module("pyarrow")
    if not arrow.types.is_dictionary(column.type) or column.type.value_type not in (arrow.string(), arrow.binary()):
        return column
    compute = importlib.import_module("pyarrow.compute")
    size = 0
    for chunk in column.chunks:
        size += compute.sum(compute.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0
    return column.cast(column.type.value_type) if size <= SPREAD_OUT else column


def _memory_of(group: Any) -> int:
    """Return the bytes that a row group takes at least, from its footer: some hundred bytes of a file may stand for a
    thousand million equal numbers."""
    columns = (group.column(number) for number in range(group.num_columns))
    return sum(
        max(column.total_uncompressed_size, column.num_values * _BYTES.get(column.physical_type, 1))
        for column in columns
    )


class ParquetReader:
    """See formats.shards.ShardReader. Values are Python's: None, lists, dictionaries, datetimes; those with nanoseconds
    numpy's, see parquet_values.py."""

    def __init__(self, shard: Shard, path: Path) -> None:
        stored = shard.files[0].raw
        self.name = stored.name
        self._reading = threading.Lock()
        """One thread reads a row group, and the others find it: pyarrow's file is not made for two at a time."""
        self._kept: OrderedDict[int, tuple[int, Columns]] = OrderedDict()
        self._kept_bytes = 0
        library = _pyarrow()
        try:
            size = path.stat().st_size
            if size != stored.size:
                raise ShardCorruptError(f"{self.name}: {path} has {size} bytes; its index says {stored.size}")
            footer = library.read_metadata(path)
            self._file: Any = library.ParquetFile(path, metadata=footer, read_dictionary=_texts(footer))
        except (ShardCorruptError, MemoryError):
            raise
        except Exception as error:
            raise ShardCorruptError(f"{self.name}: {path} cannot be read: {error}") from error
        if footer.num_rows != shard.samples:
            self.close()
            raise ShardCorruptError(f"{self.name}: it has {footer.num_rows} rows; its index says {shard.samples}")
        rows = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        self._begins: list[int] = [0, *itertools.accumulate(rows)]

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: sample {index} of {len(self)}")
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
        """Waits for a thread that is reading a row group."""
        with self._reading:
            self._kept = OrderedDict()
            self._file = None  # which closes it

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
            except (MemoryError, DatasetError):
                raise
            except NotImplementedError as error:
                raise DatasetError(
                    f"{self.name}: sample {index}, row group {group}: pyarrow cannot read it: {error}"
                ) from error
            except Exception as error:
                raise ShardCorruptError(f"{self.name}: sample {index}, row group {group}: {error}") from error

    def _read(self, group: int) -> Columns:
        rows = self._begins[group + 1] - self._begins[group]
        needed, free = _memory_of(self._file.metadata.row_group(group)), free_memory()
        if needed > free:
            raise DatasetError(
                f"{self.name}: row group {group} must fit in memory: it takes {needed} bytes, and {free} are free; "
                "write it in smaller row groups"
            )
        table = self._table(group, rows)
        if table.num_rows != rows:
            raise ValueError(f"{table.num_rows} rows")
        columns, size = [], 0
        for name, column in zip(table.column_names, map(_spread_out, table.columns), strict=True):
            columns.append((name, value_of(column.type), column.chunk(0) if column.num_chunks == 1 else column))
            size += column.nbytes
        self._kept[group] = size, columns
        self._kept_bytes += size
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1][0]
        return columns

    def _table(self, group: int, rows: int) -> Any:
        """A row group. Of lists of text pyarrow makes one array only, of 2 GiB at most: then it is read in parts."""
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
