"""File of records (bytes of one sample each), whose offsets a second file has (offset_file.py). The reader of a part
(file_ranges.py) has the offsets of the whole file, and the bytes of its own records."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.file_ranges import with_spans
from penstock.data.formats.raw_files import unreadable
from penstock.data.formats.records.offset_file import (
    ENDING,
    NO_FINGERPRINT,
    fingerprint,
    read_offsets,
    write_offsets,
)
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import DatasetError, ShardCorruptError

__all__ = [
    "INDEX_AGAIN",
    "RecordFile",
    "RecordPart",
    "offsets_shard",
    "opened",
    "part_of",
    "read_table",
    "record_shard",
]

INDEX_AGAIN = "Index the folder again with index_folder"
WRITE_AGAIN = "Write the file again, or fetch it again"


@dataclass(frozen=True, slots=True)
class RecordPart:
    """Part of a file of records that the cache stores as a file of its own."""

    offsets: memoryview
    """Offsets in the whole file of the part's records, then of the end of the last one, in bytes."""
    first: int
    """Number of the part's first record, counted in the whole file."""


class RecordFile:
    """Base class of readers. A subclass decodes the bytes of a record."""

    def __init__(self, shard: Shard, data: Path, offsets: Path | RecordPart) -> None:
        """`offsets`: path of the file of offsets, or the part that `data` is. Raises ShardCorruptError if the files
        differ from the index or from each other."""
        stored = shard.files[0].raw
        self.name = stored.name
        self._file: Descriptor | None = None
        file, size = opened(data, self.name)
        if size != stored.size:
            raise ShardCorruptError(
                f"{self.name}: {data} must have {stored.size} bytes, as the dataset's index lists, got {size}. "
                "Fetch the file again, or index the folder again"
            )
        self.is_part = isinstance(offsets, RecordPart)
        self._first = self._begin = 0
        if isinstance(offsets, RecordPart):
            self._offsets, self._first, self._begin = offsets.offsets, offsets.first, offsets.offsets[0]
        else:
            self._offsets, expected = read_offsets(offsets, shard.files[1].raw, size, shard.samples)
            if expected not in (NO_FINGERPRINT, fingerprint(file, size)):
                raise ShardCorruptError(
                    f"{data} must be the file that was indexed, got another one of the same size, {size} "
                    f"bytes. {INDEX_AGAIN}, or fetch the file again"
                )
        self._file = file

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: a sample's number must be at least 0 and below {len(self)}, got {index}")
        return self._decoded(index, self._bytes(self._offsets[index], self._offsets[index + 1]))

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Consecutive samples (at least one) are read in one system call."""
        first, past = rows[0], rows[-1] + 1
        if not (0 <= first < past <= len(self) and list(rows) == list(range(first, past))):
            return [self[row] for row in rows]
        begin = self._offsets[first]
        data = self._bytes(begin, self._offsets[past])
        bounds = [offset - begin for offset in self._offsets[first : past + 1]]
        return [
            self._decoded(first + number, data[start:end])
            for number, (start, end) in enumerate(itertools.pairwise(bounds))
        ]

    def close(self) -> None:
        self._file = None

    def _decoded(self, index: int, record: bytes) -> dict[str, Any]:
        raise NotImplementedError

    def _bytes(self, begin: int, end: int) -> bytes:
        file, size = self._file, end - begin
        if file is None:
            raise ValueError(f"{self.name} is closed: open the dataset again to read from it")
        try:
            data = file.read(size, begin - self._begin)
        except OSError as error:
            raise unreadable(self.name, error) from error
        if len(data) != size:
            raise ShardCorruptError(
                f"{self.name} is truncated: {len(data)} of the {size} bytes from byte {begin} are left. {WRITE_AGAIN}"
            )
        return data

    def _corrupt(self, index: int, why: str, remedy: str = WRITE_AGAIN) -> NoReturn:
        raise ShardCorruptError(f"{self.name}: sample {self._first + index} {why}. {remedy}")


def opened(path: Path, name: str) -> tuple[Descriptor, int]:
    """Return an open file and its size. Raises ShardCorruptError, which begins with `name`."""
    try:
        file = Descriptor(path)
        return file, os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ShardCorruptError(
            f"{name}: {path} cannot be read: {error}. Check that the file exists and that this user may read it"
        ) from error


def record_shard(
    format: str,
    data: Path | None,
    out: Path,
    name: str,
    size: int,
    offsets: Ints,
    settings: Mapping[str, Any] | None = None,
) -> Shard:
    """Write the file of a data file's offsets (`name` with an ending) to the index's folder `out`, and return the
    shard. `data`: for the fingerprint, None if remote; `name`: relative to the dataset's folder; `offsets`: of the
    records, and the end of the last one. Raises DatasetError if the file cannot be written."""
    path = out / (name + ENDING)
    stamp = NO_FINGERPRINT
    if data is not None:
        file, _ = opened(data, name)
        stamp = fingerprint(file, size)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = write_offsets(path, size, stamp, offsets)
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be written: {error}. Give index_folder an argument `out`, a folder that you may write to "
            "and that has space"
        ) from error
    files = ShardFile(StoredFile(name, size)), ShardFile(StoredFile(name + ENDING, written))
    return with_spans(Shard(format, len(offsets) - 1, files, settings=dict(settings or {})), offsets)


def offsets_shard(shard: Shard) -> Shard:
    """Return the file of offsets as a shard without samples (`format_table.PartReading.table`)."""
    return Shard(shard.format, 0, shard.files[1:])


def read_table(shard: Shard, path: Path) -> memoryview:
    offsets, _ = read_offsets(path, shard.files[1].raw, shard.files[0].raw.size, shard.samples)
    firsts = [0, *itertools.accumulate(shard.spans)]
    found = [offsets[at] for pair in itertools.pairwise(firsts) for at in pair]
    if found != list(shard.ranges[:-1]):
        raise ValueError("the offsets must be those in the dataset's index, but differ")
    return offsets


def part_of(shard: Shard, part: int, offsets: memoryview) -> RecordPart:
    """`offsets`: of all records of the file."""
    first = sum(shard.spans[:part])
    return RecordPart(offsets[first : first + shard.spans[part] + 1], first)
