"""File of records (bytes of one sample each), whose offsets a second file has (offset_file.py). The reader of a part
(file_ranges.py) has the offsets of the whole file, and the bytes of its own records."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.data.formats.contents import CHANGED, pieces_digest
from penstock.data.formats.file_ranges import with_spans
from penstock.data.formats.raw_files import SampleFile, open_file
from penstock.data.formats.records.offset_file import (
    ENDING,
    FOLDER,
    NO_FINGERPRINT,
    read_offsets,
    write_offsets,
)
from penstock.data.formats.shards import DEFAULT_OPTIONS, ReadOptions, Shard, ShardFile, StoredFile
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import DatasetError, ShardCorruptError


@dataclass(frozen=True, slots=True)
class RecordPart:
    """Part of a file of records that the cache stores as a file of its own."""

    offsets: memoryview
    """Offsets in the whole file of the part's records, then of the end of the last one, in bytes."""
    first: int
    """Number of the part's first record, counted in the whole file."""


class RecordFile(SampleFile):
    """Base class of readers. A subclass decodes the bytes of a record."""

    def __init__(
        self, shard: Shard, data: Path, offsets: Path | RecordPart, options: ReadOptions = DEFAULT_OPTIONS
    ) -> None:
        """`offsets`: path of the file of offsets, or the part that `data` is. Raises ShardCorruptError if the files
        differ from the index or from each other."""
        stored = shard.files[0].raw
        super().__init__(data, stored)
        self.options = options
        self.is_part = isinstance(offsets, RecordPart)
        if isinstance(offsets, RecordPart):
            self._offsets, self._first, self._begin = offsets.offsets, offsets.first, offsets.offsets[0]
            return
        assert self._file is not None
        self._offsets, expected = read_offsets(offsets, shard.files[1].raw, stored.size, shard.samples)
        if expected not in (NO_FINGERPRINT, pieces_digest(self._file, stored.size)):
            raise ShardCorruptError(f"{data} must be the file that was indexed, got another one. {CHANGED}")


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
    beside = offsets_name(name)
    path = out / beside
    stamp = NO_FINGERPRINT
    if data is not None:
        file, _ = open_file(data, name)
        stamp = pieces_digest(file, size)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = write_offsets(path, size, stamp, offsets)
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be written: {error}. Give index_folder a folder `out` that you may write to"
        ) from error
    files = ShardFile(StoredFile(name, size)), ShardFile(StoredFile(beside, written))
    return with_spans(Shard(format, len(offsets) - 1, files, settings=dict(settings or {})), offsets)


def offsets_name(name: str) -> str:
    """Return the name of the file of offsets of the file `name`. Other libraries that read the folder leave out what
    lies in FOLDER."""
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}{FOLDER}/{file}{ENDING}"


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
