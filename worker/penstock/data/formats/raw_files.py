"""Bytes of samples in a raw (not compressed) shard file, found by a table of offsets in it or in the shard's other
file.

The file is read with pread and not mapped: a mapped file that is truncated kills its reader without a message (SIGBUS);
pread returns too few bytes, which becomes a named error. A sample of 1 KiB takes 0.8 us longer. A file can be read
after its removal from a cache, after a fork, and while another thread closes the reader (see Descriptor).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from penstock.data.formats.contents import CHANGED
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.shards import StoredFile
from penstock.proto.errors import SampleCorruptError, ShardCorruptError

WRITE = "Write the file again, or fetch it again"
CORRECT = "Correct the sample, or go on without it by skip_failures or repair of StreamingDataset"


class SampleFile:
    """Base class of readers: sample i is stored in the bytes from offsets[i] to offsets[i + 1]. A subclass sets
    `_offsets`, and decodes the bytes of a sample."""

    _offsets: memoryview
    _first = _begin = 0
    """Numbers of the first sample and byte of the file in a whole file of which it is a part (file_ranges.py)."""

    def __init__(self, path: Path, stored: StoredFile) -> None:
        self.name = stored.name
        self._file: Descriptor | None
        """None once the reader is closed."""
        self._file, self._size = open_file(path, stored.name, stored.size)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert 0 <= index < len(self), f"{self.name} has {len(self)} samples"
        return self._decoded(index, self._bytes(self._offsets[index], self._offsets[index + 1]))

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Consecutive samples are read in one system call."""
        if not rows or list(rows) != list(range(rows[0], rows[0] + len(rows))):
            return [self[row] for row in rows]
        assert 0 <= rows[0] <= rows[-1] < len(self), f"{self.name} has {len(self)} samples"
        offsets = self._offsets[rows[0] : rows[-1] + 2].tolist()
        data = self._bytes(offsets[0], offsets[-1])
        bounds = itertools.pairwise(offset - offsets[0] for offset in offsets)
        return [self._decoded(row, data[begin:end]) for row, (begin, end) in zip(rows, bounds, strict=True)]

    def close(self) -> None:
        """Drop the reference to the file. Reads in progress end normally; the last of them closes it."""
        self._file = None

    def _decoded(self, index: int, record: bytes) -> dict[str, Any]:
        raise NotImplementedError

    def _set_offsets(self, table: bytes, samples: int, begin: int) -> None:
        """Check and set the table of offsets, [count: 4] [offset: 4] * (count + 1), at the start of `table`. `samples`:
        expected count; `begin`: smallest allowed offset."""
        count = int.from_bytes(table[:4], "little")
        end = 4 + 4 * (count + 1)
        if count != samples or len(table) < end:
            raise ShardCorruptError(
                f"{self.name}: the offsets must be those of {samples} samples, got {count}. {WRITE}"
            )
        offsets = np.frombuffer(table, np.uint32, count + 1, 4)
        wrong = np.flatnonzero(offsets[1:] < offsets[:-1])
        if wrong.size:
            raise ShardCorruptError(f"{self.name}: sample {wrong[0]} must not end before it begins. {WRITE}")
        if offsets[0] < begin or offsets[-1] != self._size:
            raise ShardCorruptError(f"{self.name}: the samples must fill the file. {WRITE}")
        self._offsets = memoryview(table)[4:end].cast("I")

    def _bytes(self, begin: int, end: int) -> bytes:
        file = self._file
        if file is None:
            raise ValueError(f"{self.name} is closed: open the dataset again to read from it")
        try:
            data = file.read(end - begin, begin - self._begin)
        except OSError as error:
            raise unreadable(self.name, error) from error
        if len(data) != end - begin:
            raise truncated(self.name, len(data), end - begin, begin)
        return data

    def _corrupt(self, index: int, why: str, remedy: str = WRITE) -> NoReturn:
        raise ShardCorruptError(f"{self.name}: sample {self._first + index} {why}. {remedy}")

    def _undecodable(self, index: int, why: str | Exception, column: str = "", remedy: str = CORRECT) -> NoReturn:
        """Raise SampleCorruptError: the bytes are those that were written, and no valid sample."""
        where = f"{self.name}: sample {self._first + index}" + (f", column {column!r}" if column else "")
        if isinstance(why, Exception):
            text = f"{where}: the stored bytes must be a valid value: {type(why).__name__}: {why}. {remedy}"
            raise SampleCorruptError(text) from why
        raise SampleCorruptError(f"{where} {why}. {remedy}")


def truncated(name: str, left: int, size: int, begin: int) -> ShardCorruptError:
    return ShardCorruptError(
        f"{name} is truncated: {left} of the {size} bytes from byte {begin} are left. Write the file again"
    )


def unreadable(name: str, error: OSError) -> ShardCorruptError:
    return ShardCorruptError(f"{name} cannot be read: {error}. Check the disk or the network file system")


def open_file(path: Path, name: str, size: int | None = None) -> tuple[Descriptor, int]:
    """Return an open file and its size in bytes. Raises ShardCorruptError if it cannot be opened or has not `size`."""
    try:
        file = Descriptor(path)
        actual = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ShardCorruptError(
            f"{name}: {path} cannot be read: {error}. Check that it exists and that this user may read it"
        ) from error
    if size not in (None, actual):
        raise ShardCorruptError(
            f"{name}: {path} must have {size} bytes, as the dataset's index lists, got {actual}. Fetch the file again"
        )
    return file, actual


def check_uncompressed(file: Descriptor, name: str) -> None:
    """Raise ShardCorruptError for a text that is compressed without a name that says so."""
    begin = file.read(4, 0)
    for magic, ending in ((b"\x1f\x8b", ".gz"), (b"\x28\xb5\x2f\xfd", ".zst")):
        if begin.startswith(magic):
            raise ShardCorruptError(
                f"{name} must be text, and is compressed. Decompress it, or give it a name that ends in {ending}; if "
                "an object store says Content-Encoding of it, the stored bytes are compressed"
            )


def check_samples(name: str, what: str, samples: int, expected: int) -> None:
    """`what`: what the format calls samples, for the error."""
    if samples != expected:
        raise ShardCorruptError(
            f"{name} must have {expected} {what}, as the dataset's index lists, got {samples}. {CHANGED}"
        )


def read_checked(path: Path, stored: StoredFile) -> bytes:
    """Raises ShardCorruptError if a small file cannot be read, or its size differs from the index."""
    file, size = open_file(path, stored.name, stored.size)
    try:
        return file.read(size, 0)
    except OSError as error:
        raise unreadable(stored.name, error) from error
