"""Bytes of samples in a raw (not compressed) shard file, found by a table of offsets in it or in the shard's other
file.

The file is read with pread and not mapped: a mapped file that is truncated kills its reader without a message (SIGBUS);
pread returns too few bytes, which becomes a named error. A sample of 1 KiB takes 0.8 us longer. A file can be read
after its removal from a cache, after a fork, and while another thread closes the reader (see Descriptor).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import numpy as np

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.shards import StoredFile
from penstock.proto.errors import ShardCorruptError

__all__ = ["SampleFile", "check_samples", "open_file", "read_checked", "unreadable"]


class SampleFile:
    """Base class of readers: sample i is stored in the bytes from offsets[i] to offsets[i + 1]."""

    def __init__(self, path: Path, stored: StoredFile) -> None:
        """A subclass then calls `_set_offsets` with the table of offsets."""
        self.name = stored.name
        self._count = 0
        self._offsets = memoryview(b"").cast("I")
        self._file: Descriptor | None
        """None once the reader is closed."""
        self._file, self._size = open_file(path, stored.name, stored.size)

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """Drop the reference to the file. Reads in progress end normally; the last of them closes it."""
        self._file = None

    def _set_offsets(self, table: bytes, samples: int, begin: int) -> None:
        """Check and set the table of offsets, [count: 4] [offset: 4] * (count + 1), at the start of `table`. `samples`:
        expected count; `begin`: smallest allowed offset."""
        count = int.from_bytes(table[:4], "little")
        if len(table) < 4 or count != samples:
            self._corrupt(
                f"the table of offsets must say {samples} samples, as the dataset's index lists, got {count}. Write "
                "the dataset again"
            )
        end = 4 + 4 * (count + 1)
        if len(table) < end:
            self._corrupt(f"the table of offsets of the {count} samples is cut off. Write the dataset again")
        offsets = np.frombuffer(table, np.uint32, count + 1, 4)
        wrong = np.flatnonzero(offsets[1:] < offsets[:-1])
        if wrong.size:
            self._corrupt(f"sample {wrong[0]} must not end before it begins. Write the dataset again")
        if offsets[0] < begin or offsets[-1] != self._size:
            self._corrupt(
                f"the samples must lie in bytes {begin} to {self._size}, got offsets {offsets[0]} to {offsets[-1]}. "
                "Write the dataset again"
            )
        self._offsets = memoryview(table)[4:end].cast("I")
        self._count = count

    def _bytes_of(self, index: int) -> bytes:
        """Raises IndexError for a number that does not exist, ShardCorruptError for a truncated file."""
        if not 0 <= index < self._count:
            raise IndexError(f"{self.name}: a sample's number must be at least 0 and below {self._count}, got {index}")
        begin = self._offsets[index]
        size = self._offsets[index + 1] - begin
        data = self._read(size, begin)
        if len(data) != size:
            self._corrupt(
                f"sample {index} is truncated: {len(data)} of {size} bytes are left. Do not change the file while "
                "it is read"
            )
        return data

    def _read(self, size: int, begin: int) -> bytes:
        file = self._file
        if file is None:
            raise ValueError(f"{self.name} is closed: open the dataset again to read from it")
        try:
            return file.read(size, begin)
        except OSError as error:
            raise unreadable(self.name, error) from error

    def _corrupt(self, why: str) -> NoReturn:
        raise ShardCorruptError(f"{self.name}: {why}")

    def _undecodable(self, index: int, column: str, error: Exception) -> NoReturn:
        where = f"sample {index}, column {column!r}" if column else f"sample {index}"
        why = f"the stored bytes must be a valid value: {type(error).__name__}: {error}. Write the dataset again"
        raise ShardCorruptError(f"{self.name}: {where}: {why}") from error


def unreadable(name: str, error: OSError) -> ShardCorruptError:
    return ShardCorruptError(
        f"{name} cannot be read: {error}. Check the disk or the network file system that has the file"
    )


def open_file(path: Path, name: str, size: int | None = None) -> tuple[Descriptor, int]:
    """Return an open file and its size in bytes. Raises ShardCorruptError if it cannot be opened or has not `size`."""
    try:
        file = Descriptor(path)
        actual = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ShardCorruptError(
            f"{name}: {path} cannot be read: {error}. Check that the file exists and that this user may read it"
        ) from error
    if size not in (None, actual):
        raise ShardCorruptError(
            f"{name}: {path} must have {size} bytes, as the dataset's index lists, got {actual}. Fetch the file again, "
            "or index the folder again"
        )
    return file, actual


def check_samples(name: str, what: str, samples: int, expected: int) -> None:
    """`what`: what the format calls samples, for the error."""
    if samples != expected:
        raise ShardCorruptError(
            f"{name} must have {expected} {what}, as the dataset's index lists, got {samples}. Index the folder again "
            "with index_folder"
        )


def read_checked(path: Path, stored: StoredFile) -> bytes:
    """Raises ShardCorruptError if a small file cannot be read, or its size differs from the index."""
    file, size = open_file(path, stored.name, stored.size)
    try:
        return file.read(size, 0)
    except OSError as error:
        raise unreadable(stored.name, error) from error
