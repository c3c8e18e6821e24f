"""Writer of datasets in MDS, the format of mosaicml-streaming. Its version 0.13.0 reads them.

Shards are written, and uploaded to a remote (writing/uploads.py), as they fill up; the index is written last, and only
without an error. A folder without an index is not a dataset, so an interrupted write is never read as if complete.

The files are those of mosaicml-streaming's own writer, byte for byte, but gzip files contain no time, and
mosaicml-streaming writes an empty shard before a first sample that is larger than the limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from penstock.data.arguments import at_least_one, byte_count, truth
from penstock.data.cache.file_hashes import digest_of
from penstock.data.formats.compressed_files import extension_of, pack
from penstock.data.formats.encodings import Encoding, encoding_of
from penstock.data.formats.format_table import MAX_BYTES
from penstock.data.formats.index import INDEX, join_indexes, write_index
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.remote.folders import RemoteFolder, joined
from penstock.data.writing.publish import check_columns, check_no_versions, newest_index, publish
from penstock.data.writing.uploads import Uploads, local_folder, writable_remote
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.plain_files import open_plain

SIZE_LIMIT = 64 << 20
"""Default of `size_limit`, in bytes."""
OFFSET_BYTES = 4
"""Bytes of an offset, and of the number of samples, in a shard."""
_SHARD_FILE = re.compile(r"shard\.\d{5,}\..*")


Out = str | os.PathLike[str] | tuple[str | os.PathLike[str], str]


class MDSWriter:
    """Context manager that writes samples into MDS shards, and at the end of the `with` block the index, unless there
    was an error.

    Example::

        with MDSWriter("s3://bucket/train", {"tokens": "ndarray:int32", "label": "int"}, compression="zstd") as writer:
            writer.write({"tokens": np.arange(9, dtype=np.int32), "label": 1})

    Args:
        out: local folder; URL that fsspec opens; or (local folder, URL). Files are uploaded, and removed unless
            keep_local.
        columns: name -> encoding, see encodings.py. A value of type bytes is stored unchanged, whatever the encoding.
        compression: of shards: "zstd", "gz:6" and so on; None: none.
        hashes: hash algorithms (penstock.data.cache.file_hashes) of each file, before and after compression.
        size_limit: bytes of a shard before compression, or a text such as "64mb"; None puts all samples into one shard.
        exist_ok: True to replace a dataset that exists in the folder.
        append: True to publish the next version of a dataset: the samples of its newest version, then the new samples.
        keep_local: True to keep the local files of a dataset that is written to a remote.
        storage_options: keyword arguments for fsspec's filesystem of the remote: keys, endpoint.
        upload_threads: number of files that are uploaded at the same time.
        progress: True to print the progress of uploads on standard error.
        timeout_s: seconds for each request to the remote, such as the upload of a file, with retries.
    """

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
        self._before: frozenset[str] = frozenset()
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
        self.columns = {name: columns[name] for name in sorted(columns, key=str)}
        self._encodings = {name: self._encoding(name) for name in self.columns}
        self._varying = [name for name, encoding in self._encodings.items() if encoding.size is None]
        self._head = struct.Struct(f"={len(self._varying)}I")
        self._settings = {
            "column_names": list(self.columns),
            "column_encodings": list(self.columns.values()),
            "column_sizes": [encoding.size for encoding in self._encodings.values()],
            "size_limit": self.size_limit,
        }
        config = {"version": 2, "format": "mds", "compression": self.compression, "hashes": self.hashes}
        self._text = json.dumps({**config, **self._settings}, sort_keys=True).encode()
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
        self._bytes = 0
        self._keeps, self._temporary = keep_local, remote is not None and not isinstance(out, tuple | list)
        if keep_local and (remote is None or self._temporary):
            raise InvalidArgumentError("keep_local=True needs out=(local folder, remote), got only one of them")
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
        size = len(data) + OFFSET_BYTES
        if self._samples and self.size_limit is not None and self.size_limit < self._bytes + size:
            self._flush()
        if not self._samples:
            self._bytes = 2 * OFFSET_BYTES + len(self._text)
        if self._bytes + size > MAX_BYTES:
            raise DatasetError(
                f"{self.name}: sample {self._written}: the shard must have at most {MAX_BYTES} bytes, got more. Pass a "
                "smaller size_limit, or split the sample"
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
        """Stop without writing an index, as an error in the `with` block does. After `close` this does nothing."""
        if self._whole is not None and not self._ended and not self._may_be_listed(self._whole):
            shutil.rmtree(self.out, ignore_errors=True)
        self._ended = True
        self._clean_up()

    def _may_be_listed(self, whole: RemoteFolder) -> bool:
        """Return True if an index may list the appended shards: a failed `publish` may have written some."""
        if whole.local is None:
            return False
        try:
            indexes = [path for path in whole.local.glob("index*.json") if path.name not in self._before - {INDEX}]
            return any(self._below.encode() in path.read_bytes() for path in indexes)
        except OSError:
            return True

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

    def _encoding(self, name: str) -> Encoding:
        if not isinstance(name, str):
            raise InvalidArgumentError(f"{self.name}: a column's name must be a str, got {name!r}")
        try:
            # Writing a pickle runs no foreign code. Reading a pickle does, so only the reader has to allow it.
            return encoding_of(self.columns[name], allow_unsafe_types=True)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self.name}: column {name!r}: {error.message}") from None

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
                raise DatasetError(
                    f"{where}: the sample must have this column, got the columns {found}. Add it to the sample, or "
                    "leave it out of columns"
                ) from None
            raise DatasetError(
                f"{where}, {self.columns[name]!r}: {type(error).__name__}: {error}. {self.remedy_of(name)}"
            ) from error
        if len(sample) != len(values):
            extra = ", ".join(repr(name) for name in sample if name not in values)
            known = ", ".join(map(repr, values))
            raise DatasetError(
                f"{self.name}: sample {self._written} must have the columns {known}, got also {extra}. Remove them "
                "from the sample, or add them to columns"
            )
        sizes = [len(values[name]) for name in self._varying]
        return b"".join([self._head.pack(*sizes), *values.values()])

    def _encode_column(self, name: str, value: Any) -> bytes:
        encoding = self._encodings[name]
        data = value if isinstance(value, bytes) else encoding.encode(value)
        if encoding.size is not None and len(data) != encoding.size:
            raise ValueError(f"the value must have {encoding.size} bytes, got {len(data)}")
        return data

    def _flush(self) -> None:
        offsets = np.cumsum([0, *map(len, self._samples)], dtype=np.uint64).astype(np.uint32)
        begins = offsets + np.uint32(OFFSET_BYTES + offsets.nbytes + len(self._text))
        head = np.uint32(len(self._samples)).tobytes() + begins.tobytes()
        content = b"".join([head, self._text, *self._samples])
        name = f"shard.{len(self._shards):05}.mds"
        raw, packed = self._stored(name, content), None
        if self.compression:
            content = pack(content, self.compression)
            packed = self._stored(f"{name}.{extension_of(self.compression)}", content)
        path = self.out / (packed or raw).name
        with open(path, "wb", opener=open_plain) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if self._uploads is not None:
            self._uploads.send(path)
        files = (ShardFile(raw, packed),)
        self._shards.append(Shard("mds", len(self._samples), files, self.compression or "", self._settings))
        self._samples = []

    def _stored(self, name: str, data: bytes) -> StoredFile:
        return StoredFile(name, len(data), {algorithm: digest_of(data, algorithm) for algorithm in self.hashes})

    def _check_appendable(self, whole: RemoteFolder) -> None:
        """Raise DatasetError if samples of these columns cannot be appended to `whole`, before anything is written."""
        given = newest_index(whole, timeout_s=self._timeout_s)
        first = None
        for _, shard in given.entries() if given else ():
            first = first or shard
        self._before = frozenset(whole.names(deadline_s=self._timeout_s))
        if given is None and self._before:
            raise DatasetError(
                f"{whole.url} must be empty or have an {INDEX} to append to, got other files. Give another folder"
            )
        check_columns(whole.url, first, [Shard("mds", 0, (), settings=self._settings)])

    def _open_folder(self, exist_ok: bool) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if not any(self.out.iterdir()):
            return
        if not exist_ok:
            raise DatasetError(
                f"{self.out} must be empty, got a folder with files. Pass another folder, or exist_ok=True to replace "
                "its dataset and keep other files, or append=True to publish a version with more samples"
            )
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
