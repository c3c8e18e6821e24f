"""Snapshots of Iceberg tables, from their metadata and manifests, by the package pyiceberg: files, columns by number,
position deletes, deletion vectors. Its own reader is not used: it refuses equality deletes, which are compared here.

Metadata name files by the address at which they were written. They are read below the folder that was given, so a copy
of a table elsewhere is read, too."""

from __future__ import annotations

import importlib
import io
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from penstock.data.formats.columnar.values import storage_of
from penstock.data.formats.parquet.footer import footer_length
from penstock.data.formats.parquet.shards import Footer, pyarrow_parquet
from penstock.data.formats.parquet.table_files import Bits, changed, constant_array, text_of_value
from penstock.data.formats.table_marks import FOLDERS, ICEBERG, METADATA
from penstock.data.ordering.permutation import Ints
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.tables.snapshot import (
    Column,
    ColumnType,
    ListOf,
    MapOf,
    TableFile,
    TableSnapshot,
    columns_in,
)
from penstock.proto.errors import (
    DatasetError,
    PenstockError,
    ShardCorruptError,
    ShardUnavailableError,
    SnapshotExpiredError,
)

METADATA_BYTES = 256 << 20
"""Most bytes of a file of metadata, decompressed."""
_VECTOR = (1681511377).to_bytes(4, "little")
"""Magic number of a deletion vector."""
_HINT = "version-hint.text"
_VERSION = re.compile(r"v?(\d+)(?:-.*)?\.(?:gz\.)?metadata\.json(?:\.gz)?")
_TYPES = {
    "boolean": "bool",
    "int": "int32",
    "long": "int64",
    "float": "float",
    "double": "double",
    "date": "date32[day]",
    "time": "time64[us]",
    "timestamp": "timestamp[us]",
    "timestamptz": "timestamp[us, tz=UTC]",
    "timestamp_ns": "timestamp[ns]",
    "timestamptz_ns": "timestamp[ns, tz=UTC]",
    "string": "string",
    "binary": "binary",
    "uuid": "",
    "unknown": "",
}
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")
_FIXED = re.compile(r"fixed\[(\d+)\]")
_EPOCH = datetime(1970, 1, 1)


def iceberg_snapshot(remote: RemoteFolder, names: Sequence[str], number: int | None, timeout_s: float) -> TableSnapshot:
    """Return the snapshot with an ID; None: the present one. `names`: files in the table's folder of metadata, or the
    file of metadata that a user chose. Raises DatasetError, SnapshotExpiredError, ShardUnavailableError."""
    try:
        library = importlib.import_module("pyiceberg.table.metadata")
    except ImportError as error:
        raise DatasetError(
            f"{remote.url} is an Iceberg table, which needs the package pyiceberg. Run pip install 'penstock[iceberg]'"
        ) from error
    name = f"{FOLDERS[ICEBERG]}/{_newest(remote, names, timeout_s)}"
    data = remote.read(name, deadline_s=timeout_s)
    try:
        found = library.TableMetadataUtil.parse_raw(_unpacked(data).decode())
    except Exception as error:  # the package's errors have no common base
        raise DatasetError(f"{remote.url_of(name)} cannot be read by pyiceberg: {error}") from error
    wanted = found.current_snapshot_id if number is None else number
    snapshot = next((each for each in found.snapshots if each.snapshot_id == wanted), None)
    if snapshot is None and number is None:
        raise DatasetError(f"{remote.url}: the Iceberg table has no snapshot yet. Index it once it has rows")
    if snapshot is None:
        raise SnapshotExpiredError(
            f"{remote.url}: snapshot {number} of the Iceberg table is not, or no longer, in {name}. Index another one"
        )
    try:
        return _Table(remote, found, snapshot, timeout_s).snapshot()
    except PenstockError:
        raise
    except Exception as error:
        raise DatasetError(
            f"{remote.url}: snapshot {wanted} of the Iceberg table cannot be read by pyiceberg: {error}"
        ) from error


