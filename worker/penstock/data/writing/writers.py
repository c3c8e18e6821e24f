"""Writers of datasets that mosaicml-streaming 0.13.0 reads.

Shards go to the disk as they fill up; the index comes last, whole, and only if all went well. A folder without an index
is no dataset, so a write that was interrupted, by an error too, is never read as if it were complete.

For the same samples and settings the files are those of mosaicml-streaming's own writer, byte for byte, but for two
things: gzip files hold no time, and where its writer puts an empty shard before a first sample that is larger than the
limit, ours puts none.

To another place shards are sent as they fill up, and the index behind all of them (storage/uploads.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import numpy as np

from penstock.data.arguments import at_least_one, byte_count
from penstock.data.cache.file_hashes import digest_of
from penstock.data.formats.compressed_files import extension_of, pack
from penstock.data.formats.encodings import encoding_of
from penstock.data.formats.index import FORMATS, INDEX, MOST_BYTES, write_index
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.uploads import Uploads, local_folder, writable_place
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.plain_files import open_plain

__all__ = ["MDSWriter", "Out", "Writer", "WriterSettings"]

SIZE_LIMIT = 64 << 20
"""Bytes of a raw shard."""
_SHARD_FILE = re.compile(r"shard\.\d{5,}\..*")


class WriterSettings(TypedDict, total=False):
    """Keywords of every writer."""

    compression: str | None
    """Of the shards: "zstd", "gz:6" and so on."""
    hashes: Collection[str]
    """Algorithms of penstock.data.cache.file_hashes; the index has the digests of raw and packed files."""
    size_limit: int | str | None
    """Bytes of a raw shard, also as "64mb"; None puts all into one."""
    exist_ok: bool
    """Replace a dataset that is already there."""
    keep_local: bool
    """Of a dataset that is written to another place: keep it on this machine too."""
    storage_options: Mapping[str, Any] | None
    """Of that place, for fsspec: keys, endpoint."""
    upload_threads: int
    """Files that are sent there at a time."""
    timeout_s: float
    """Seconds until a file is there; failures that may pass are tried again till then."""


Out = str | os.PathLike[str] | tuple[str | os.PathLike[str], str]
"""Where to write: a folder of this machine; a URL that fsspec knows; or both."""


class Writer(ABC):
    """A context manager: `write` samples, and leave it to have an index."""

    format: str

    def __init__(
        self,
        out: Out,
        columns: Mapping[str, str],
        *,
        compression: str | None = None,
        hashes: Collection[str] = (),
        size_limit: int | str | None = SIZE_LIMIT,
        exist_ok: bool = False,
        keep_local: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        upload_threads: int = 4,
        timeout_s: float = 600.0,
    ) -> None:
        self.out, place = _destination(out, storage_options)
        """Where the files are written; they may be sent on from there."""
        self.name = str(self.out) if place is None else place.url
        """For messages."""
        self.compression = compression or None
        self.hashes = sorted(set(hashes))
        self.size_limit = _size_limit(self.name, size_limit)
        self.columns = dict(columns)
        for name in self.columns:
            if not isinstance(name, str):
                raise DatasetError(f"{self.name}: column {name!r} must have a string as its name")
        if self.compression:
            pack(b"", self.compression)  # known, and its package is there
        for algorithm in self.hashes:
            digest_of(b"", algorithm)
        self._shards: list[Shard] = []
        self._samples: list[bytes] = []
        self._written = 0
        self._ended = False
        # What a shard has besides its samples, and each sample besides its bytes, as the limit counts them.
        self._shard_bytes = self._sample_bytes = self._bytes = 0
        self._most = MOST_BYTES
        self._keeps, self._temporary = keep_local, place is not None and not isinstance(out, tuple | list)
        if keep_local and (place is None or self._temporary):
            raise InvalidArgumentError("keep_local=True needs out=(folder of this machine, remote): where to keep it")
        threads = at_least_one("upload_threads", upload_threads)
        self._open_folder(exist_ok)
        self._uploads: Uploads | None = None
        if place is not None:
            self._uploads = Uploads(place, keep_local=keep_local, threads=threads, timeout_s=timeout_s)
            try:
                self._uploads.clear(_SHARD_FILE.fullmatch, exist_ok=exist_ok)
            except BaseException:
                self._tidy()
                raise

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample. DatasetError names it and the column if it does not fit; it is then not written at all."""
        if self._ended:
            raise DatasetError(f"{self.name}: the writer has been closed")
        data = self._encode(sample)
        size = len(data) + self._sample_bytes
        if self._samples and self.size_limit is not None and self.size_limit < self._bytes + size:
            self._flush()
        if not self._samples:
            self._bytes = self._shard_bytes
        if self._bytes + size > self._most:
            raise DatasetError(
                f"{self.name}: sample {self._written}: its shard would have more than {MOST_BYTES} bytes, which its "
                "offsets cannot reach; give a size_limit, or cut the sample"
            )
        self._samples.append(data)
        self._bytes += size
        self._written += 1

    def close(self) -> list[Shard]:
        """Write what is left, and the index. Returns what the index lists; leaving the context does the same."""
        if not self._ended:
            if self._samples:
                self._flush()
            self._ended = True
            index = write_index(self._shards)
            if self._uploads is not None:
                self._uploads.finish(index)
            if self._uploads is None or self._keeps:
                write_whole(self.out / INDEX, index)
            self._tidy()
        return self._shards

    def _tidy(self) -> None:
        if self._uploads is None:
            return
        self._uploads.close()
        if self._temporary:
            shutil.rmtree(self.out, ignore_errors=True)
        elif not self._keeps:
            with contextlib.suppress(OSError):  # something else lies there
                self.out.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.close()
        finally:
            self._ended = True
            self._tidy()

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """What the index says of each shard for its reader."""

    @abstractmethod
    def _encode_column(self, name: str, value: Any) -> Any:
        """A value as it is stored. Raises what it likes for a value that does not fit."""

    @abstractmethod
    def _joined(self, values: dict[str, Any]) -> bytes:
        """A sample of encoded values."""

    @abstractmethod
    def _files(self, offsets: np.ndarray[Any, Any], body: bytes) -> list[bytes]:
        """The raw files of a shard: of its samples one after the other, and where each begins among them."""

    def _encode(self, sample: Mapping[str, Any]) -> bytes:
        values = {}
        name = ""
        try:
            for name in self.columns:
                values[name] = self._encode_column(name, sample[name])
        except DatasetError:
            raise
        except Exception as error:
            where = f"{self.name}: sample {self._written}, column {name!r}"
            if name not in sample:
                there = ", ".join(map(repr, sample))
                raise DatasetError(f"{where}: is missing; the sample has {there}") from None
            raise DatasetError(f"{where}, {self.columns[name]!r}: {type(error).__name__}: {error}") from error
        if len(sample) != len(values):
            extra = ", ".join(repr(name) for name in sample if name not in values)
            raise DatasetError(f"{self.name}: sample {self._written}: {extra} are no columns of this dataset")
        return self._joined(values)

    def _config(self) -> dict[str, Any]:
        """What a shard says of itself; its readers do not read it."""
        return {
            "version": 2,
            "format": self.format,
            "compression": self.compression,
            "hashes": self.hashes,
            "size_limit": self.size_limit,
            **self._settings(),
        }

    def _flush(self) -> None:
        offsets = np.cumsum([0, *map(len, self._samples)], dtype=np.uint64).astype(np.uint32)
        files = []
        for part, data in zip(FORMATS[self.format], self._files(offsets, b"".join(self._samples)), strict=True):
            name = f"shard.{len(self._shards):05}.{self.format}" + (".meta" if part == "meta" else "")
            raw, packed, content = self._stored(name, data), None, data
            if self.compression:
                content = pack(data, self.compression)
                packed = self._stored(f"{name}.{extension_of(self.compression)}", content)
            path = self.out / (packed or raw).name
            with open(path, "wb", opener=open_plain) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if self._uploads is not None:
                self._uploads.send(path)
            files.append(ShardFile(raw, packed))
        settings = {"size_limit": self.size_limit, **self._settings()}
        self._shards.append(
            Shard(self.format, len(self._samples), tuple(files), self.compression or "", settings),
        )
        self._samples = []

    def _stored(self, name: str, data: bytes) -> StoredFile:
        return StoredFile(name, len(data), {algorithm: digest_of(data, algorithm) for algorithm in self.hashes})

    def _open_folder(self, exist_ok: bool) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if not any(self.out.iterdir()):
            return
        if not exist_ok:
            raise DatasetError(
                f"{self.name} is not empty; exist_ok=True replaces the dataset in it and leaves other files alone"
            )
        # The index first: what it lists goes next.
        (self.out / INDEX).unlink(missing_ok=True)
        for path in self.out.iterdir():
            if _SHARD_FILE.fullmatch(path.name) and path.is_file():
                path.unlink()


