"""Files of one checkpoint, to be read: in a folder, or in a bucket with a copy of some on the local disk."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar

import torch
import xxhash

from penstock.data.remote.bucket import Bucket
from penstock.proto.errors import CheckpointCorruptError, CheckpointError, DatasetError
from penstock.proto.state.checkpoint_files import CheckpointFile, Manifest, damage
from penstock.runtime.files.plain_files import open_plain

RUN = 16 << 20
"""Most bytes that are read at a time."""


class SourceFile(ABC):
    @abstractmethod
    def copies(self, begin: int, nbytes: int) -> Iterator[torch.Tensor]:
        """Yield a range of the file as a tensor of uint8, of shape [nbytes]: first of the copy that is read fastest,
        which may be damaged, and last of the one that counts. Raises CheckpointCorruptError if that has no such range,
        CheckpointError if it cannot be reached."""

    @abstractmethod
    def close(self) -> None: ...


class Source(ABC):
    least_threads: ClassVar[int]
    """Number of reading threads that the place needs to be read fast."""

    @abstractmethod
    def open(self, file: CheckpointFile) -> SourceFile: ...

    @abstractmethod
    def damage(self, manifest: Manifest, *, contents: bool) -> Iterator[str]:
        """Yield a text for each file that differs from what was written. `contents`: read all; False: only sizes."""

    def read_file(self, file: CheckpointFile) -> bytes:
        """Return a small file. Raises CheckpointCorruptError for another checksum than the manifest's."""
        digest = ""
        with closing(self.open(file)) as opened:
            for data in opened.copies(0, file.nbytes):
                digest = xxhash.xxh3_128_hexdigest(bytes_of(data))
                if digest == file.xxh3 or not file.xxh3:
                    return bytes(bytes_of(data))
        raise CheckpointCorruptError(f"the file {file.name} must have the checksum {file.xxh3}, got {digest}")


def bytes_of(data: torch.Tensor) -> memoryview:
    return memoryview(data.numpy())  # type: ignore[arg-type]


class FolderSource(Source):
    """`folder`: descriptor, so that the files are found also if the folder is renamed."""

    least_threads = 1

    def __init__(self, folder: int) -> None:
        self._folder = folder

    def open(self, file: CheckpointFile) -> SourceFile:
        return _FolderFile(file, self._folder)

    def damage(self, manifest: Manifest, *, contents: bool) -> Iterator[str]:
        return damage(Path(f"/proc/self/fd/{self._folder}"), manifest, contents=contents)


class _FolderFile(SourceFile):
    def __init__(self, file: CheckpointFile, folder: int) -> None:
        self._name = file.name
        try:
            self._handle = open_plain(file.name, folder=folder)
        except OSError as error:
            raise CheckpointCorruptError(f"the file {file.name} cannot be read: {error.strerror}") from error
        if (nbytes := os.fstat(self._handle).st_size) < file.nbytes:  # compared before memory is allocated
            self.close()
            raise CheckpointCorruptError(f"the file {file.name} must have {file.nbytes:,} bytes, got {nbytes:,}")

    def copies(self, begin: int, nbytes: int) -> Iterator[torch.Tensor]:
        yield self.read(begin, nbytes)

    def read(self, begin: int, nbytes: int) -> torch.Tensor:
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        view, done = bytes_of(data), 0
        while done < nbytes:
            try:
                count = os.preadv(self._handle, [view[done:]], begin + done)
            except OSError as error:
                raise CheckpointCorruptError(f"the file {self._name} cannot be read: {error.strerror}") from error
            if not count:
                raise CheckpointCorruptError(
                    f"the file {self._name} must have {begin + nbytes:,} bytes, got {begin + done:,}"
                )
            done += count
        return data

    def close(self) -> None:
        os.close(self._handle)


class BucketSource(Source):
    """`prefix`: folder of the checkpoint in the bucket; `local`: that on the local disk, or None."""

    least_threads = 8

    def __init__(self, bucket: Bucket, prefix: str, local: Path | None, deadline_s: float) -> None:
        self._bucket, self._prefix, self._local, self._deadline_s = bucket, prefix, local, deadline_s

    def open(self, file: CheckpointFile) -> SourceFile:
        local = None
        if self._local is not None:
            with suppress(OSError, CheckpointCorruptError):
                folder = os.open(self._local, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    local = _FolderFile(file, folder)
                finally:
                    os.close(folder)
        return _BucketFile(self._bucket, f"{self._prefix}/{file.name}", local, self._deadline_s)

    def damage(self, manifest: Manifest, *, contents: bool) -> Iterator[str]:
        sizes = self._bucket.listed(f"{self._prefix}/", deadline_s=self._deadline_s)
        for file in manifest.files:
            name = f"{self._prefix}/{file.name}"
            if name not in sizes:
                yield f"{file.name} is missing"
            elif sizes[name] != file.nbytes:
                yield f"{file.name} has {sizes[name]:,} bytes, but {file.nbytes:,} were written"
            elif contents:
                hasher = xxhash.xxh3_128()
                stored = _BucketFile(self._bucket, name, None, self._deadline_s)
                for begin in range(0, file.nbytes, RUN):
                    hasher.update(bytes_of(*stored.copies(begin, min(RUN, file.nbytes - begin))))
                if hasher.hexdigest() != file.xxh3:
                    yield f"{file.name} has checksum {hasher.hexdigest()}, but {file.xxh3} was written"


class _BucketFile(SourceFile):
    def __init__(self, bucket: Bucket, name: str, local: _FolderFile | None, deadline_s: float) -> None:
        self._bucket, self._name, self._local, self._deadline_s = bucket, name, local, deadline_s

    def copies(self, begin: int, nbytes: int) -> Iterator[torch.Tensor]:
        if self._local is not None:
            with suppress(CheckpointCorruptError):
                yield self._local.read(begin, nbytes)
        if not nbytes:
            yield torch.empty(0, dtype=torch.uint8, device="cpu")
            return
        try:
            data = self._bucket.read_range(self._name, begin, begin + nbytes, deadline_s=self._deadline_s)
        except DatasetError as error:
            kind = CheckpointCorruptError if isinstance(error.__cause__, FileNotFoundError) else CheckpointError
            raise kind(error.message) from error.__cause__
        yield torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def close(self) -> None:
        if self._local is not None:
            self._local.close()
