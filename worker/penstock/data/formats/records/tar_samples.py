"""Samples of WebDataset's tar archives, read where they lie.

As in WebDataset, members that follow each other with the same key are a sample. The key is the member's path up to the
first dot of its last step, and what follows the dot, in lower case, names the column. A sample also has `__key__`.
Members that are not files, that have no dot, or whose path has a step like `__this__`, do not count.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.formats.media import images
from penstock.data.formats.records.record_file import RecordFile, opened, store_offsets
from penstock.data.formats.shards import ReadOptions, Shard
from penstock.proto.errors import DatasetError, ShardCorruptError
from penstock.runtime.files.plain_files import open_plain

__all__ = ["TarReader", "open_tar", "tar_shards"]

KEY = "__key__"
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_META = re.compile(r"(?:^|/)__[^/]*__(?:$|/)")

Decode = Callable[[bytes], Any]


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


_DECODERS: dict[str, Decode] = {
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": _array,
}
"""Decoder of a member's bytes, by what follows the last dot of its name. Anything else stays bytes."""
_IMAGES: dict[str, tuple[images.Decode, images.Decode]] = {
    "jpg": (images.decode_jpeg, images.decode_jpeg_array),
    "jpeg": (images.decode_jpeg, images.decode_jpeg_array),
    "png": (images.decode_png, images.array_decoder(images.decode_png)),
}
"""(decoder to an image of Pillow, decoder to an array) of the bytes of an image."""


class TarReader(RecordFile):
    """Reader of a tar archive. A sample's record is the part of the archive that its members lie in."""

    def __init__(self, shard: Shard, data: Path, offsets: Path, options: ReadOptions) -> None:
        super().__init__(shard, data, offsets)
        self._as_arrays = options.images == "array"

    def _decoded(self, index: int, record: bytes) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        name = ""
        try:
            with tarfile.open(fileobj=io.BytesIO(record), mode="r:") as archive:
                for name, key, column, member in _members(archive):
                    begin = member.offset_data
                    if begin + member.size > len(record):
                        self._corrupt(index, f"is truncated within {name}")
                    if sample.setdefault(KEY, key) != key:
                        self._corrupt(index, f"must have the members of one key, got {sample[KEY]} and {key}")
                    sample[column] = self._value(column, record, begin, begin + member.size)
                if archive.offset != len(record):  # tarfile takes a damaged header for the end of the archive
                    self._corrupt(index, f"has a damaged header {archive.offset} bytes after its beginning")
        except DatasetError:
            raise
        except Exception as error:
            self._corrupt(index, f"cannot be read: {name}: {type(error).__name__}: {error}")
        if not sample:
            self._corrupt(index, "must have at least one member, got none")
        return sample

    def _value(self, column: str, record: bytes, begin: int, end: int) -> Any:
        kind = column.rpartition(".")[2]
        if kind in _IMAGES:
            return _IMAGES[kind][self._as_arrays](record, begin, end)
        return _DECODERS.get(kind, bytes)(record[begin:end])


def open_tar(shard: Shard, paths: Sequence[Path], options: ReadOptions) -> TarReader:
    """Return the reader of a shard, see format_table.Format.open."""
    return TarReader(shard, paths[0], paths[1], options)


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, str, str, tarfile.TarInfo]]:
    """Yield (name, key, column, member) of each member that counts."""
    for member in archive:
        if member.issparse():
            raise tarfile.ReadError(f"{member.name} is a sparse file, which has no bytes of its own to read")
        found = _NAME.fullmatch(member.name)
        if member.isreg() and found and not _META.search(member.name):
            yield member.name, found[1], found[2].lower(), member


def tar_shards(files: Sequence[tuple[str, Path]]) -> list[Shard]:
    """Return a shard for each archive, and write the file of its samples' offsets beside it. `files`: (path relative to
    the dataset's folder, path) for each. Only the headers of the members are read. Raises DatasetError,
    ShardCorruptError."""
    shards = []
    for name, path in files:
        size, offsets = _samples(path, name)
        shards.append(Shard("webdataset", len(offsets) - 1, store_offsets(path, name, size, offsets)))
    return shards


def _samples(path: Path, name: str) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return (size of an archive in bytes, offsets of its samples, and of the end of the last one)."""
    _, size = opened(path, name)
    begins: list[int] = []
    keys: set[str] = set()
    last, columns, end = "", set[str](), 0
    try:
        with open(path, "rb", opener=open_plain) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member_name, key, column, member in _members(archive):
                if member.offset_data + member.size > size:
                    raise ShardCorruptError(f"{name}: it is truncated within {member_name}. Fetch it again")
                if key != last:
                    if key in keys:
                        raise ShardCorruptError(
                            f"{name}: the members of a sample must follow each other, got {member_name} after other "
                            "samples. Write the archive again, for example with tar --sort=name"
                        )
                    keys.add(key)
                    begins.append(end if begins else 0)
                    last, columns = key, set()
                if column in columns:
                    raise ShardCorruptError(f"{name}: a sample must have each column once, got {member_name} again")
                columns.add(column)
                end = archive.offset
            # tarfile takes a damaged header for the end of the archive, which is a block of zeros.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise ShardCorruptError(f"{name}: the header at byte {archive.offset} is damaged. Fetch it again")
    except tarfile.TarError as error:
        with open(path, "rb", opener=open_plain) as file:
            packed = file.read(2) == b"\x1f\x8b"
        remedy = "It is compressed: decompress it, to read samples in any order" if packed else "Fetch it again"
        raise ShardCorruptError(f"{name}: it is no tar archive: {error}. {remedy}") from error
    return size, np.array([*begins, end], np.int64)
