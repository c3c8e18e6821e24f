"""Writers of the files of one part of a conversion: a folder with an index, which is written last.

The indexes of the parts show which parts a killed run has finished: a part without an index is converted again, and a
part whose index has notes with this conversion's key is kept.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.data.converting.argument_names import ArgumentNames
from penstock.data.converting.target_columns import TargetColumn, arrow_value
from penstock.data.formats.index import INDEX, write_index
from penstock.data.formats.parquet.parquet_shards import parquet_shards
from penstock.data.formats.shards import Shard
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.writers import MDSWriter
from penstock.proto.errors import DatasetError

__all__ = ["MDSPart", "ParquetPart", "PartFiles"]

PARQUET_FILE = "shard.00000.parquet"


class PartFiles(Protocol):
    """Writer of the files of one part of a conversion."""

    def write(self, rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> None:
        """Add rows. `sizes`: size of each row in bytes. Raise DatasetError for a value that cannot be stored, OSError
        for a full disk."""

    def finish(self) -> list[Shard]:
        """Write all files of the part except its index, and return its shards."""

    def publish(self, notes: Mapping[str, Any]) -> None:
        """Write the index of the part, with notes. From then on the part counts as finished."""

    def abandon(self) -> None:
        """Stop without writing the index. After `publish` this does nothing."""


class MDSPart:
    """Writer of a part of a conversion in MDS format: any number of shards."""

    def __init__(
        self, folder: str, columns: Sequence[TargetColumn], settings: Mapping[str, Any], names: ArgumentNames
    ) -> None:
        """Begin to write.

        Args:
            folder: path or URL of the part's folder, whose content is replaced.
            columns: columns of the result.
            settings: keyword arguments of MDSWriter.
            names: how errors name the arguments that the user gave.
        """
        self._writer = MDSWriter(folder, {each.name: each.type for each in columns}, exist_ok=True, **settings)
        self._writer.remedy_of = lambda name: f"Give the column another type with {names.column_type(name, 'json')}"

    def write(self, rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> None:
        del sizes  # MDSWriter counts bytes itself
        for row in rows:
            self._writer.write(row)

    def finish(self) -> list[Shard]:
        return self._writer.flush()

    def publish(self, notes: Mapping[str, Any]) -> None:
        self._writer.notes = notes
        self._writer.close()

    def abandon(self) -> None:
        self._writer.abandon()


class ParquetPart:
    """Writer of a part of a conversion as one Parquet file."""

    def __init__(
        self,
        remote: RemoteFolder,
        folder: str,
        schema: Any,
        names: ArgumentNames,
        *,
        compression: str | None,
        group_bytes: int,
        timeout_s: float,
    ) -> None:
        """Begin to write.

        Args:
            remote: folder of the whole result.
            folder: path of the part's folder, relative to `remote`.
            schema: pyarrow schema of the columns.
            names: how errors name the arguments that the user gave.
            compression: compression of the file, by pyarrow's name; None: none.
            group_bytes: bytes of values after which a row group is written.
            timeout_s: seconds for each file of a remote.
        """
        self._arrow = importlib.import_module("pyarrow")
        self._remote, self._folder, self._timeout_s, self._names = remote, folder, timeout_s, names
        self._schema, self._group_bytes = schema, group_bytes
        self._rows: list[Mapping[str, Any]] = []
        self._size = 0
        self._shards: list[Shard] = []
        remote.remove(f"{folder}/{INDEX}", deadline_s=timeout_s)
        self._temporary = tempfile.TemporaryDirectory(prefix="penstock-convert-") if remote.local is None else None
        below = Path(self._temporary.name) if self._temporary else Path(remote.local or "", folder)
        below.mkdir(parents=True, exist_ok=True)
        self._path = below / PARQUET_FILE
        parquet = importlib.import_module("pyarrow.parquet")
        self._writer = parquet.ParquetWriter(
            self._path, schema, compression=compression or "none", write_page_checksum=True
        )

    def write(self, rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> None:
        for row, size in zip(rows, sizes, strict=True):
            self._rows.append(row)
            self._size += size
            if self._size >= self._group_bytes:
                self._flush()

    def _flush(self) -> None:
        arrays = []
        for field in self._schema:
            values = [arrow_value(row[field.name]) for row in self._rows]
            try:
                arrays.append(self._arrow.array(values, field.type))
            except (ValueError, TypeError, OverflowError, self._arrow.ArrowException) as error:
                raise DatasetError(
                    f"column {field.name!r} must have values of type {field.type}: {error}. Give its type with "
                    f"{self._names.column_type(field.name, 'json')}"
                ) from None
        self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema), row_group_size=1 << 30)
        self._rows, self._size = [], 0

    def finish(self) -> list[Shard]:
        if self._rows:
            self._flush()
        self._writer.close()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        shards = parquet_shards([(PARQUET_FILE, self._path)])
        if self._temporary is not None:
            self._remote.upload(f"{self._folder}/{PARQUET_FILE}", self._path, deadline_s=self._timeout_s)
            self._temporary.cleanup()
        self._shards = shards
        return shards

    def publish(self, notes: Mapping[str, Any]) -> None:
        self._remote.write(f"{self._folder}/{INDEX}", write_index(self._shards, notes), deadline_s=self._timeout_s)

    def abandon(self) -> None:
        if self._writer.is_open:
            self._writer.close()
        if self._temporary is not None:
            self._temporary.cleanup()
