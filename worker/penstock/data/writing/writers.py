"""Writers of datasets in the formats of mosaicml-streaming. Its version 0.13.0 reads them.

Shards are written, and uploaded to a remote (writing/uploads.py), as they fill up; the index is written last, and only
without an error. A folder without an index is not a dataset, so an interrupted write is never read as if complete.

Before compression the files are those of mosaicml-streaming's own writer, byte for byte, but that one writes an empty
shard before a first sample that is larger than the limit.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import numpy as np

from penstock.data.arguments import at_least_one, byte_count, truth
from penstock.data.cache.file_hashes import digest_of
from penstock.data.formats.compressed_files import extension_of, pack
from penstock.data.formats.encodings import encoding_of
from penstock.data.formats.format_table import FORMATS, MAX_BYTES
from penstock.data.formats.index import INDEX, join_indexes, write_index
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.remote.folders import RemoteFolder, joined
from penstock.data.writing.publish import check_columns, check_no_versions, newest_index, publish
from penstock.data.writing.uploads import Uploads, local_folder, not_empty, writable_remote
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.plain_files import open_plain

SIZE_LIMIT = 64 << 20
"""Default of `size_limit`, in bytes."""
_SHARD_FILE = re.compile(r"shard\.\d{5,}\..*")


class WriterSettings(TypedDict, total=False):
    """Keyword arguments that all writers take."""

    compression: str | None
    """Compression of shards: "zstd", "gz:6" and so on; None: none."""
    hashes: Collection[str]
    """Hash algorithms (penstock.data.cache.file_hashes) of each file, before and after compression."""
    size_limit: int | str | None
    """Bytes of a shard before compression, or a text such as "64mb"; None puts all samples into one shard."""
    exist_ok: bool
    """True to replace a dataset that exists in the folder."""
    append: bool
    """True to publish the next version of a dataset: the samples of its newest version, then the new samples."""
    keep_local: bool
    """True to keep the local files of a dataset that is written to a remote."""
    storage_options: Mapping[str, Any] | None
    """Keyword arguments for fsspec's filesystem of the remote: keys, endpoint."""
    upload_threads: int
    """Number of files that are uploaded at the same time."""
    progress: bool
    """True to show the progress of uploads on standard error."""
    timeout_s: float
    """Seconds for each request to the remote, such as the upload of a file, with retries of temporary failures."""


Out = str | os.PathLike[str] | tuple[str | os.PathLike[str], str]
"""Local folder; URL that fsspec opens; or (local folder, URL): files are uploaded, and removed unless keep_local."""


