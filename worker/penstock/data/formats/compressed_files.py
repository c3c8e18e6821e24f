"""Compressed files, by mosaicml-streaming's names of compressions: "zstd", "gz:6", "br" and so on. The caller of
`unpack` passes the largest size of the result, because a few packed bytes can expand to gigabytes. The package cramjam
is imported on demand, because most datasets are not compressed."""

from __future__ import annotations

import importlib
import io
import os
import re
import zlib
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError
from penstock.runtime.files.plain_files import open_plain

SEQUENTIAL = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
"""Endings of compressed files that are read in sequence."""
_BEGINS = re.compile(rb"(?P<gzip>\x1f\x8b)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<bzip2>BZh[1-9]1AY&SY)|(?P<xz>\xfd7zXZ\0)")
"""First bytes of compressed files."""
AT_ONCE = 8 << 10
"""Compressed bytes that are decompressed at a time. The smallest blocks of zstd expand to 128 KiB from 4 bytes."""


class FileCompression(NamedTuple):
    family: str
    """Also the extension of compressed files' names."""
    level: int
    """0 for snappy, which has no levels."""


class _Family(NamedTuple):
    module: str
    """Module of cramjam."""
    default: int
    levels: range


COMPRESSIONS = {
    "br": _Family("brotli", 11, range(12)),
    "bz2": _Family("bzip2", 9, range(1, 10)),
    "gz": _Family("gzip", 9, range(10)),
    "snappy": _Family("snappy", 0, range(0)),
    "zstd": _Family("zstd", 3, range(1, 23)),
}


def parse_compression(name: str) -> FileCompression:
    """Raises InvalidArgumentError for an unknown name."""
    family, colon, level = name.partition(":")
    known = COMPRESSIONS.get(family)
    if known is None:
        raise InvalidArgumentError(f"the compression must be one of {', '.join(COMPRESSIONS)} or none, got {name!r}")
    if not colon:
        return FileCompression(family, known.default)
    if not known.levels:
        raise InvalidArgumentError(f"compression {name!r}: {family} has no levels. Use {family!r}")
    if not (level.isascii() and level.isdigit() and len(level) <= 2 and int(level) in known.levels):
        levels = f"{known.levels[0]} to {known.levels[-1]}"
        raise InvalidArgumentError(f"compression {name!r}: the level of {family} must be {levels}, got {level!r}")
    return FileCompression(family, int(level))


def extension_of(compression: str) -> str:
    return parse_compression(compression).family


def pack(data: bytes, compression: str) -> bytes:
    """The same data always give the same bytes: a gzip header contains no time."""
    family, level = parse_compression(compression)
    codec = _codec(family)
    return bytes(codec.compress_raw(data) if family == "snappy" else codec.compress(data, level))


def unpack(data: bytes, compression: str, *, limit: int) -> memoryview:
    """Decompress. Raises ShardCorruptError for more than `limit` bytes, and for damaged data."""
    family = parse_compression(compression).family
    codec = _codec(family)
    decompress_into = codec.decompress_raw_into if family == "snappy" else codec.decompress_into
    try:
        unpacked = np.empty(limit, np.uint8)  # takes memory only for the bytes that are written
        return unpacked.data[: decompress_into(data, unpacked)]
    except (importlib.import_module("cramjam").DecompressionError, MemoryError) as error:
        raise ShardCorruptError(
            f"the {family} data are damaged, or decompress to more than the {limit} bytes that the dataset's index "
            f"lists: {error}. Write the file again, or fetch it again"
        ) from error


def _codec(family: str) -> Any:
    try:
        return getattr(importlib.import_module("cramjam"), COMPRESSIONS[family].module)
    except ImportError as error:
        raise DatasetError(
            f"shards compressed with {family} need the package cramjam. Run pip install 'penstock[streaming]'"
        ) from error


def compression_of(begin: bytes) -> str:
    """Return what compressed a file that begins with these bytes; "" if nothing that is known."""
    found = _BEGINS.match(begin)
    return (found and found.lastgroup) or ""


