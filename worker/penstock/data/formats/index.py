"""Reading and writing of a dataset's index, in version 2 of mosaicml-streaming's format. An index may come from
anywhere, so every field is checked when it is read, and an error names its shard and field. Datasets have up to
hundreds of thousands of shards: what is the same for all (names and encodings of columns) is checked and stored once.

Notes are entries of the index for Penstock alone, such as the number of a version; other readers ignore them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.data.formats.compressed_files import parse_compression
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.fields import InvalidField, check_meaning
from penstock.data.formats.format_table import FORMATS, TABLE_FILE
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.proto.errors import DatasetError, InvalidArgumentError

INDEXABLE_ENDINGS = {".parquet", ".jsonl", ".ndjson", ".csv", ".tsv", ".tar", ".tfrecord", ".arrow", ".idx"}
"""Frequent endings of files that `index_folder` can index; it finds some others, too."""
INDEX = "index.json"
OWN = "_penstock_"
"""Begin of the names of indexes beside files of other libraries, which their readers leave out, and tables' vacuums."""
OWN_INDEX = OWN + INDEX
"""Name of an index beside files of other libraries. It counts if both exist."""
VERSION_NOTE = "dataset_version"
"""Note with the number of the dataset's version that the index describes (cache/dataset_versions.py)."""
SPLITS_NOTE = "splits"
"""Note with the names of the dataset's splits, in a folder with the files of several (formats/splits.py)."""
SOURCE_NOTE = "folder"
"""Note with the local folder of the dataset's files, if the index lies in another folder."""
VERSION = 2
NOTES = "penstock"
"""Entry that holds the notes. It is the first one, because entries are sorted by name."""
_NOTES_BEGIN = f'{{"{NOTES}": '.encode()
INDEX_END = f'], "version": {VERSION}}}'.encode()
MAX_NUMBER = 1 << 44
"""Largest size of a file in bytes, and number of its samples: sums over all shards stay below 64 bits."""

PRECEDED_NOTE = "preceded_by"
"""Note in the index of version 1: the digest of the index that the dataset had before it had versions."""

_OWN = {
    "version",
    "format",
    "samples",
    "compression",
    "hashes",
    "blocks",
    "decoded_bytes",
    "spans",
    "ranges",
    "deleted",
    "content",
}
_OWN |= {f"{form}_{part}" for form in ("raw", "zip") for part in ("data", "meta")}
"""Fields of a shard's entry in the index that do not go into `Shard.settings`."""

_INDEX_NAME = re.compile(rf"({OWN})?index(-\d{{6,}})?\.json")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")
_NONE: Mapping[str, str] = {}


def read_index(data: bytes, where: str) -> list[Shard]:
    """Return the shards of an index. `where`: its address, for errors. Raises DatasetError."""
    known: dict[str, Mapping[str, Any]] = {}
    files: dict[str, StoredFile] = {}
    texts = enumerate(entries_of(data, where))
    return [read_entry(text, f"{where}: shard {number}", known, files) for number, text in texts]


def read_entry(
    text: msgspec.Raw, where: str, known: dict[str, Mapping[str, Any]], files: dict[str, StoredFile]
) -> Shard:
    """Return the shard of an entry as `shard_of` does. `where`: address of the index, and the shard's number, for the
    DatasetError of an invalid one."""
    try:
        return shard_of(text, known, files)
    except (InvalidField, DatasetError) as error:
        raise _invalid_index(where, error) from None


def _invalid_index(where: str, error: Exception) -> DatasetError:
    remedy = "Fetch or write the index again, or upgrade Penstock if a newer release wrote it"
    return DatasetError(f"{where}: {error}. {remedy}")


def write_index(shards: Iterable[Shard], notes: Mapping[str, Any] | None = None) -> bytes:
    """Without notes, the bytes are those that mosaicml-streaming writes, for its formats."""
    return index_begin(notes) + b", ".join(map(entry_text, shards)) + INDEX_END


