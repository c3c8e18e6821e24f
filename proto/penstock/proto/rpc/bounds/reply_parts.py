"""Assembly of replies that arrive in parts. Their sizes are checked, and digests where they have one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from penstock.proto.errors import StateCorruptError, malformed
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

VALUE_MAX = 900_000_000
"""Largest bytes of a snapshot, a blob or a state that a coordinator takes."""

_Header = TypeVar("_Header", pb.SnapshotHeader, pb.WorkerRecord)


def blob_name(data: bytes) -> str:
    """Name of a blob: the SHA-256 of its bytes."""
    return hashlib.sha256(data).hexdigest()


class BlobParts:
    """Receiver of a blob. `write`: called with each part."""

    def __init__(self, name: str, write: Callable[[bytes], Any]) -> None:
        self._name, self._write, self._digest = name, write, hashlib.sha256()

    def add(self, part: pb.BlobPart) -> None:
        self._digest.update(part.data)
        self._write(part.data)

    def check(self) -> None:
        """Raise StateCorruptError if the received bytes are not the blob's."""
        if self._digest.hexdigest() != self._name:
            raise StateCorruptError(f"the stored value {self._name} arrived damaged: its digest differs. Try again")


class _Values(Generic[_Header]):
    """Receiver of values, each a header and parts. Raises ProtocolError for other sizes than declared."""

    def __init__(self, what: str, size_of: Callable[[Any], int]) -> None:
        self._what, self._size_of = what, size_of
        self._done: list[tuple[_Header, bytes]] = []
        self._header: _Header | None = None
        self._data: list[bytes] = []

    def add(self, header: _Header | None, data: bytes) -> None:
        if header is not None:
            self._close()
            self._header = header
        if data:
            self._data.append(data)

    def _close(self) -> None:
        data = b"".join(self._data)
        declared = 0 if self._header is None else self._size_of(self._header)
        if len(data) != declared:
            raise malformed(f"{self._what}: a value must have the declared {declared} bytes, got {len(data)}")
        if self._header is not None:
            self._done.append((self._header, data))
        self._header, self._data = None, []

    def all(self) -> list[tuple[_Header, bytes]]:
        self._close()
        return self._done


class StateParts:
    """Receiver of a run's state: a record and data for each worker, and a position for each box."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._records: _Values[pb.WorkerRecord] = _Values("FetchState", lambda record: record.state_bytes)
        self.positions: dict[int, records_pb2.BoxPosition] = {}

    def add(self, part: pb.StatePart) -> None:
        for one in part.parts:
            self.add(one)
        if part.anew:
            self._begin()
        if part.parts or part.anew:
            return
        if part.HasField("record") and part.HasField("position"):
            self.positions[part.record.box] = part.position
        self._records.add(part.record if part.HasField("record") else None, part.data)

    def records(self) -> list[tuple[pb.WorkerRecord, bytes]]:
        return self._records.all()


class SnapshotParts:
    def __init__(self) -> None:
        self._snapshots: _Values[pb.SnapshotHeader] = _Values("GetSnapshots", lambda header: header.size)

    def add(self, part: pb.SnapshotPart) -> None:
        self._snapshots.add(part.header if part.HasField("header") else None, part.data)

    def all(self) -> list[tuple[pb.SnapshotHeader, bytes]]:
        return self._snapshots.all()