def _destination(out: Any, storage_options: Mapping[str, Any] | None) -> tuple[Path, RemoteFolder | None]:
    """(folder of this machine, place to which the files are sent from there)."""
    if isinstance(out, tuple | list):
        if len(out) != 2:
            raise InvalidArgumentError(f"out={out!r} must be (folder of this machine, remote), got {len(out)} values")
        return local_folder("out", out[0]), writable_place(os.fspath(out[1]), storage_options)
    if not isinstance(out, str) or "://" not in out:
        return local_folder("out", out), None
    place = writable_place(out, storage_options)
    if place.local is not None:
        return place.local, None
    return Path(tempfile.gettempdir(), f"penstock-write-{os.getpid()}-{os.urandom(4).hex()}"), place


def _size_limit(out: str, value: int | str | None) -> int | None:
    try:
        limit = byte_count("size_limit", value)
    except InvalidArgumentError as error:
        raise DatasetError(f"{out}: {error.message}") from None
    if limit is not None and limit > MOST_BYTES:
        raise DatasetError(f"{out}: size_limit={value!r} must be at most {MOST_BYTES} bytes, or None")
    return limit


class MDSWriter(Writer):
    """Samples of any columns: column -> encoding, see encodings.py. A value that is bytes already
    is taken as the encoded one, whatever the encoding."""

    format = "mds"

    def __init__(
        self,
        out: Out,
        columns: Mapping[str, str],
        **settings: Unpack[WriterSettings],
    ) -> None:
        self._encodings = {}
        for name in sorted(columns, key=str):
            try:
                # Writing a pickle runs nothing; reading it does, and its reader must say so.
                self._encodings[name] = encoding_of(columns[name], allow_unsafe_types=True)
            except DatasetError as error:
                raise DatasetError(f"{out}: column {name!r}: {error.message}") from None
        ordered = {name: columns[name] for name in self._encodings}
        super().__init__(out, ordered, **settings)
        self._varying = [name for name, encoding in self._encodings.items() if encoding.size is None]
        self._head = struct.Struct(f"={len(self._varying)}I")
        self._text = json.dumps(self._config(), sort_keys=True).encode()
        self._shard_bytes, self._sample_bytes = 8 + len(self._text), 4

    def _settings(self) -> dict[str, Any]:
        return {
            "column_names": list(self.columns),
            "column_encodings": list(self.columns.values()),
            "column_sizes": [encoding.size for encoding in self._encodings.values()],
        }

    def _encode_column(self, name: str, value: Any) -> bytes:
        encoding = self._encodings[name]
        data = value if isinstance(value, bytes) else encoding.encode(value)
        if encoding.size is not None and len(data) != encoding.size:
            raise ValueError(f"{len(data)} bytes, where all values have {encoding.size}")
        return data

    def _joined(self, values: dict[str, bytes]) -> bytes:
        sizes = [len(values[name]) for name in self._varying]
        return b"".join([self._head.pack(*sizes), *values.values()])

    def _files(self, offsets: np.ndarray[Any, Any], body: bytes) -> list[bytes]:
        begin = 4 + offsets.nbytes + len(self._text)
        head = np.uint32(len(self._samples)).tobytes() + (offsets + np.uint32(begin)).tobytes()
        return [head + self._text + body]