class Writer(ABC):
    """Base class of writers: context managers that write samples into shards, and the index at the end of the `with`
    block, unless there was an error."""

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
        append: bool = False,
        keep_local: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        upload_threads: int = 4,
        progress: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        flags = {"exist_ok": exist_ok, "append": append, "keep_local": keep_local, "progress": progress}
        for name, value in flags.items():
            truth(name, value)
        self.out, remote = _destination(out, storage_options)
        """Local folder of the files, from which they are uploaded to a remote."""
        self._whole: RemoteFolder | None = None
        """Folder of the dataset to which the samples are appended; None without append=True."""
        self._below, self._timeout_s = "", timeout_s
        if append:
            self._whole = remote or RemoteFolder(self.out)
            self._below = f"appended-{os.urandom(4).hex()}"
            if remote is None or isinstance(out, tuple | list):
                self.out = self.out / self._below
            remote = remote and RemoteFolder(joined(self._whole.address, self._below), storage_options)
        self.name = str(self.out) if remote is None else remote.url
        """Name of the dataset, for errors."""
        self.compression = compression or None
        self.hashes = sorted(set(hashes))
        self.size_limit = _size_limit(size_limit)
        self.columns = dict(columns)
        for name in self.columns:
            if not isinstance(name, str):
                raise InvalidArgumentError(f"{self.name}: a column's name must be a str, got {name!r}")
        if self.compression:
            pack(b"", self.compression)  # fail early if the compression is unknown, or its package is missing
        for algorithm in self.hashes:
            digest_of(b"", algorithm)
        self.version: int | None = None
        """Version that `close` has published, with append=True; None otherwise."""
        self.remedy_of: Callable[[str], str] = lambda name: f"Correct the value, or give {name!r} another encoding"
        """Remedy for a value that the encoding of the column with this name cannot store."""
        self._shards: list[Shard] = []
        self._published: Sequence[Shard] | None = None
        self._samples: list[bytes] = []
        self._written = 0
        self._ended = False
        # Overhead in bytes of a shard, and of each sample, that the size limit counts.
        self._shard_bytes = self._sample_bytes = self._bytes = 0
        self._most = MAX_BYTES
        self._keeps, self._temporary = keep_local, remote is not None and not isinstance(out, tuple | list)
        if keep_local and self._temporary:
            raise InvalidArgumentError("keep_local=True needs out=(local folder, remote), got only a remote")
        threads = at_least_one("upload_threads", upload_threads)
        if self._whole is not None:
            self._check_appendable(self._whole)
        self._open_folder(exist_ok)
        self._uploads: Uploads | None = None
        if remote is not None:
            self._uploads = Uploads(
                remote, keep_local=keep_local, threads=threads, timeout_s=timeout_s, progress=progress
            )
            try:
                self._uploads.clear(_SHARD_FILE.fullmatch, exist_ok=exist_ok)
            except BaseException:
                self._clean_up()
                raise

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample. Raise DatasetError for one that cannot be stored, with its number, from 0 in this writer, and
        go on without it; ShardUnavailableError for a failed upload, OSError if a file cannot be written."""
        if self._ended:
            raise DatasetError(f"{self.name}: write needs an open writer, but this one was closed. Make a new writer")
        data = self._encode(sample)
        size = len(data) + self._sample_bytes
        if self._samples and self.size_limit is not None and self.size_limit < self._bytes + size:
            self._flush()
        if not self._samples:
            self._bytes = self._shard_bytes
        if self._bytes + size > self._most:
            raise DatasetError(
                f"{self.name}: sample {self._written}: the shard must have at most {MAX_BYTES} bytes. Split the sample"
            )
        self._samples.append(data)
        self._bytes += size
        self._written += 1

    def close(self) -> Sequence[Shard]:
        """Write the remaining samples and the index, as the end of the `with` block does; return the shards of the
        index, with append=True all of the published version."""
        if not self._ended:
            self.flush()
            if self._whole is not None:
                added = join_indexes([(self._below, self._shards)])
                self.version, self._published = publish(self._whole, added, timeout_s=self._timeout_s)
            else:
                self._write_index()
            self._ended = True
            self._clean_up()
        return self._shards if self._published is None else self._published

    def _write_index(self) -> None:
        index = write_index(self._shards)
        if self._uploads is not None:
            self._uploads.finish(index)
        if self._uploads is None or self._keeps:
            write_whole(self.out / INDEX, index)

    def flush(self) -> list[Shard]:
        """Write the remaining samples, wait for all uploads, and return the shards that were written so far."""
        if self._samples:
            self._flush()
        if self._uploads is not None:
            self._uploads.wait()
        return self._shards

    def abandon(self) -> None:
        """Stop without writing an index, as an error in the `with` block does. What was written locally stays, and is
        never read. After `close` this does nothing."""
        self._ended = True
        self._clean_up()

    def _clean_up(self) -> None:
        if self._uploads is None:
            return
        self._uploads.close()
        if self._temporary:
            shutil.rmtree(self.out, ignore_errors=True)
        elif not self._keeps:
            with contextlib.suppress(OSError):  # the folder has other files
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
            self.abandon()

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Return the fields of a shard's entry in the index that only this format has."""

    @abstractmethod
    def _encode_column(self, name: str, value: Any) -> Any:
        """Return a value as `_joined` needs it, usually as bytes. Raise any exception if it cannot be stored."""

    @abstractmethod
    def _joined(self, values: dict[str, Any]) -> bytes:
        """Return the bytes of a sample, made from the encoded values of its columns."""

    @abstractmethod
    def _files(self, offsets: np.ndarray[Any, Any], body: bytes) -> list[bytes]:
        """Return the files of a shard, before compression. `body`: bytes of its samples; `offsets`: of each sample in
        it, and of the end; shape (samples + 1,)."""

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
                found = ", ".join(map(repr, sample))
                raise DatasetError(f"{where}: the sample must have this column, got the columns {found}") from None
            raise DatasetError(
                f"{where}, {self.columns[name]!r}: {type(error).__name__}: {error}. {self.remedy_of(name)}"
            ) from error
        if len(sample) != len(values):
            extra = ", ".join(repr(name) for name in sample if name not in values)
            known = ", ".join(map(repr, values))
            raise DatasetError(f"{self.name}: sample {self._written} must have the columns {known}, got also {extra}")
        return self._joined(values)

    def _config(self) -> dict[str, Any]:
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
        kinds = FORMATS[self.format].file_kinds
        for part, data in zip(kinds, self._files(offsets, b"".join(self._samples)), strict=True):
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

    def _check_appendable(self, whole: RemoteFolder) -> None:
        """Raise DatasetError if samples of these columns cannot be appended to `whole`, before anything is written."""
        given = newest_index(whole, timeout_s=self._timeout_s)
        first = None
        for _, shard in given.entries() if given else ():
            first = first or shard
        if given is None and whole.names(deadline_s=self._timeout_s):
            raise DatasetError(
                f"{whole.url} must be empty or have an {INDEX} to append to, got other files. Give another folder"
            )
        sample = Shard(self.format, 0, (), settings=self._settings())
        check_columns(whole.url, first, [sample])

    def _open_folder(self, exist_ok: bool) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if not any(self.out.iterdir()):
            return
        if not exist_ok:
            raise not_empty(self.out)
        check_no_versions([path.name for path in self.out.iterdir()], str(self.out))
        # Remove the index first, then the files that it lists.
        (self.out / INDEX).unlink(missing_ok=True)
        for path in self.out.iterdir():
            if _SHARD_FILE.fullmatch(path.name) and path.is_file():
                path.unlink()


