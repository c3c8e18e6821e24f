"""Samples of plain CSV and TSV files with a header, by the rules of Python's module csv: a quoted value may contain
line ends. A sample is a dict from column name to text. Empty lines do not count."""

from __future__ import annotations

import csv
import io
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.formats.contents import CHANGED, new_whole, whole
from penstock.data.formats.fields import check_text, names
from penstock.data.formats.raw_files import check_uncompressed, open_file
from penstock.data.formats.records.record_file import RecordFile, record_shard
from penstock.data.formats.shards import Shard
from penstock.proto.errors import ShardCorruptError
from penstock.runtime.files.plain_files import open_plain

LONGEST_VALUE = 1 << 30
"""Most characters in a value. The default of Python's module csv is 131,072."""


class CSVRowsReader(RecordFile):
    def __init__(self, shard: Shard, *paths: Any) -> None:
        super().__init__(shard, *paths)
        self._columns: list[str] = shard.settings["column_names"]
        self._separator: str = shard.settings["separator"]
        allow_long_values()
        if not self.is_part:
            self._check_header()

    def _check_header(self) -> None:
        assert self._file is not None
        try:
            header = self._file.read(self._offsets[0], 0).decode("utf-8-sig")
            columns = next(csv.reader(io.StringIO(header, newline=""), delimiter=self._separator, strict=True), [])
        except (OSError, ValueError, csv.Error) as error:
            raise ShardCorruptError(f"{self.name}: the header cannot be read: {error}. {CHANGED}") from error
        if columns != self._columns:
            raise ShardCorruptError(
                f"{self.name}: the header must be {', '.join(self._columns)}, got {', '.join(columns)}. {CHANGED}"
            )

    def _decoded(self, index: int, record: bytes) -> dict[str, Any]:
        try:
            rows = csv.reader(io.StringIO(record.decode(), newline=""), delimiter=self._separator, strict=True)
            values = next(rows)
            single = not any(rows) and (record.endswith(b"\n") or index == len(self) - 1)
        except (ValueError, csv.Error, StopIteration) as error:
            self._undecodable(index, f"must be a row of CSV in UTF-8: {error or 'it is empty'}")
        if not single:
            self._corrupt(index, "must be one row, but the file was changed after it was indexed", CHANGED)
        if len(values) != len(self._columns):
            self._undecodable(index, f"must have {len(self._columns)} values, got {len(values)}")
        return dict(zip(self._columns, values, strict=True))


def check_csv_rows(settings: dict[str, Any]) -> None:
    names(settings, "column_names")
    check_text(settings, "separator")


def index_csv_rows(path: Path, name: str, out: Path) -> Shard:
    """Parse all rows of a CSV file (TSV: named .tsv or .TSV), write the file of their offsets to the index's folder
    `out`, and return the shard. Raises DatasetError if it cannot be written; ShardCorruptError, which names the line,
    for an invalid file."""
    allow_long_values()
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    columns, size, offsets, content = _rows(path, name, separator)
    settings = {"column_names": columns, "separator": separator}
    shard = record_shard("csv_rows", path, out, name, size, np.array(offsets, np.int64), settings)
    return replace(shard, content=content)


def _rows(path: Path, name: str, separator: str) -> tuple[list[str], int, list[int], str]:
    opened, size = open_file(path, name)
    check_uncompressed(opened, name)
    consumed, line, digest = 0, 0, new_whole()

    def lines() -> Generator[str, None, None]:
        nonlocal consumed, line
        with open(path, "rb", opener=open_plain) as file:
            for data in file:
                consumed += len(data)
                digest.update(data)
                line += 1
                yield data.decode("utf-8-sig" if line == 1 else "utf-8")

    source = lines()
    rows = csv.reader(source, delimiter=separator, strict=True)
    try:
        columns = next(rows, [])
        if not columns or len(set(columns)) != len(columns):
            raise ShardCorruptError(f"{name}: the first line must have the columns' names, each once, got {columns}")
        offsets = [consumed]
        for row in rows:
            if not row:
                offsets[-1] = consumed
                continue
            if len(row) != len(columns):
                raise ShardCorruptError(
                    f"{name}: the row that ends in line {line} must have {len(columns)} values, got {len(row)}"
                )
            offsets.append(consumed)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ShardCorruptError(f"{name}: line {line} must be CSV in UTF-8: {error}. Correct the file") from error
    finally:
        source.close()  # closes the file, too: an error keeps the generator that reads it alive
    if consumed != size:
        raise ShardCorruptError(f"{name} must not change while it is indexed. Index it again when its writer has ended")
    return columns, size, offsets, whole(digest)


def allow_long_values() -> None:
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_VALUE))
