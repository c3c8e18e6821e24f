"""Commits of deletes to Iceberg tables, by the specification: pyiceberg 0.12 writes none of these.

https://iceberg.apache.org/spec/ and https://iceberg.apache.org/puffin-spec/
"""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet
from pyiceberg.avro.file import AvroOutputFile
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.table import StaticTable, Table
from pyroaring import BitMap64

PATH_FIELD, POSITION_FIELD = 2147483546, 2147483545
"""Numbers of the columns of position deletes."""


class _DeleteManifest(ManifestWriterV2):
    def __init__(self, *args: Any, version: int) -> None:
        super().__init__(*args)
        self._own = version

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def version(self) -> Any:
        return self._own

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}

    def new_writer(self) -> Any:
        schema = self._with_partition(self.version)
        return AvroOutputFile[ManifestEntry](
            self._output_file, schema, "manifest_entry", record_schema=schema, metadata=self._meta
        )


class DeleteCommit:
    """A commit that adds deletes to the present snapshot of a table below a local folder."""

    def __init__(self, folder: Path, version: Literal[2, 3] = 2) -> None:
        """`version`: of the table's format; 3 has deletion vectors in place of new position deletes."""
        self._folder = folder
        self._version: Literal[2, 3] = version
        self.newest = max(folder.glob("metadata/*.metadata.json"))
        self.table: Table = StaticTable.from_metadata(str(self.newest))
        self._files: list[DataFile] = []

    def data_files(self) -> list[DataFile]:
        snapshot = self.table.current_snapshot()
        assert snapshot is not None
        return [
            entry.data_file
            for manifest in snapshot.manifests(self.table.io)
            if manifest.content == ManifestContent.DATA
            for entry in manifest.fetch_manifest_entry(self.table.io)
        ]

    def positions(self, deleted: Mapping[str, Sequence[int]]) -> None:
        """Add a file of position deletes for each data file."""
        for file in self.data_files():
            rows = sorted(deleted.get(file.file_path, ()))
            if rows:
                columns = {"file_path": [file.file_path] * len(rows), "pos": rows}
                path = self._parquet(columns, {"file_path": PATH_FIELD, "pos": POSITION_FIELD})
                self._add(path, len(rows), file, DataFileContent.POSITION_DELETES)

    def equal(self, columns: Mapping[str, Any], like: DataFile) -> None:
        """Add a file of equality deletes, rows by name of a column, in the partition of the data file `like`."""
        schema = self.table.schema()
        numbers = {name: schema.find_field(name).field_id for name in columns}
        path = self._parquet(dict(columns), numbers)
        count = len(next(iter(columns.values())))
        self._add(path, count, like, DataFileContent.EQUALITY_DELETES, equality_ids=list(numbers.values()))

    def vectors(self, deleted: Mapping[str, Sequence[int]]) -> None:
        """Add one Puffin file with a deletion vector for each data file, after a vector that no manifest names."""
        files = {file.file_path: file for file in self.data_files() if deleted.get(file.file_path)}
        body, blobs = b"PFA1", list[dict[str, Any]]()
        for path, rows in [*((path, range(1)) for path in files), *((path, deleted[path]) for path in files)]:
            vector = struct.pack("<I", 1681511377) + BitMap64(rows).serialize()
            blob = struct.pack(">I", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector))
            about = {"type": "deletion-vector-v1", "fields": [], "snapshot-id": -1, "sequence-number": -1}
            named = {"referenced-data-file": path, "cardinality": str(len(rows))}
            blobs.append({**about, "offset": len(body), "length": len(blob), "properties": named})
            body += blob
        payload = json.dumps({"blobs": blobs}).encode()
        footer = b"PFA1" + payload + struct.pack("<i", len(payload)) + bytes(4) + b"PFA1"
        puffin = self._folder / "data" / f"{uuid.uuid4()}.puffin"
        puffin.write_bytes(body + footer)
        for own, (path, file) in zip(blobs[len(files) :], files.items(), strict=True):
            place = {"content_offset": own["offset"], "content_size_in_bytes": own["length"]}
            more = {"referenced_data_file": path, "file_format": FileFormat.PUFFIN, **place}
            self._add(puffin, len(deleted[path]), file, DataFileContent.POSITION_DELETES, **more)

    def commit(self) -> int:
        """Write manifest, list of manifests and metadata; return the snapshot's ID."""
        metadata: Any = self.table.metadata
        before = self.table.current_snapshot()
        assert before is not None
        number, sequence = uuid.uuid4().int >> 66, metadata.last_sequence_number + 1
        manifests = list(before.manifests(self.table.io))
        for spec_id in {file.spec_id for file in self._files}:
            output = self.table.io.new_output(str(self._folder / "metadata" / f"{uuid.uuid4()}-m0.avro"))
            args = metadata.specs()[spec_id], metadata.schema(), output, number, "null"
            with _DeleteManifest(*args, version=self._version) as writer:
                for file in self._files:
                    if file.spec_id == spec_id:
                        writer.add_entry(
                            ManifestEntry.from_args(
                                status=ManifestEntryStatus.ADDED,
                                snapshot_id=number,
                                sequence_number=None,
                                file_sequence_number=None,
                                data_file=file,
                                _table_format_version=self._version,
                            )
                        )
            manifests.append(writer.to_manifest_file())
        listed = self._folder / "metadata" / f"snap-{number}.avro"
        output = self.table.io.new_output(str(listed))
        with write_manifest_list(2, output, number, before.snapshot_id, sequence, "null") as lists:
            lists.add_manifests(manifests)
        content = json.loads(self.newest.read_text())
        content |= {"format-version": self._version, "last-sequence-number": sequence, "current-snapshot-id": number}
        content["snapshots"].append(
            {
                "snapshot-id": number,
                "parent-snapshot-id": before.snapshot_id,
                "sequence-number": sequence,
                "timestamp-ms": before.timestamp_ms + 1,
                "manifest-list": str(listed),
                "summary": {"operation": "delete"},
                "schema-id": metadata.current_schema_id,
                **({"first-row-id": 0, "added-rows": 0} if self._version == 3 else {}),
            }
        )
        content |= {"next-row-id": 0} if self._version == 3 else {}
        content["refs"] = {"main": {"snapshot-id": number, "type": "branch"}}
        version = int(self.newest.name.split("-")[0]) + 1
        (self._folder / "metadata" / f"{version:05}-{uuid.uuid4()}.metadata.json").write_text(json.dumps(content))
        return number

    def _parquet(self, columns: dict[str, Any], numbers: Mapping[str, int]) -> Path:
        made = pyarrow.table(columns)
        fields = [
            field.with_metadata({"PARQUET:field_id": str(numbers[field.name])}).with_nullable(True)
            for field in made.schema
        ]
        path = self._folder / "data" / f"{uuid.uuid4()}-deletes.parquet"
        pyarrow.parquet.write_table(made.cast(pyarrow.schema(fields)), path)
        return path

    def _add(self, path: Path, count: int, like: DataFile, content: DataFileContent, **more: Any) -> None:
        file = DataFile.from_args(
            **{
                "_table_format_version": self._version,
                "content": content,
                "file_path": str(path),
                "file_format": FileFormat.PARQUET,
                "partition": like.partition,
                "record_count": count,
                "file_size_in_bytes": path.stat().st_size,
                **more,
            }
        )
        file.spec_id = like.spec_id
        self._files.append(file)
