"""Samples of WebDataset's tar archives, read without unpacking.

As in WebDataset, consecutive members with the same key are a sample. The key is the path up to the first dot of the
file's name (`LAST_DOT`: up to the last one); the rest, in lower case, names the column. The column `__key__` has the
key. Left out are folders, devices, files without a dot or that begin with one, and paths with a folder like `__this__`.
Links and sparse files are refused. Indexing notes what it leaves out, and what may be several samples.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import tarfile
import warnings
import zlib
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from penstock.data.formats.media import images
from penstock.data.formats.raw_files import open_file
from penstock.data.formats.records.energon_folder import columns_of_field, field_of
from penstock.data.formats.records.record_file import RecordFile, record_shard
from penstock.data.formats.shards import Shard
from penstock.proto.errors import DatasetError, ShardCorruptError
from penstock.runtime.files.plain_files import open_plain

KEY = "__key__"
READ_AT_ONCE = 1 << 20
NPY, NPY_HEADER = b"\x93NUMPY\x01\x00", 10
"""First bytes of a .npy file of version 1.0, and its header's offset, preceded by 2 bytes of length."""
_BLANKS, _ADLER = 8 * b" ", 65521
"""What stands for a header's checksum while it is made, and the modulus of Adler-32."""
LAST_DOT = "last_dot"
"""Value of the setting `key` of an archive whose keys end at the last dot."""
_LEFT_OUT, _JOINED = "left_out", "joined"
_SAID = {
    _LEFT_OUT: "{count} members of archives are left out, because their names have no dot or begin with one, such as "
    "{names} in {archive}",
    _JOINED: "{count} samples join members such as {names} in {archive}: the key ends at the first dot, as WebDataset "
    'has it. If each is a sample of its own, index the folder with key="last_dot"',
}
"""What indexing says of the settings that only it has: [count, names of the first member or members]."""
_FIRST_DOT_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_LAST_DOT_NAME = re.compile(r"((?:.*/)?[^./][^/]*)\.([^./]+)", re.DOTALL)
_TIMES_AND_OWNERS = frozenset((b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname"))
_META = re.compile(r"(?:^|/)__[^/]*__(?:$|/)")

Decode = Callable[[bytes], Any]


def _array(data: bytes) -> Any:
    end = NPY_HEADER + int.from_bytes(data[NPY_HEADER - 2 : NPY_HEADER], "little")
    if data.startswith(NPY):
        count, shape, dtype = _npy_layout(data[:end])
        if count and len(data) - end == count * dtype.itemsize:
            return np.frombuffer(data, dtype, count, end).reshape(shape).copy()
    return np.load(io.BytesIO(data), allow_pickle=False)


@lru_cache(maxsize=256)
def _npy_layout(head: bytes) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Return (number of values, shape, dtype) of a .npy file; 0 values if only numpy can read it (Fortran order,
    pickles).

    numpy parses these bytes as Python code, which takes longer than reading a thousand tokens. Most files begin with
    the same bytes, so results are kept.
    """
    file = io.BytesIO(head[len(NPY) :])
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    return 0 if fortran or dtype.hasobject else math.prod(shape), shape, dtype


_DECODERS: dict[str, Decode] = {
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": _array,
}
"""By the extension after the last dot. Other members stay bytes, apart from those in _IMAGES."""
_IMAGES = ("jpg", "jpeg", "png")
"""Extensions of images, whatever kind of image the file is: see `images.decode_image`."""


class MemberError(tarfile.ReadError):
    """Error for an archive member of a kind that Penstock does not read. The message names the member and the
    remedy."""


class _Names:
    """Division of members' names into keys and columns."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._pattern = _LAST_DOT_NAME if settings.get("key") == LAST_DOT else _FIRST_DOT_NAME

    def split(self, name: str) -> tuple[str, str] | None:
        found = self._pattern.fullmatch(name)
        return (found[1], found[2].lower()) if found and not _META.search(name) else None


class _NotedNames(_Names):
    """The same, with notes for the user who indexes an archive."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.notes: dict[str, list[Any]] = {}

    def split(self, name: str) -> tuple[str, str] | None:
        found = super().split(name)
        if found is None and not _META.search(name):
            self._note(_LEFT_OUT, name)
        return found

    def joined(self, first: str, second: str) -> None:
        """Note a sample with two members that differ in more than what follows their last dots."""
        self._note(_JOINED, first, second)

    def _note(self, kind: str, *names: str) -> None:
        self.notes.setdefault(kind, [0, *names])[0] += 1


class TarReader(RecordFile):
    """A sample's record is the range of the archive in which its members lie."""

    def __init__(self, shard: Shard, *paths: Any) -> None:
        super().__init__(shard, *paths)
        self._fields: dict[str, str] = shard.settings.get("fields", {})
        self._names = _Names(shard.settings)
        self._wanted: set[str] | None = None
        """Columns of members to decode; None: all."""
        if self.options.columns is not None:
            chosen = set(self.options.columns)
            texts = [text for field, text in self._fields.items() if field in chosen]
            self._wanted = set().union(*map(columns_of_field, texts)) if self._fields else chosen

    def _decoded(self, index: int, record: bytes) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        name = "the first header"
        try:
            for member in _plain_members(record, self._names) or _any_members(record, self._names):
                name, key, column, begin, end = member
                if sample.setdefault(KEY, key) != key:
                    raise ValueError(f"a sample must have the members of one key, got {sample[KEY]} and {key}")
                is_read = self._wanted is None or column in self._wanted
                sample[column] = self._value(column, record, begin, end) if is_read else None
        except (DatasetError, MemoryError):  # DatasetError: a package for this type is missing
            raise
        except Exception as error:
            self._undecodable(index, f"cannot be read: {name}: {type(error).__name__}: {error}")
        if not sample:
            self._undecodable(index, "must have at least one member, got none")
        return self._mapped(index, sample) if self._fields else sample

    def _mapped(self, index: int, sample: dict[str, Any]) -> dict[str, Any]:
        try:
            chosen = self._fields if self.options.columns is None else self.options.columns
            fields = {field: field_of(sample, text) for field, text in self._fields.items() if field in chosen}
            return {KEY: sample[KEY], **dict.fromkeys(self._fields), **fields}
        except ValueError as error:
            remedy = "Write the archive with it, or correct the field map and index the folder again"
            self._undecodable(index, f"cannot be read: {sample[KEY]}: {error}", remedy=remedy)

    def _value(self, column: str, record: bytes, begin: int, end: int) -> Any:
        kind = column.rpartition(".")[2]
        if kind in _IMAGES and self.options.images != "file":
            decode = images.decode_image_array if self.options.images == "array" else images.decode_image
            return decode(record, begin, end)
        return _DECODERS.get(kind, bytes)(record[begin:end])


Member = tuple[str, str, str, int, int]
"""(name, key, column, offset of its data, offset of the end of its data), in bytes."""
IndexedMember = tuple[str, str, str, int, int, int]
"""Member, and the offset of the end with its padding."""
Read = Callable[[int, int], bytes]
"""(size, begin) -> bytes."""


class _NotPlainError(Exception):
    """Error for an archive with a header that only tarfile reads."""


def _plain_members(record: bytes, names: _Names) -> list[Member] | None:
    """Return the members in a part of an archive of plain headers; None for any other: tarfile takes ten times as
    long."""
    ended = 0

    def plain() -> Iterator[IndexedMember]:
        nonlocal ended
        ended = yield from _walk(lambda size, begin: record[begin : begin + size], len(record), names)

    try:
        members = [member[:5] for member in plain()]
    except _NotPlainError:
        return None
    return members if ended == len(record) else None


def _walk(read: Read, size: int, names: _Names) -> Generator[IndexedMember, None, int]:
    """Yield the members of an archive of which all headers are plain (names of at most 256 bytes), or extended with
    times and owners, as webdataset's writer puts before each member. Return the offset of the block of zeros, or of the
    end. Raises _NotPlainError for any other header, also for a damaged one."""
    at, extended = 0, False
    while at < size:
        head = read(tarfile.BLOCKSIZE, at)
        if not extended and not head.strip(b"\0"):
            return at
        header = _plain_header(head)
        if header is None or (head[257:263] != b"ustar\0" and head[345:].strip(b"\0")):
            raise _NotPlainError
        kind, length, name = header
        begin, end = at + tarfile.BLOCKSIZE, at + tarfile.BLOCKSIZE + length
        if kind == tarfile.XHDTYPE:
            if extended or length > READ_AT_ONCE or not _says_times_and_owners(read(length, begin)):
                raise _NotPlainError
        elif kind not in (tarfile.REGTYPE, tarfile.DIRTYPE):
            raise _NotPlainError
        extended = kind == tarfile.XHDTYPE
        at = begin + -(-length // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if kind == tarfile.REGTYPE and (split := names.split(name)):
            yield name, *split, begin, end, at
    if extended:
        raise _NotPlainError
    return at


def _plain_header(head: bytes) -> tuple[bytes, int, str] | None:
    try:
        # Numbers are octal. Sizes too large for octal begin with another byte, and do not match here.
        size, checksum = int(head[124:136].strip(b" \0"), 8), int(head[148:156].strip(b" \0"), 8)
        name = _name_of(head).decode()
    except ValueError:
        return None
    # adler32's lower half is one more than the sum of all bytes, and takes a fifth of the time of `sum`.
    whole = zlib.adler32(head[:148] + _BLANKS + head[156:]) & 0xFFFF == (checksum + 1) % _ADLER
    return (head[156:157], size, name) if whole else None


def _says_times_and_owners(extended: bytes) -> bool:
    for line in extended.splitlines(keepends=True):
        length, _, rest = line.partition(b" ")
        if rest.partition(b"=")[0] not in _TIMES_AND_OWNERS or length != b"%d" % len(line) or line[-1:] != b"\n":
            return False
    return True


def _name_of(head: bytes) -> bytes:
    name = head[:100].partition(b"\0")[0]
    prefix = head[345:500].partition(b"\0")[0] if head[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _any_members(record: bytes, names: _Names) -> Iterator[Member]:
    with tarfile.open(fileobj=io.BytesIO(record), mode="r:") as archive:
        for name, key, column, member in _members(archive, names):
            begin, end = member.offset_data, member.offset_data + member.size
            if end > len(record):
                raise tarfile.ReadError("the archive is truncated")
            yield name, key, column, begin, end
        if archive.offset != len(record):  # at a damaged header tarfile stops, as at the end
            raise tarfile.ReadError(f"the header {archive.offset} bytes after the sample's beginning is damaged")


def _members(archive: tarfile.TarFile, names: _Names) -> Iterator[tuple[str, str, str, tarfile.TarInfo]]:
    for member in archive:
        if member.issparse():
            raise MemberError(f"{member.name} must not be a sparse file. Write the archive without --sparse")
        if (member.islnk() or member.issym()) and names.split(member.name):
            raise MemberError(
                f"{member.name} must be a file, got a link. Write the archive with tar --hard-dereference --dereference"
            )
        if member.isreg() and (split := names.split(member.name)):
            yield member.name, *split, member


def index_tar(path: Path, name: str, out: Path, key: str = "") -> Shard:
    """Write the file of an archive's offsets, from its headers, to the index's folder `out`, and return the shard,
    with notes for `said_of_names`. Raises DatasetError if it cannot be written; ShardCorruptError for a damaged
    archive."""
    settings: dict[str, Any] = {"key": key} if key else {}
    size, offsets, notes = _samples(path, name, settings)
    return record_shard("webdataset", path, out, name, size, offsets, settings | notes)


def said_of_names(shards: list[Shard]) -> list[Shard]:
    """Warn of what archives' names mean, and return the shards without the notes of that."""
    for kind, text in _SAID.items():
        noted = [(shard.name, *shard.settings[kind]) for shard in shards if kind in shard.settings]
        if noted:
            archive, _, *names = noted[0]
            count = sum(found[1] for found in noted)
            warnings.warn(text.format(count=count, names=" and ".join(map(repr, names)), archive=archive), stacklevel=6)
    return [
        replace(shard, settings={name: value for name, value in shard.settings.items() if name not in _SAID})
        for shard in shards
    ]


def _check_end(file: BinaryIO, at: int, name: str) -> None:
    """Raise ShardCorruptError unless an archive ends at `at`, where tarfile stopped. It also stops, without an error,
    at a damaged header, at the end of a truncated file, and of the first of several archives in one file."""
    file.seek(at)
    marker = file.read(tarfile.BLOCKSIZE)
    if marker.strip(b"\0"):
        raise ShardCorruptError(f"{name}: the header at byte {at} is damaged. Fetch or write the archive again")
    if len(marker) < tarfile.BLOCKSIZE:
        raise ShardCorruptError(
            f"{name} must end with a block of zeros, but it is truncated. Fetch or write the archive again"
        )
    while rest := file.read(READ_AT_ONCE):
        if rest.strip(b"\0"):
            raise ShardCorruptError(
                f"{name} must be one archive, but more data follow its end. Join archives with tar --concatenate"
            )


def _samples(
    path: Path, name: str, settings: Mapping[str, Any]
) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]], dict[str, Any]]:
    file, size = open_file(path, name)
    names, ended = _NotedNames(settings), 0

    def plain() -> Iterator[IndexedMember]:
        nonlocal ended
        ended = yield from _walk(file.read, size, names)

    try:
        offsets = _offsets(plain(), name, size, names)
    except _NotPlainError:
        names = _NotedNames(settings)
        return size, _samples_by_tarfile(path, name, size, names), names.notes
    with open(path, "rb", opener=open_plain) as archive:
        _check_end(archive, ended, name)
    return size, offsets, names.notes


def _samples_by_tarfile(path: Path, name: str, size: int, names: _NotedNames) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        with open(path, "rb", opener=open_plain) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            offsets = _offsets(_tarfile_found(file, archive, name, names), name, size, names)
            _check_end(file, archive.offset, name)
            return offsets
    except MemberError as error:
        raise ShardCorruptError(f"{name}: {error}") from error
    except tarfile.TarError as error:
        with open(path, "rb", opener=open_plain) as file:
            packed = file.read(2) == b"\x1f\x8b"
        remedy = (
            "Decompress the archive, because samples are read in any order"
            if packed
            else "Fetch or write the archive again"
        )
        raise ShardCorruptError(f"{name} must be a plain tar archive: {error}. {remedy}") from error


def _tarfile_found(file: BinaryIO, archive: tarfile.TarFile, name: str, names: _Names) -> Iterator[IndexedMember]:
    for member_name, key, column, member in _members(archive, names):
        head = os.pread(file.fileno(), tarfile.BLOCKSIZE, member.offset_data - tarfile.BLOCKSIZE)
        if head[257:262] == b"ustar" and head[262:263] != b"\0" and head[345:].strip(b"\0"):
            raise ShardCorruptError(
                f"{name} must not be an incremental archive of GNU tar. Write the archive without --listed-incremental"
            )
        begin = member.offset_data
        yield member_name, key, column, begin, begin + member.size, archive.offset


def _offsets(
    members: Iterable[IndexedMember], name: str, size: int, names: _NotedNames
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the offsets of the samples and the end of the last. Raises ShardCorruptError if the archive is truncated,
    or the members of a sample do not fit together."""
    begins = array("q")
    keys: set[str] = set()
    last, columns, end = "", dict[str, str](), 0
    is_joined = False
    for member_name, key, column, _, data_end, member_end in members:
        if data_end > size:
            raise ShardCorruptError(f"{name} is truncated within {member_name}. Fetch or write the archive again")
        if key != last:
            if key in keys:
                raise ShardCorruptError(
                    f"{name}: a sample's members must follow each other, got {member_name} after others. Write the "
                    'archive in order of names, or index it with key="last_dot" if keys end at the last dot'
                )
            keys.add(key)
            begins.append(end if begins else 0)
            last, columns, is_joined = key, {}, False
        if column in columns:
            raise ShardCorruptError(
                f"{name}: a sample must have each column (a member's name after its first dot, in lower case) once, "
                f"got {column!r} again by {member_name}. Write the archive without this member"
            )
        if "." in column and not is_joined:
            ending = column.rpartition(".")[1:]
            alike = next((other for known, other in columns.items() if known.rpartition(".")[1:] == ending), None)
            if alike is not None:
                is_joined = True
                names.joined(alike, member_name)
        columns[column] = member_name
        end = member_end
    return np.array([*begins, end], np.int64)
