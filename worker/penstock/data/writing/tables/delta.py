"""Snapshots of Delta Lake tables, from their log, by the package deltalake: files, partitions, deletion vectors. Its
own readers are not used: those by pyarrow refuse deletion vectors."""

from __future__ import annotations

import importlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from penstock.data.formats.parquet.table_files import text_of_value
from penstock.data.ordering.permutation import Ints
from penstock.data.writing.tables.snapshot import Column, ColumnType, ListOf, MapOf, TableFile, TableSnapshot
from penstock.proto.errors import DatasetError, SnapshotExpiredError

VECTOR = re.compile(r"(^|/)deletion_vector_[^/]*\.bin$")
"""Files that the log's deletion vectors lie in."""
_READ = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
    "variantType",
    "variantType-preview",
}
"""Features of tables that are read. All others that readers must know are refused. Some writers name variants for
tables without any; a column of that type is refused."""
_TYPES = {
    "string": "string",
    "long": "int64",
    "integer": "int32",
    "short": "int16",
    "byte": "int8",
    "float": "float",
    "double": "double",
    "boolean": "bool",
    "binary": "binary",
    "date": "date32[day]",
    "timestamp": "timestamp[us, tz=UTC]",
    "timestamp_ntz": "timestamp[us]",
    "void": "",
}
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")


def delta_snapshot(root: Path, version: int | None, where: str) -> TableSnapshot:
    """Return the snapshot of a version; None: the newest one. `root`: local folder of the table, or a copy of its log
    and deletion vectors; `where`: its address, for errors. Raises DatasetError, SnapshotExpiredError."""
    table = _opened(root, version, where)
    protocol, metadata = table.protocol(), table.metadata()
    refused = sorted(set(protocol.reader_features or ()) - _READ)
    if refused or protocol.min_reader_version > 3:
        what = f"the feature {', '.join(refused)}" if refused else f"readers of version {protocol.min_reader_version}"
        raise DatasetError(f"{where}: the Delta Lake table needs {what}, which Penstock does not read")
    mode = metadata.configuration.get("delta.columnMapping.mode", "none")
    root = root.resolve()
    read = [_column(each, mode, where) for each in json.loads(table.schema().to_json())["fields"]]
    columns = tuple(  # a partition's value is that of the log, also if the file has one
        replace(each, stored=(), number=None) if each.name in metadata.partition_columns else each for each in read
    )
    return TableSnapshot("Delta Lake", table.version(), columns, _files(table, root, metadata.partition_columns, where))


def _opened(root: Path, version: int | None, where: str) -> Any:
    try:
        library = importlib.import_module("deltalake")
    except ImportError as error:
        raise DatasetError(
            f"{where} is a Delta Lake table, which needs the package deltalake. Run pip install 'penstock[delta]'"
        ) from error
    try:
        newest = library.DeltaTable(os.fspath(root))
        if version is None or version == newest.version():
            return newest
        if version > newest.version():
            raise DatasetError(
                f"{where}: snapshot must be at most the newest version {newest.version()}, got {version}"
            )
        return library.DeltaTable(os.fspath(root), version=version)
    except DatasetError:
        raise
    except Exception as error:  # the package's errors have no common base
        if version is None:
            raise DatasetError(f"{where}: the log of the Delta Lake table cannot be read: {error}") from error
        raise SnapshotExpiredError(
            f"{where}: version {version} of the Delta Lake table can no longer be read from its log: {error}. Index "
            "another snapshot"
        ) from error


def _files(table: Any, root: Path, partitions: list[str], where: str) -> list[TableFile]:
    arrow = importlib.import_module("pyarrow")
    has_vectors = "deletionVectors" in (table.protocol().reader_features or ())
    deleted = _deleted(table, root, where) if has_vectors else {}
    actions = arrow.table(table.get_add_actions(flatten=False))
    found = []
    for action in actions.select([name for name in _LISTED if name in actions.column_names]).to_pylist():
        name = _relative(action["path"], root)
        if name is None:
            raise DatasetError(
                f"{where}: the Delta Lake table has a file in another folder ({action['path']}), as shallow clones "
                "have, which Penstock does not read"
            )
        values = action.get("partition") or {}
        constants = {column: text_of_value(values.get(column)) for column in partitions}
        listed = action["modification_time"] or 0, name
        found.append((listed, TableFile(name, deleted.pop(name, None), constants)))
    assert not deleted, f"deletion vectors of unknown files: {list(deleted)[:3]}"
    return [file for _, file in sorted(found, key=lambda each: each[0])]  # what is appended comes last


_LISTED = ("path", "modification_time", "partition")


def _deleted(table: Any, root: Path, where: str) -> dict[str, Ints]:
    """Return the deleted rows of each file with a deletion vector."""
    found: dict[str, Ints] = {}
    try:
        batches = list(table.deletion_vectors())
    except Exception as error:  # a damaged or missing vector, or another feature beside vectors that it does not read
        raise DatasetError(
            f"{where}: the deletion vectors of the Delta Lake table cannot be read by deltalake: {error}"
        ) from error
    for batch in map(importlib.import_module("pyarrow").record_batch, batches):
        for path, kept in zip(batch["filepath"].to_pylist(), batch["selection_vector"], strict=True):
            name = _relative(path, root)
            found[name or path] = np.flatnonzero(~kept.values.to_numpy(zero_copy_only=False))
    return found


def _relative(path: str, root: Path) -> str | None:
    """Return a file's path relative to the table; None if it lies elsewhere. In a log, paths are quoted as URLs."""
    parts = urlsplit(path)
    plain = unquote(parts.path if parts.scheme else path)
    if parts.scheme in ("", "file") and plain.startswith("/"):
        try:
            return Path(plain).relative_to(root).as_posix()
        except ValueError:
            return None
    return None if parts.scheme else plain


def _column(field: dict[str, Any], mode: str, where: str) -> Column:
    about = field.get("metadata", {})
    name = field["name"]
    stored = (name if mode == "none" else about["delta.columnMapping.physicalName"],)
    number = about["delta.columnMapping.id"] if mode == "id" else None
    return Column(name, _type(field["type"], mode, f"{where}: column {name!r}"), stored, number)


def _type(kind: Any, mode: str, where: str) -> ColumnType:
    if isinstance(kind, str):
        if match := _DECIMAL.fullmatch(kind):
            return f"decimal128({match[1]}, {match[2]})"
        if kind in _TYPES:
            return _TYPES[kind]
    elif kind["type"] == "struct":
        return tuple(_column(field, mode, where) for field in kind["fields"])
    elif kind["type"] == "array":
        return ListOf(_type(kind["elementType"], mode, where))
    elif kind["type"] == "map":
        return MapOf(_type(kind["keyType"], mode, where), _type(kind["valueType"], mode, where))
    raise DatasetError(f"{where} has Delta Lake's type {kind!r}, which Penstock does not read")