def _unpacked(data: bytes) -> bytes:
    """Return metadata, which may be compressed by gzip. Raises ValueError above METADATA_BYTES."""
    if data[:2] != b"\x1f\x8b":
        return data
    unpacked = zlib.decompressobj(wbits=31)
    plain = unpacked.decompress(data, METADATA_BYTES)
    if not unpacked.eof:
        raise ValueError(f"it must be complete, and have at most {METADATA_BYTES} bytes")
    return plain


def vector_rows(blob: bytes, rows: int) -> Ints:
    """Return the deleted rows in a deletion vector of Iceberg, ascending. `rows`: number of rows in the data file.
    Raises ValueError.

    https://iceberg.apache.org/puffin-spec/#deletion-vector-v1-blob-type
    """
    size = int.from_bytes(blob[:4], "big")
    vector = blob[4:-4]
    if size != len(vector) or vector[:4] != _VECTOR or zlib.crc32(vector) != int.from_bytes(blob[-4:], "big"):
        raise ValueError("its length, magic number or checksum is wrong")
    try:
        bitmap = importlib.import_module("pyroaring").BitMap64.deserialize(vector[4:])
    except IndexError as error:
        raise ValueError("it ends too early") from error
    if len(bitmap) and bitmap.max() >= rows:  # before it is expanded: a few bytes may stand for 2^32 rows
        raise ValueError(f"it deletes row {bitmap.max()} of {rows} rows")
    return np.array(bitmap, np.int64)


def _newest(remote: RemoteFolder, names: Sequence[str], timeout_s: float) -> str:
    metadata = [name for name in names if METADATA.fullmatch(name)]
    numbers = {name: int(match[1]) for name in metadata if (match := _VERSION.fullmatch(name))}
    newest = max(numbers.values(), default=None)
    if _HINT in names:
        hint = remote.read(f"{FOLDERS[ICEBERG]}/{_HINT}", deadline_s=timeout_s).decode(errors="replace").strip()
        newest = int(hint) if hint.isdecimal() else newest
    found = [name for name, number in numbers.items() if number == newest] if numbers else metadata
    if len(found) != 1:
        raise DatasetError(
            f"{remote.url} must have one newest file of metadata, got {', '.join(sorted(found)) or 'none'}. Give the "
            "address of the file that the table's catalog names, metadata/....metadata.json"
        )
    return found[0]


@dataclass
class _Deletes:
    """Deletes of a snapshot, each with its sequence number."""

    positions: dict[str, list[tuple[int, Any]]] = field(default_factory=lambda: defaultdict(list))
    """Deleted rows of position deletes, by data file."""
    vectors: dict[str, tuple[int, str, int, int]] = field(default_factory=dict)
    """Address, offset and size in bytes of each vector, by data file."""
    equal: list[tuple[int, Any]] = field(default_factory=list)


class _Input:
    """pyiceberg's InputFile of a small file."""

    def __init__(self, table: _Table, location: str) -> None:
        self._table, self.location = table, location

    def open(self, seekable: bool = True) -> io.BytesIO:
        return io.BytesIO(self._table.read(self.location))

    def __len__(self) -> int:
        return len(self._table.read(self.location))