def index_begin(notes: Mapping[str, Any] | None = None) -> bytes:
    begin = _NOTES_BEGIN + json.dumps(dict(notes), sort_keys=True).encode() + b", " if notes else b"{"
    return begin + b'"shards": ['


def entry_text(shard: Shard) -> bytes:
    return json.dumps(_entry(shard), sort_keys=True).encode()


def version_index(version: int) -> str:
    return f"index-{version:06}.json"


def index_notes(data: bytes) -> dict[str, Any]:
    """Return the notes, also if `data` ends after them. The list of shards is not parsed."""
    if not data.startswith(_NOTES_BEGIN):
        return {}
    try:
        notes, _ = json.JSONDecoder().raw_decode(data.decode(), len(_NOTES_BEGIN))
    except (ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}


def first_notes(first: Callable[[int], bytes]) -> dict[str, Any]:
    """Return the notes of an index that may be large. `first(size)` returns at most its first `size` bytes."""
    size = 1 << 16
    while True:
        data = first(size)
        notes = index_notes(data)
        if notes or len(data) < size or not data.startswith(_NOTES_BEGIN):
            return notes
        size *= 4


def file_notes(file: Descriptor) -> dict[str, Any]:
    return first_notes(lambda size: file.read(size, 0))


def join_indexes(parts: Iterable[tuple[str, Iterable[Shard]]]) -> list[Shard]:
    """Return the shards of several folders, (path relative to the parent, shards), as those of their parent."""
    return [shard_below(folder, shard) for folder, shards in parts for shard in shards]


def shard_below(folder: str, shard: Shard) -> Shard:
    return replace(shard, files=tuple(_below(folder, file) for file in shard.files))


Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]


class _Index(msgspec.Struct):
    version: int
    shards: list[msgspec.Raw]


class EntryFile(msgspec.Struct, gc=False):
    basename: str
    bytes: Count
    hashes: dict[str, str] | None = None
    version: str = ""


class Entry(msgspec.Struct, gc=False):
    """Entry of a shard. msgspec checks the types of its fields; its settings are not parsed."""

    version: int
    format: str
    samples: Count
    raw_data: EntryFile
    compression: str | None = None
    raw_meta: EntryFile | None = None
    zip_data: EntryFile | None = None
    zip_meta: EntryFile | None = None
    blocks: list[Count] | None = None
    decoded_bytes: Count = 0
    spans: list[Count] | None = None
    ranges: list[Count] | None = None
    deleted: str = ""
    content: str = ""
    table: msgspec.Raw = msgspec.Raw()
    column_names: msgspec.Raw = msgspec.Raw()
    column_encodings: msgspec.Raw = msgspec.Raw()
    column_sizes: msgspec.Raw = msgspec.Raw()
    columns: msgspec.Raw = msgspec.Raw()
    newline: msgspec.Raw = msgspec.Raw()
    separator: msgspec.Raw = msgspec.Raw()
    records: msgspec.Raw = msgspec.Raw()
    splits: msgspec.Raw = msgspec.Raw()
    partitions: msgspec.Raw = msgspec.Raw()
    fields: msgspec.Raw = msgspec.Raw()
    size_limit: msgspec.Raw = msgspec.Raw()
    hashes: msgspec.Raw = msgspec.Raw()


def entries_of(data: bytes, where: str) -> list[msgspec.Raw]:
    """Return the text of each shard's entry, without parsing it. Raises DatasetError."""
    try:
        index = msgspec.json.decode(data, type=_Index)
        check_version(index.version)
        return index.shards
    except (ValueError, RecursionError) as error:
        raise _invalid_index(where, _invalid_field(error, "the index")) from None
    except InvalidField as error:
        raise _invalid_index(where, error) from None


def _invalid_field(error: Exception, whole: str) -> InvalidField:
    """Return msgspec's error as one that names the field, or the `whole`."""
    why, _, path = str(error).partition(" - at `$")
    return InvalidField(path.strip(".`") or whole, f"is invalid: {why}")


