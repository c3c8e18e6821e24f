"""Assembly of replies that arrive in parts, with limits on the number of values and the bytes of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from penstock.proto.errors import StateCorruptError, malformed
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

VALUE_MAX = 900_000_000
"""Largest bytes of a snapshot, a blob, or all histories of a box. A coordinator stores no larger ones."""
RECORDS_MAX = 16_384
"""Largest number of records in a received state, one for each worker."""
SNAPSHOTS_MAX = 65_536
"""Largest number of snapshots of a slot: 18 hours of them, if one is taken each second."""
HISTORIES_MAX = 1024
"""Largest number of histories of a box, one for each attempt that is kept: the open one and 16 earlier ones."""

_Header = TypeVar("_Header", pb.SnapshotHeader, pb.WorkerRecord)


def blob_name(data: bytes) -> str:
    """Name of a blob: the SHA-256 of its bytes."""
    return hashlib.sha256(data).hexdigest()


class ValueParts:
    """Receiver of one value in parts. Raises ProtocolError above VALUE_MAX. `write`: called with each part."""

    def __init__(self, what: str, write: Callable[[bytes], Any]) -> None:
        self._what, self._write = what, write
        self._bytes = 0

    def add(self, part: Any) -> None:
        self._bytes += len(part.data)
        if self._bytes > VALUE_MAX:
            raise malformed(f"{self._what} must have at most {VALUE_MAX} bytes, got more")
        self._write(part.data)


class BlobParts(ValueParts):
    def __init__(self, name: str, write: Callable[[bytes], Any]) -> None:
        super().__init__(f"the stored value {name}", write)
        self._name, self._digest = name, hashlib.sha256()

    def add(self, part: pb.BlobPart) -> None:
        super().add(part)
        self._digest.update(part.data)

    def check(self) -> None:
        """Raise StateCorruptError if the received bytes are not the blob's."""
        if self._digest.hexdigest() != self._name:
            raise StateCorruptError(f"{self._what} arrived damaged: its digest differs. Try again")


class Histories:
    def __init__(self) -> None:
        self.all: list[pb.History] = []
        self._bytes = 0

    def add(self, part: pb.HistoryPart) -> None:
        self._bytes += part.ByteSize()
        if len(self.all) >= HISTORIES_MAX or self._bytes > VALUE_MAX:
            raise malformed(f"FetchHistory: a reply must have at most {HISTORIES_MAX} histories, {VALUE_MAX} bytes")
        self.all.append(part.history)


class _Values(Generic[_Header]):
    """Receiver of values, each a header and parts. Raises ProtocolError for other sizes, or more than `most` values."""

    def __init__(self, what: str, most: int, size_of: Callable[[Any], int]) -> None:
        self._what, self._most, self._size_of = what, most, size_of
        self._done: list[tuple[_Header, bytes]] = []
        self._header: _Header | None = None
        self._data: list[bytes] = []
        self._bytes = 0

    def add(self, header: _Header | None, data: bytes) -> None:
        if header is not None:
            self._close()
            if len(self._done) >= self._most:
                raise malformed(f"{self._what}: a reply must have at most {self._most} values, got more")
            if (size := self._size_of(header)) > VALUE_MAX:
                raise malformed(f"{self._what}: a value must have at most {VALUE_MAX} bytes, got {size}")
            self._header = header
        if data:
            if self._header is None:
                raise malformed(f"{self._what}: the coordinator must send a header before data")
            self._bytes += len(data)
            if self._bytes > (size := self._size_of(self._header)):
                raise malformed(f"{self._what}: a value must have the declared {size} bytes, got more")
            self._data.append(data)

    def _close(self) -> None:
        if self._header is None:
            return
        declared = self._size_of(self._header)
        if declared != self._bytes:
            raise malformed(f"{self._what}: a value must have the declared {declared} bytes, got {self._bytes}")
        self._done.append((self._header, b"".join(self._data)))
        self._header, self._data, self._bytes = None, [], 0

    def all(self) -> list[tuple[_Header, bytes]]:
        self._close()
        return self._done


class StateParts:
    """Receiver of a run's state: a record and data for each worker, and a position for each box."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._records: _Values[pb.WorkerRecord] = _Values("FetchState", RECORDS_MAX, lambda record: record.state_bytes)
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
        self._snapshots: _Values[pb.SnapshotHeader] = _Values("GetSnapshots", SNAPSHOTS_MAX, lambda header: header.size)

    def add(self, part: pb.SnapshotPart) -> None:
        self._snapshots.add(part.header if part.HasField("header") else None, part.data)

    def all(self) -> list[tuple[pb.SnapshotHeader, bytes]]:
        return self._snapshots.all()