class _Table:
    def __init__(self, remote: RemoteFolder, metadata: Any, snapshot: Any, timeout_s: float) -> None:
        self._remote, self._metadata, self._snapshot, self._timeout_s = remote, metadata, snapshot, timeout_s
        self._kept: dict[str, list[Any]] = {}
        """Columns of files of equality deletes, by address."""
        schemas = {schema.schema_id: schema for schema in metadata.schemas}
        schema = schemas.get(snapshot.schema_id, schemas[metadata.current_schema_id])
        mapping = metadata.name_mapping()
        names = _names(mapping.root if mapping else ())
        self._columns = tuple(_column(each, names, f"{remote.url}: column {each.name!r}") for each in schema.fields)

    def new_input(self, location: str) -> _Input:
        return _Input(self, location)

    def read(self, location: str) -> bytes:
        try:
            return self._remote.read(self._name(location), deadline_s=self._timeout_s)
        except ShardUnavailableError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise SnapshotExpiredError(
                f"{location} is missing, so snapshot {self._snapshot.snapshot_id} of the Iceberg table can no longer "
                "be read: it was expired. Index a newer snapshot"
            ) from error

    def _name(self, location: str) -> str:
        """Return a file's path relative to the table's folder."""
        for root in (self._metadata.location, self._remote.address):
            name = _below(location, root)
            if name:
                return name
        raise DatasetError(
            f"{self._remote.url}: the Iceberg table has a file outside of its folder ({location}), which Penstock does "
            "not read"
        )

    def snapshot(self) -> TableSnapshot:
        manifests = self._snapshot.manifests(self)
        deletes = self._deletes(each for each in manifests if int(each.content))
        data = [entry for each in manifests if not int(each.content) for entry in each.fetch_manifest_entry(self)]
        data.sort(key=lambda entry: (entry.sequence_number or 0, entry.data_file.file_path))  # appended ones last
        files = [self._file(entry, deletes) for entry in data]
        return TableSnapshot("Iceberg", self._snapshot.snapshot_id, self._columns, files)

    def _check(self, file: Any) -> None:
        if file.key_metadata:
            raise DatasetError(f"{file.file_path} is encrypted, which Penstock does not read in Iceberg tables")
        kinds = ("PARQUET", "PUFFIN") if int(file.content) == 1 else ("PARQUET",)
        if file.file_format.name not in kinds:
            raise DatasetError(
                f"{file.file_path} is of format {file.file_format.name}, of which Penstock reads no files of Iceberg "
                "tables. Rewrite the table's files as Parquet"
            )

    def _file(self, entry: Any, deletes: _Deletes) -> TableFile:
        file, number = entry.data_file, entry.sequence_number or 0
        self._check(file)
        deleted = [rows for later, rows in deletes.positions.get(file.file_path, ()) if later >= number]
        vector = deletes.vectors.get(file.file_path)
        if vector and vector[0] >= number:
            deleted.append(self._vector(*vector[1:], file.record_count))
        constants = self._partition(file)
        equal = [each for later, each in deletes.equal if later > number and self._shares_partition(file, each)]
        if equal:
            deleted.append(self._equal_rows(file, equal, constants))
        return TableFile(self._name(file.file_path), np.unique(np.concatenate(deleted)) if deleted else None, constants)

    def _deletes(self, manifests: Iterable[Any]) -> _Deletes:
        found = _Deletes()
        for manifest in manifests:
            for entry, (path, begin, size) in self._delete_entries(manifest):
                file, number = entry.data_file, entry.sequence_number or 0
                self._check(file)
                if int(file.content) == 2:
                    found.equal.append((number, file))
                elif file.file_format.name == "PUFFIN":
                    found.vectors[path] = number, file.file_path, begin, size
                else:
                    for path, rows in self._positions(file.file_path).items():
                        found.positions[path].append((number, rows))
        return found

    def _delete_entries(self, manifest: Any) -> Iterator[tuple[Any, tuple[str, int, int]]]:
        """Yield the live entries of a manifest of deletes, each with the data file, offset and size of its vector,
        which `fetch_manifest_entry` of pyiceberg 0.12 leaves out: a file of vectors has some that are no longer
        valid."""
        library = importlib.import_module("pyiceberg.manifest")
        avro = importlib.import_module("pyiceberg.avro.file")
        fields = [each.name for each in library.DATA_FILE_TYPE[3].fields]
        place = [fields.index(name) for name in ("referenced_data_file", "content_offset", "content_size_in_bytes")]
        types, enums = {-1: library.ManifestEntry, 2: library.DataFile}, {101: library.FileFormat}
        entries = manifest.fetch_manifest_entry(self, discard_deleted=False)
        schema = library.MANIFEST_ENTRY_SCHEMAS[3]
        with avro.AvroFile(self.new_input(manifest.manifest_path), schema, types, enums) as whole:
            for entry, other in zip(entries, whole, strict=True):
                if entry.status != library.ManifestEntryStatus.DELETED:
                    path, begin, size = (other.data_file[field] for field in place)
                    yield entry, (path, begin, size)

    def _vector(self, location: str, begin: int, size: int, rows: int) -> Ints:
        """Return the deleted rows of a vector. `rows`: number of rows in the data file."""
        name, until = self._name(location), self._timeout_s
        try:
            if self._remote.local:
                data = self.read(location)[begin : begin + size]
            else:
                data = self._remote.read_range(name, begin, begin + size, deadline_s=until)
            return vector_rows(data, rows)
        except (ValueError, TypeError, OverflowError) as error:
            raise ShardCorruptError(f"{location}: the deletion vector at {begin} is damaged: {error}") from error

    def _positions(self, location: str) -> dict[str, Any]:
        """Return the deleted rows by data file, of a file of position deletes."""
        read = self._parquet(location).read(["file_path", "pos"])
        paths = read.column("file_path").combine_chunks().dictionary_encode()
        codes, positions = paths.indices.to_numpy(), read.column("pos").to_numpy()
        return {path: positions[codes == code] for code, path in enumerate(paths.dictionary.to_pylist())}

    def _shares_partition(self, file: Any, deletes: Any) -> bool:
        """Return True if equality deletes are of a file's partition, or of all partitions: those of a spec without
        fields, or whose fields are all void, as removed ones stay in tables of version 1."""
        is_global = all(str(each.transform) == "void" for each in self._metadata.specs()[deletes.spec_id].fields)
        return is_global or (file.spec_id == deletes.spec_id and file.partition == deletes.partition)

    def _equal_rows(self, file: Any, deletes: Sequence[Any], constants: Mapping[str, str | None]) -> Ints:
        """Return the rows of a file that equal a row of equality deletes in the columns that these compare."""
        by_columns: dict[tuple[int, ...], list[Any]] = defaultdict(list)
        for each in deletes:
            by_columns[tuple(sorted(each.equality_ids))].append(each)
        known = {column.number: column for column in self._columns}
        deleted = []
        for numbers, files in by_columns.items():
            columns = [known[number] for number in numbers if number in known]
            if len(columns) != len(numbers) or not all(isinstance(column.type, str) for column in columns):
                raise DatasetError(
                    f"{self._remote.url}: the Iceberg table has equality deletes by a column that was dropped, or lies "
                    "within another one, which Penstock does not read"
                )
            own = self._values(file.file_path, columns, constants)
            others = [self._compared(each.file_path, columns) for each in files]
            deleted.append(np.flatnonzero(_equal(own, others)))
        return np.concatenate(deleted)

    def _compared(self, location: str, columns: Sequence[Column]) -> list[Any]:
        """Return the columns of a file of equality deletes, which are kept, because they concern many files."""
        if location not in self._kept:
            self._kept[location] = self._values(location, columns, {})
        return self._kept[location]

    def _values(self, location: str, columns: Sequence[Column], constants: Mapping[str, str | None]) -> list[Any]:
        """Return columns of a file as the table has them."""
        opened = self._parquet(location)
        found = []
        for _, source, *more in columns_in(columns, constants, opened.schema_arrow, location):
            array = None if source is None else opened.read([source]).column(source)
            rows = opened.metadata.num_rows
            found.append(constant_array(rows, *more) if array is None else changed(array, *more))
        return found

    def _parquet(self, location: str) -> Any:
        data = self.read(location)
        try:
            footer = Footer.parse(data[-footer_length(data[-8:], len(data)) :])  # checked before pyarrow reads it
            return pyarrow_parquet().ParquetFile(io.BytesIO(data), metadata=footer.metadata)
        except Exception as error:
            raise ShardCorruptError(f"{location} must be a Parquet file: {error}") from error

    def _partition(self, file: Any) -> dict[str, str | None]:
        """Return values of partitions that are those of a column, by its name, for files that lack the column."""
        spec = self._metadata.specs()[file.spec_id]
        names = {column.number: column for column in self._columns}
        found = {}
        for value, each in zip(file.partition, spec.fields, strict=True) if spec.fields else ():
            column = names.get(each.source_id)
            is_value = str(each.transform) == "identity" and column is not None and isinstance(column.type, str)
            if column is not None and is_value and "[ns" not in str(column.type):
                found[column.name] = _partition_text(value, str(column.type))
        return found


