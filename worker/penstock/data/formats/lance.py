"""Rows of a Lance dataset, by number, read by the package pylance. It finds, fetches and caches the files, also from
object stores, so LanceRows is a map-style dataset, and not a StreamingDataset of shards.

LanceRows reads one version of the data, so no row's number changes while a job runs. Without the argument `version`, a
resumed job opens the newest version, and refuses a state of an older one. A call takes about 0.2 ms for one row or for
many, so read rows by batches (`__getitems__`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import torch.utils.data
import xxhash

from penstock.data.batch_columns import Columns, ColumnSource
from penstock.data.formats.columnar.columns import Column, column_of
from penstock.data.formats.fields import unknown_columns
from penstock.data.ordering.permutation import Ints
from penstock.data.sample_numbers import many_numbers, one_number
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError

AHEAD_BYTES = 2 << 20
"""Bytes of rows that one call reads when a caller goes through the rows in order: with rows of 1 KiB 7 times as fast as
calls for 32 rows; a larger size was slower with rows of 64 KiB."""


@dataclass(frozen=True, slots=True)
class _Table:
    first: int
    """Number of the table's first row. The others follow it only if consecutive rows were read."""
    rows: int
    columns: list[tuple[str, Column]]

    @staticmethod
    def of(table: Any, first: int) -> _Table:
        columns = zip(table.column_names, map(column_of, table.column_names, table.columns), strict=True)
        return _Table(first, table.num_rows, list(columns))


