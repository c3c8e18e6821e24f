"""The bytes of samples in a raw shard file, found by its table of offsets.

The file is read with pread and not mapped. A mapped file that somebody cuts short kills the process that reads it,
with no word of why (SIGBUS); pread returns too few bytes, which is an error with a name. It costs 0.8 us more for a
sample of 1 KiB. Values are copies and stay valid; an open file outlives its removal from a cache, and a fork. Who reads
holds the file open (see Descriptor), so that another thread may close the reader at any moment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import numpy as np

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.shards import StoredFile
from penstock.proto.errors import ShardCorruptError
from penstock.runtime.files.plain_files import read_plain

__all__ = ["SampleFile", "read_checked"]


class SampleFile:
    """One file whose sample i is bytes offsets[i] up to offsets[i + 1]: the base of readers that keep to this."""

    def __init__(self, path: Path, stored: StoredFile) -> None:
        """The file, with a size that is checked, and no samples yet: `_set_offsets` adds them."""
        self.name = stored.name
        self._count = 0
        self._offsets = memoryview(b"").cast("I")
        self._file: Descriptor | None = None
        """None once it is closed."""
        try:
            self._file = Descriptor(path)
            self._size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise ShardCorruptError(f"{stored.name}: {path} cannot be read: {error}") from error
        if self._size != stored.size:
            self.close()
            raise ShardCorruptError(f"{stored.name}: {path} has {self._size} bytes; its index says {stored.size}")

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """Threads that are reading end what they are at; the file is closed behind the last of them."""
        self._file = None

    def _set_offsets(self, table: bytes, samples: int, begin: int) -> None:
        """Take [count: 4] [offset: 4] * (count + 1) from the begin of `table`; no sample may begin before `begin`."""
        count = int.from_bytes(table[:4], "little")
        if len(table) < 4 or count != samples:
            self._corrupt(f"it says that it has {count} samples; its index says {samples}")
        end = 4 + 4 * (count + 1)
        if len(table) < end:
            self._corrupt(f"it is cut short in its table of {count} samples")
        offsets = np.frombuffer(table, np.uint32, count + 1, 4)
        wrong = np.flatnonzero(offsets[1:] < offsets[:-1])
        if wrong.size:
            self._corrupt(f"sample {wrong[0]} ends before it begins")
        if offsets[0] < begin or offsets[-1] != self._size:
            self._corrupt(f"its samples lie in bytes {offsets[0]} to {offsets[-1]} of {begin} to {self._size}")
        self._offsets = memoryview(table)[4:end].cast("I")
        self._count = count

    def _bytes_of(self, index: int) -> bytes:
        """Of a sample. Raises IndexError, ShardCorruptError."""
        if not 0 <= index < self._count:
            raise IndexError(f"{self.name}: sample {index} of {self._count}")
        begin = self._offsets[index]
        size = self._offsets[index + 1] - begin
        data = self._read(size, begin)
        if len(data) != size:
            self._corrupt(f"sample {index} is cut short: {len(data)} of {size} bytes are left of it")
        return data

    def _read(self, size: int, begin: int) -> bytes:
        file = self._file
        if file is None:
            raise ValueError(f"{self.name} is closed")
        try:
            return file.read(size, begin)
        except OSError as error:
            raise ShardCorruptError(f"{self.name} cannot be read: {error}") from error

    def _corrupt(self, why: str) -> NoReturn:
        raise ShardCorruptError(f"{self.name}: {why}")

    def _undecodable(self, index: int, column: str, error: Exception) -> NoReturn:
        where = f"sample {index}, column {column!r}" if column else f"sample {index}"
        why = f"its bytes cannot be what they claim: {type(error).__name__}: {error}"
        raise ShardCorruptError(f"{self.name}: {where}: {why}") from error


def read_checked(path: Path, stored: StoredFile) -> bytes:
    """The whole of a small file, if it has the size that its index says."""
    try:
        data = read_plain(path)
    except OSError as error:
        raise ShardCorruptError(f"{stored.name}: {path} cannot be read: {error}") from error
    if len(data) != stored.size:
        raise ShardCorruptError(f"{stored.name}: {path} has {len(data)} bytes; its index says {stored.size}")
    return data