def check_named(path: Path) -> None:
    """Raise DatasetError for a file that is compressed in another way than its name says; OSError if it cannot be
    read."""
    with open(path, "rb", opener=open_plain) as file:
        found = compression_of(file.read(10))
    if found in ("", SEQUENTIAL.get(path.suffix.lower())):
        return
    ending = {"gzip": ".gz", "zstd": ".zst"}.get(found)
    remedy = f"Give it a name that ends in {ending}" if ending else "Decompress it, or compress it by gzip or zstd"
    raise DatasetError(f"{path} is compressed by {found}, which its name does not say. {remedy}")


class FramesFile(io.RawIOBase):
    """Content of a file, decompressed if its name says so, from the beginning of any *frame* on: a member of gzip, or a
    frame of zstd. A plain file is one frame. Each frame's checksum is compared."""

    def __init__(self, path: Path, frame: int = 0) -> None:
        """`frame`: offset in the file. Raises OSError, DatasetError without the package that decompresses."""
        self._kind, self._path = SEQUENTIAL.get(path.suffix.lower(), ""), path
        self._new = _decompressor(self._kind, path) if self._kind else None
        self._file = open(path, "rb", buffering=0, opener=open_plain)  # noqa: SIM115
        self._file.seek(frame)
        self._codec: Any = None
        self._given, self._ready = b"", memoryview(b"")
        self._made = 0
        self._frames = deque([(0, frame)])
        """(bytes of the content before it, offset in the file) of frames in what was read of late."""

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def place(self, at: int) -> list[int]:
        """Return [frame, bytes of the content after its beginning] of a position, counted from where reading began. It
        must not be before that of an earlier call."""
        while len(self._frames) > 1 and self._frames[1][0] <= at:
            self._frames.popleft()
        before, frame = self._frames[0]
        return [frame, at - before]

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if self._new is None:
            return self._file.readinto(target) or 0
        while not self._ready:
            self._given = self._given or self._file.read(AT_ONCE) or b""
            if not self._given:
                if self._codec is not None:
                    raise ShardCorruptError(f"{self._path} is truncated within a frame. Write or fetch the file again")
                return 0
            begin = self._file.tell() - len(self._given)
            if self._codec is None and not self._begin_frame():
                continue
            try:
                self._ready = memoryview(self._codec.decompress(self._given))
            except Exception as error:  # zlib.error, or that of zstandard
                if "ictionary" in str(error):
                    raise ShardCorruptError(
                        f"{self._path} is compressed with a dictionary, which is not in it. Compress it without one"
                    ) from error
                raise ShardCorruptError(
                    f"{self._path} is damaged after byte {begin}: {error}. Write or fetch the file again"
                ) from error
            self._made += len(self._ready)
            ended = self._codec.eof
            self._given = self._codec.unused_data if ended else b""
            if ended:
                self._codec = None
        size = min(len(target), len(self._ready))
        target[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def _begin_frame(self) -> bool:
        """Return False if there is nothing but padding. A frame of zstd may have no data (pzstd puts sizes in such)."""
        assert self._new is not None
        if self._kind == "gzip":
            self._given = self._given.lstrip(b"\0")  # padding of tapes and block devices
            if not self._given:
                return False
        at = self._file.tell() - len(self._given)
        self._codec = self._new()
        if self._frames[-1] != (self._made, at):
            self._frames.append((self._made, at))
        return True

    def close(self) -> None:
        if hasattr(self, "_file"):  # __init__ may have failed
            self._file.close()
        super().close()


def _decompressor(kind: str, path: Path) -> Any:
    if kind == "gzip":
        return lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        library = importlib.import_module("zstandard")
    except ImportError as error:
        raise DatasetError(f"{path} needs the package zstandard. Run pip install 'penstock[compression]'") from error
    return library.ZstdDecompressor(max_window_size=1 << 31).decompressobj