def check_version(version: int) -> None:
    """Raise InvalidField unless the version of an index, or of a shard's entry in it, can be read."""
    if version != VERSION:
        raise InvalidField("version", f"must be {VERSION}, got {version}")


def shard_of(text: msgspec.Raw | bytes, known: dict[str, Mapping[str, Any]], files: dict[str, StoredFile]) -> Shard:
    """Return the shard that an entry describes. Raises InvalidField or DatasetError.

    `known`: settings of earlier entries, by format and text, so that equal ones share one dict. `files`: earlier files,
    by name, to find a name that two entries use for different files. The entry's are added to both.
    """
    try:
        entry, values = msgspec.json.decode(text, type=Entry), msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise _invalid_field(error, "the entry") from None
    check_version(entry.version)
    known_format = FORMATS.get(entry.format)
    if known_format is None:
        raise InvalidField("format", f"must be one of {', '.join(FORMATS)}, got {entry.format!r}")
    if entry.compression is not None:
        try:
            parse_compression(entry.compression)
        except InvalidArgumentError as error:
            raise InvalidField("compression", f"is invalid: {error.message}") from None
    pairs = []
    for part in known_format.file_kinds:
        raw, packed = getattr(entry, f"raw_{part}"), getattr(entry, f"zip_{part}")
        if raw is None:
            raise InvalidField(f"raw_{part}", "is missing")
        if (packed is None) == bool(entry.compression):
            what = f"is missing, though compression is {entry.compression!r}"
            raise InvalidField(
                f"zip_{part}", what if entry.compression else "must be null, because compression is null"
            )
        check_size(f"raw_{part}.bytes", raw.bytes, known_format.max_bytes)
        stored = _stored(raw, f"raw_{part}", files)
        pairs.append(ShardFile(stored, None if packed is None else _stored(packed, f"zip_{part}", files)))
    rest = {**known_format.defaults, **{name: value for name, value in values.items() if name not in _OWN}}
    key = f"{known_format.name} {rest!r}"
    settings = known.get(key)
    if settings is None:
        check_meaning(rest)
        known_format.check(rest)
        settings = known[key] = rest
    blocks, spans, ranges = parts_of(entry)
    if ranges and known_format.by_part is None:
        raise InvalidField("ranges", f"must be absent, because files of format {entry.format} are read whole")
    if entry.deleted and known_format.name != TABLE_FILE:
        raise InvalidField("deleted", f"must be absent from a file of format {entry.format}")
    more = entry.compression or "", settings, blocks, entry.decoded_bytes, spans, ranges, entry.deleted, entry.content
    return Shard(known_format.name, entry.samples, tuple(pairs), *more)


def parts_of(entry: Entry) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return an entry's blocks, spans and ranges, see `Shard`. Raises InvalidField."""
    blocks, spans, ranges = (tuple(each or ()) for each in (entry.blocks, entry.spans, entry.ranges))
    for kind, parts in (("blocks", blocks), ("spans", spans)):
        if parts and sum(parts) != entry.samples:
            raise InvalidField(kind, f"must add up to the shard's {entry.samples} samples, got {sum(parts)}")
    if blocks and spans:
        raise InvalidField("spans", "must be absent, because the file has blocks")
    count, size = len(blocks or spans), entry.raw_data.bytes
    if not count or not ranges:
        return blocks, spans, ()
    if max(ranges) > size or len(ranges) != 2 * count + 1:
        raise InvalidField(
            "ranges",
            f"must be {2 * count + 1} offsets up to {size}, 2 for each of {count} blocks or spans and 1 more, got "
            f"{len(ranges)} up to {max(ranges)}",
        )
    if any(begin > end for begin, end in zip(ranges[:-1:2], ranges[1::2], strict=True)):
        raise InvalidField("ranges", "must give each block or span an end at or after its beginning")
    return blocks, spans, ranges