def _destination(out: Any, storage_options: Mapping[str, Any] | None) -> tuple[Path, RemoteFolder | None]:
    if isinstance(out, tuple | list):
        if len(out) != 2:
            raise InvalidArgumentError(f"out must be (local folder, remote), got {len(out)} values: {out!r}")
        return local_folder("out", out[0]), writable_remote(os.fspath(out[1]), storage_options)
    if not isinstance(out, str) or "://" not in out:
        return local_folder("out", out), None
    remote = writable_remote(out, storage_options)
    if remote.local is not None:
        return remote.local, None
    return Path(tempfile.gettempdir(), f"penstock-write-{os.getpid()}-{os.urandom(4).hex()}"), remote


def _size_limit(value: int | str | None) -> int | None:
    limit = byte_count("size_limit", value)
    if limit is not None and limit > MAX_BYTES:
        raise InvalidArgumentError(
            f"size_limit must be at most {MAX_BYTES} bytes, got {value!r}. Pass None for a single shard"
        )
    return limit


class MDSWriter(Writer):
    """Writer of a dataset in MDS format. `columns`: name -> encoding, see encodings.py. A value of type bytes is stored
    unchanged, whatever the encoding.

    Example::

        with MDSWriter("s3://bucket/train", {"tokens": "ndarray:int32", "label": "int"}, compression="zstd") as writer:
            writer.write({"tokens": np.arange(9, dtype=np.int32), "label": 1})
    """

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
                # Writing a pickle runs no foreign code. Reading a pickle does, so only the reader has to allow it.
                self._encodings[name] = encoding_of(columns[name], allow_unsafe_types=True)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{out}: column {name!r}: {error.message}") from None
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
            raise ValueError(f"the value must have {encoding.size} bytes, got {len(data)}")
        return data

    def _joined(self, values: dict[str, bytes]) -> bytes:
        sizes = [len(values[name]) for name in self._varying]
        return b"".join([self._head.pack(*sizes), *values.values()])

    def _files(self, offsets: np.ndarray[Any, Any], body: bytes) -> list[bytes]:
        begin = 4 + offsets.nbytes + len(self._text)
        head = np.uint32(len(self._samples)).tobytes() + (offsets + np.uint32(begin)).tobytes()
        return [head + self._text + body]