class LanceRows(torch.utils.data.Dataset[dict[str, Any]], ColumnSource):
    """Map-style dataset of the rows of one version of a Lance dataset. A sample is a dict from column name to value:
    lists of numbers are numpy arrays, other values Python's, as from Arrow files.

        loader = MapLoader(LanceRows("s3://bucket/train.lance", columns=["tokens"]), batch_size=64, shuffle=True)

    A MapLoader reads a whole batch in one call. Thread-safe, and usable in forked and spawned processes.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        version: int | None = None,
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            uri: folder of the dataset, or its address in an object store.
            version: version to read; None: the newest one. A saved state of another version is refused.
            columns: names of the columns to read; None: all.
            storage_options: options for pylance's object store, such as keys.

        Raises:
            InvalidArgumentError: a column does not exist, or `columns` is empty.
            DatasetError: the dataset or the version cannot be opened, or pylance is not installed.
        """
        self.uri = os.fspath(uri)
        self._options = None if storage_options is None else dict(storage_options)
        self._opened: tuple[int, Any] | None = None
        self._ahead: _Table | None = None
        """Consecutive rows that were read last, if more were read than asked for."""
        self._next = -1
        """Row after the last consecutive rows asked for; -1: none. If the next ones begin there, read ahead."""
        self._row_bytes = AHEAD_BYTES
        """Mean size of the consecutive rows that were read last."""
        self._version = version
        dataset = self._dataset()
        self.version = self._version = int(dataset.version)
        self._rows: int = dataset.count_rows()
        schema = dataset.schema
        self.columns = list(schema.names) if columns is None else list(columns)
        if error := unknown_columns(self.uri, self.columns or ("none",), schema.names):
            raise InvalidArgumentError(error)
        self.fingerprint = self._digest(dataset)
        """Digest of the names of the read columns, and of the files of the dataset's version."""

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"<LanceRows {self.uri}, version {self.version}: {self._rows} rows of {', '.join(self.columns)}>"

    def __getitem__(self, index: Any) -> Any:
        """Return a row, or for a slice, a list or an array of numbers, the list of these rows, read in one call. Raises
        IndexError for a row that does not exist, ShardCorruptError for files that cannot be read."""
        several = many_numbers(index, self._rows, self.uri, "a row's number")
        if several is not None:
            return self._taken(several)
        return self._taken([one_number(index, self._rows, self.uri, "a row's number")])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[dict[str, Any]]:
        """Return several rows, read in one call. Raises as `__getitem__` does."""
        rows: list[dict[str, Any]] = self[list(indices)]
        return rows

    def get_columns(self, samples: Ints) -> Columns:
        """Return the columns of these rows, by name, see ColumnSource."""
        table, begin = self._table_of(samples.tolist())
        rows = np.arange(begin, begin + len(samples))
        return {name: column.batch(rows) for name, column in table.columns}

    def _taken(self, numbers: list[int]) -> list[dict[str, Any]]:
        if not numbers:
            return []
        table, begin = self._table_of(numbers)
        names = [name for name, _ in table.columns]
        values = [column.many(range(begin, begin + len(numbers))) for _, column in table.columns]
        return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]

    def _table_of(self, numbers: list[int]) -> tuple[_Table, int]:
        """Return a table with these rows (at least one) in this order, and the index of the first."""
        first, count = numbers[0], len(numbers)
        if numbers == list(range(first, first + count)):
            return self._in_order(first, count)
        return _Table.of(self._read(numbers), first), 0

    def _in_order(self, first: int, count: int) -> tuple[_Table, int]:
        """Return a table with consecutive rows, and the index of the first; read ahead if they follow the last ones.
        Thread-safe, because each caller uses the table that it has read or found."""
        ahead, follows, self._next = self._ahead, self._next == first, first + count
        if ahead is not None and ahead.first <= first and first + count <= ahead.first + ahead.rows:
            return ahead, first - ahead.first
        span = max(1, AHEAD_BYTES // self._row_bytes // count) * count if follows else count
        read = self._read(list(range(first, min(first + span, self._rows))))
        self._row_bytes = max(1, read.nbytes // read.num_rows)
        table = _Table.of(read, first)
        self._ahead = table if span > count else None
        return table, 0

    def _read(self, numbers: list[int]) -> Any:
        dataset = self._dataset()
        table = self._called(lambda: dataset.take(numbers, columns=self.columns), _named(numbers))
        if table.num_rows != len(numbers):
            raise ShardCorruptError(
                f"{self.uri}: pylance must return {len(numbers)} rows, got {table.num_rows}: files are missing"
            )
        return table

    def _dataset(self) -> Any:
        if self._opened is not None and self._opened[0] == os.getpid():
            return self._opened[1]
        try:
            lance = importlib.import_module("lance")
        except ImportError as error:
            raise DatasetError("Lance datasets need the package pylance. Run pip install 'penstock[lance]'") from error
        try:
            dataset = lance.dataset(self.uri, version=self._version, storage_options=self._options)
        except (ValueError, OSError) as error:
            where = self.uri if self._version is None else f"version {self._version} of {self.uri}"
            raise DatasetError(
                f"{where} cannot be opened: {error}. Correct the address, storage_options or version"
            ) from error
        self._opened = os.getpid(), dataset
        return dataset

    def _called(self, call: Callable[[], Any], what: str) -> Any:
        """Raises ShardCorruptError for exceptions, and for panics of Rust code, which are BaseExceptions."""
        try:
            return call()
        except Exception as error:
            raise ShardCorruptError(
                f"{self.uri}: {what} cannot be read: {error}. Check that its files can be reached, or write it again"
            ) from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise ShardCorruptError(
                f"{self.uri}: {what}: the dataset's files are damaged: {error}. Write the dataset again"
            ) from error

    def _digest(self, dataset: Any) -> str:
        digest = xxhash.xxh3_128(f"{self._rows} {self.columns}".encode())
        for fragment in dataset.get_fragments():
            metadata = fragment.metadata
            files = sorted(file.path for file in metadata.files)
            digest.update(f"{metadata.id} {files} {metadata.num_deletions} {metadata.physical_rows}\n".encode())
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_ahead": None}


def _named(numbers: list[int]) -> str:
    return f"rows {numbers[:5]}" + (f" or one of {len(numbers) - 5} more" if len(numbers) > 5 else "")