def _stored(file: EntryFile, field: str, files: dict[str, StoredFile]) -> StoredFile:
    check_name(f"{field}.basename", file.basename)
    for algorithm, digest in (file.hashes or {}).items():
        if not _HEXADECIMAL.fullmatch(digest):
            raise InvalidField(f"{field}.hashes.{algorithm}", f"must be a digest in hexadecimal, got {digest!r}")
    stored = StoredFile(file.basename, file.bytes, file.hashes or _NONE, version=file.version)
    if files.setdefault(file.basename, stored) != stored:
        raise InvalidField(
            f"{field}.basename",
            f"must not be {stored.name!r}, because the index lists this file a second time, with another size or hash",
        )
    return stored


def check_size(field: str, size: int, limit: int) -> None:
    if size > limit:
        raise InvalidField(field, f"must be at most {limit}, because the file's offsets have 32 bits, got {size}")


def check_name(field: str, name: str) -> None:
    """Raise InvalidField unless a file of a shard may have this name. A shard could overwrite the cache's own files,
    which lie beside the shards, and so decide which files the cache removes."""
    steps = name.split("/")
    if not {"", ".", ".."}.isdisjoint(steps) or "\\" in name or "\0" in name:
        raise InvalidField(field, f"must be a plain path below the dataset's folder, got {name!r}")
    if len(name) > 255 or not name.isascii():
        encoded = [step.encode() for step in steps]
        if max(map(len, encoded)) > 255 or len(name.encode()) > 3000:
            raise InvalidField(
                field, f"must have at most 255 bytes between two slashes and 3000 in all, got {name[:100]!r}"
            )
    folded = name.casefold().split("/")
    if ".penstock" in folded or _INDEX_NAME.fullmatch(folded[-1]):
        raise InvalidField(field, f"must not be a name that the cache uses itself, got {name!r}")


def local_index(folder: Path) -> Path:
    """Return the path of a local folder's index; that of INDEX if there is none."""
    return own if (own := folder / OWN_INDEX).exists() else folder / INDEX


def remedy_without_index(folder: str) -> str:
    """Looks into the folder and the folders in it, and no deeper: there may be millions of files."""
    splits = sorted(path.parent.name for name in (INDEX, OWN_INDEX) for path in Path(folder).glob(f"*/{name}"))
    if splits:
        return f"Give split, one of its folders that have one: {', '.join(splits[:20])}"
    for pattern in ("*.*", "*/*.*"):
        if any(path.suffix.lower() in INDEXABLE_ENDINGS for path in Path(folder).glob(pattern)):
            return f"Call index_folder({folder!r}) to index the files in it"
    return "Give the folder to which the dataset was written"


def _entry(shard: Shard) -> dict[str, Any]:
    entry: dict[str, Any] = {
        **FORMATS[shard.format].defaults,
        **shard.settings,
        "version": VERSION,
        "format": shard.format,
        "samples": shard.samples,
        "compression": shard.compression or None,
        "hashes": sorted(shard.files[0].raw.hashes),
    }
    if shard.blocks:
        entry |= {"blocks": list(shard.blocks), "decoded_bytes": shard.decoded_bytes}
    if shard.spans:
        entry["spans"] = list(shard.spans)
    if shard.content:
        entry["content"] = shard.content
    if shard.ranges:
        entry["ranges"] = list(shard.ranges)
    if shard.deleted:
        entry["deleted"] = shard.deleted
    for part, file in zip(FORMATS[shard.format].file_kinds, shard.files, strict=True):
        entry[f"raw_{part}"] = _info(file.raw)
        entry[f"zip_{part}"] = None if file.packed is None else _info(file.packed)
    return entry


def _info(file: StoredFile) -> dict[str, Any]:
    version = {"version": file.version} if file.version else {}
    return {"basename": file.name, "bytes": file.size, "hashes": dict(file.hashes), **version}


def _below(folder: str, file: ShardFile) -> ShardFile:
    def moved(stored: StoredFile) -> StoredFile:
        return replace(stored, name=f"{folder}/{stored.name}")

    return ShardFile(moved(file.raw), None if file.packed is None else moved(file.packed))