def _equal(own: Sequence[Any], others: Sequence[Sequence[Any]]) -> Bits:
    """Return which rows of the columns `own` equal a row of any of `others`; a null equals a null."""
    arrow = importlib.import_module("pyarrow")
    codes = []
    for number, column in enumerate(own):
        columns = [_plain(each) for each in (column, *(other[number] for other in others))]
        kind = next((each.type for each in columns if not arrow.types.is_null(each.type)), columns[0].type)
        joined = arrow.concat_arrays([chunk.cast(kind) for each in columns for chunk in each.chunks])
        codes.append(joined.dictionary_encode(null_encoding="encode").indices.to_numpy())
    _, rows = np.unique(np.stack(codes), axis=1, return_inverse=True)
    rows, count = rows.reshape(-1), len(own[0])
    return np.isin(rows[:count], rows[count:])


def _plain(column: Any) -> Any:
    arrow = importlib.import_module("pyarrow")
    kind = storage_of(column.type)
    return column.cast(kind.value_type if arrow.types.is_dictionary(kind) else kind)


def _below(location: str, root: str) -> str:
    """Return a file's path relative to the folder `root`; "" if it lies elsewhere."""
    path, folder = _path(location), _path(root).rstrip("/") + "/"
    return path.removeprefix(folder) if path.startswith(folder) else ""


def _path(location: str) -> str:
    """Return an address without its scheme: s3 and s3a are the same."""
    _, mark, rest = location.partition("://")
    if location.startswith("file:"):
        return re.sub("^/*", "/", location.removeprefix("file:"))
    return rest if mark else location


def _names(fields: Sequence[Any]) -> dict[int, tuple[str, ...]]:
    """Return the names of columns in files that have no numbers, by number, from a table's name mapping."""
    found: dict[int, tuple[str, ...]] = {}
    for each in fields:
        found |= {each.field_id: tuple(each.names)} | _names(each.fields)
    return found


def _column(field: Any, names: Mapping[int, tuple[str, ...]], where: str, is_nested: bool = False) -> Column:
    default = None if field.initial_default is None else text_of_value(field.initial_default)
    kind = _type(field.field_type, names, where)
    if default is not None and (is_nested or not isinstance(kind, str) or not kind):
        raise DatasetError(
            f"{where} has a default value that Penstock does not read: of a type without one, or within another column"
        )
    return Column(field.name, kind, names.get(field.field_id, ()), field.field_id, default)


def _type(kind: Any, names: Mapping[int, tuple[str, ...]], where: str) -> ColumnType:
    if hasattr(kind, "fields"):
        return tuple(_column(each, names, f"{where}, {each.name!r}", is_nested=True) for each in kind.fields)
    if hasattr(kind, "element_type"):
        return ListOf(_type(kind.element_type, names, where))
    if hasattr(kind, "key_type"):
        return MapOf(_type(kind.key_type, names, where), _type(kind.value_type, names, where))
    name = str(kind)
    if match := _DECIMAL.fullmatch(name):
        return f"decimal128({match[1]}, {match[2]})"
    if match := _FIXED.fullmatch(name):
        return f"fixed_size_binary[{match[1]}]"
    if name not in _TYPES:
        raise DatasetError(f"{where} has Iceberg's type {name}, which Penstock does not read")
    return _TYPES[name]


def _partition_text(value: Any, kind: str) -> str | None:
    """Return the text of a partition's value, in which times are numbers."""
    if type(value) is int:
        if kind.startswith("date"):
            return (_EPOCH + timedelta(days=value)).date().isoformat()
        if kind.startswith("timestamp"):
            return (_EPOCH + timedelta(microseconds=value)).isoformat() + ("+00:00" if "UTC" in kind else "")
        if kind.startswith("time"):
            return (_EPOCH + timedelta(microseconds=value)).time().isoformat()
    return text_of_value(value)
