"""Reading and writing of index.json, in version 2 of mosaicml-streaming's format. An index may come from anywhere, so
every field is checked when it is read, and an error names its shard and field. Datasets have up to hundreds of
thousands of shards: what is the same for all (names and encodings of columns) is checked and stored once.

Notes are entries of the index for Penstock alone, such as the number of a version; other readers ignore them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from penstock.data.formats.compressed_files import parse_compression
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.fields import InvalidField, kind_of
from penstock.data.formats.format_table import FORMATS
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.proto.errors import DatasetError, InvalidArgumentError

INDEXABLE_ENDINGS = {".parquet", ".jsonl", ".ndjson", ".csv", ".tsv", ".tar", ".tfrecord", ".arrow", ".idx"}
"""Frequent endings of files that `index_folder` can index; it finds some others, too."""
INDEX = "index.json"
VERSION_NOTE = "dataset_version"
"""Note with the number of the dataset's version that the index describes (cache/dataset_versions.py)."""
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

_OWN = {"version", "format", "samples", "compression", "hashes", "blocks", "decoded_bytes", "spans", "ranges"}
_OWN |= {f"{form}_{part}" for form in ("raw", "zip") for part in ("data", "meta")}
"""Fields of a shard's entry in the index that do not go into `Shard.settings`."""

_INDEX_NAME = re.compile(r"index(-\d{6,})?\.json")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")
_NONE: Mapping[str, str] = {}


def read_index(data: bytes, where: str) -> list[Shard]:
    """Return the shards of an index. `where`: its address, for errors. Raises DatasetError."""
    known: dict[str, Mapping[str, Any]] = {}
    files: dict[str, StoredFile] = {}
    shards: list[Shard] = []
    for number, text in enumerate(entries_of(data, where)):
        try:
            shards.append(shard_of(parsed_entry(text), known, files))
        except (InvalidField, DatasetError) as error:
            raise invalid_index(f"{where}: shard {number}", error) from None
    return shards


def invalid_index(where: str, error: Exception) -> DatasetError:
    """`where`: address of the index, with the shard's number for a field of a shard."""
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


class _Index(msgspec.Struct):
    version: msgspec.Raw = msgspec.Raw()
    shards: msgspec.Raw = msgspec.Raw()


def entries_of(data: bytes, where: str) -> list[msgspec.Raw]:
    """Return the text of each shard's entry, without parsing it. Raises DatasetError."""
    try:
        return _entries(data)
    except InvalidField as error:
        raise invalid_index(where, error) from None


def _entries(data: bytes) -> list[msgspec.Raw]:
    try:
        index = msgspec.json.decode(data, type=_Index)
    except msgspec.ValidationError as error:
        raise InvalidField("the index", f"must be a JSON object: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidField("the index", f"must be JSON: {error}") from None
    if not index.version:
        raise InvalidField("version", "is missing")
    check_version(parsed_entry(index.version))
    if not index.shards:
        raise InvalidField("shards", "is missing")
    try:
        return msgspec.json.decode(index.shards, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        kind = kind_of(parsed_entry(index.shards))
        raise InvalidField("shards", f"must be a list, got {kind}") from None


def parsed_entry(text: msgspec.Raw | bytes) -> Any:

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"a number must be finite in JSON, got {constant}")

    try:
        return json.loads(bytes(text).decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidField("the entry", f"must be JSON: {error}") from None


def check_version(version: object) -> None:
    """Raise InvalidField unless the version of an index, or of a shard's entry in it, can be read."""
    if type(version) is not int or version != VERSION:
        raise InvalidField("version", f"must be {VERSION}, got {version!r}")


def shard_of(entry: Any, known: dict[str, Mapping[str, Any]], files: dict[str, StoredFile]) -> Shard:
    """Return the shard that an entry describes. Raises InvalidField or DatasetError.

    `known`: settings of earlier entries, by format and text, so that equal ones share one dict. `files`: earlier files,
    by name, to find a name that two entries use for different files. The entry's are added to both.
    """
    if not isinstance(entry, dict):
        raise InvalidField("the entry", f"must be an object, got {kind_of(entry)}")
    check_version(entry.get("version"))
    form = entry.get("format")
    known_format = FORMATS.get(form) if isinstance(form, str) else None
    if known_format is None:
        raise InvalidField("format", f"must be one of {', '.join(FORMATS)}, got {form!r}")
    samples = _count(entry, "samples", "samples")
    compression = entry.get("compression")
    if compression is None:
        compression = ""
    elif isinstance(compression, str) and compression:
        try:
            parse_compression(compression)
        except InvalidArgumentError as error:
            raise InvalidField("compression", f"is invalid: {error.message}") from None
    else:
        raise InvalidField("compression", f"must be a name or null, got {compression!r:.100}")
    pairs = []
    for part in known_format.file_kinds:
        raw = _stored(entry, f"raw_{part}", files)
        packed = _stored(entry, f"zip_{part}", files) if entry.get(f"zip_{part}") is not None else None
        if (packed is None) == bool(compression):
            what = f"is missing, though compression is {compression!r}"
            raise InvalidField(f"zip_{part}", what if compression else "must be null, because compression is null")
        check_size(f"raw_{part}.bytes", raw.size, known_format.max_bytes)
        pairs.append(ShardFile(raw, packed))
    rest = {**known_format.defaults, **{name: value for name, value in entry.items() if name not in _OWN}}
    key = f"{known_format.name} {rest!r}"
    settings = known.get(key)
    if settings is None:
        known_format.check(rest)
        settings = known[key] = rest
    blocks, spans = (parts_of(entry.get(kind), kind, samples) for kind in ("blocks", "spans"))
    if blocks and spans:
        raise InvalidField("spans", "must be absent, because the file has blocks")
    decoded = _count(entry, "decoded_bytes", "decoded_bytes") if "decoded_bytes" in entry else 0
    ranges = ranges_of(entry.get("ranges", []), len(blocks or spans), pairs[0].raw.size)
    if ranges and known_format.by_part is None:
        raise InvalidField("ranges", f"must be absent, because files of format {form} are read whole")
    return Shard(known_format.name, samples, tuple(pairs), compression, settings, blocks, decoded, spans, ranges)


def parts_of(parts: Any, kind: str, samples: int) -> tuple[int, ...]:
    """Return the number of samples in each of the "blocks" or "spans" (`kind`). Raises InvalidField."""
    if parts is None:
        return ()
    if not isinstance(parts, list) or not all(type(rows) is int and rows >= 0 for rows in parts):
        raise InvalidField(kind, f"must be a list of numbers of samples, each at least 0, got {parts!r:.100}")
    if sum(parts) != samples:
        raise InvalidField(kind, f"must add up to the shard's {samples} samples, got {sum(parts)}")
    return tuple(parts)


def ranges_of(ranges: Any, parts: int, size: int) -> tuple[int, ...]:
    """Return the field "ranges", see `Shard.ranges`; empty if `parts` is 0. Raises InvalidField."""
    if not parts:
        return ()
    if not isinstance(ranges, list) or not all(type(at) is int and 0 <= at <= size for at in ranges):
        raise InvalidField("ranges", f"must be a list of offsets from 0 to {size}, got {ranges!r:.100}")
    if ranges and len(ranges) != 2 * parts + 1:
        raise InvalidField(
            "ranges", f"must have 2 offsets for each of {parts} blocks or spans, and 1 more, got {len(ranges)}"
        )
    if any(begin > end for begin, end in zip(ranges[:-1:2], ranges[1::2], strict=True)):
        raise InvalidField("ranges", "must give each block or span an end at or after its beginning")
    return tuple(ranges)


def _stored(entry: dict[str, Any], field: str, files: dict[str, StoredFile]) -> StoredFile:
    info = entry.get(field)
    if not isinstance(info, dict):
        raise InvalidField(field, f"must be an object, got {kind_of(info)}" if field in entry else "is missing")
    name = info.get("basename")
    if not isinstance(name, str):
        raise InvalidField(f"{field}.basename", f"must be a string, got {kind_of(name)}")
    check_name(f"{field}.basename", name)
    size = _count(info, "bytes", f"{field}.bytes")
    hashes = info.get("hashes")
    if hashes is None or hashes == {}:
        hashes = _NONE
    elif not isinstance(hashes, dict):
        raise InvalidField(f"{field}.hashes", f"must be an object, got {kind_of(hashes)}")
    for algorithm, digest in hashes.items():
        if not isinstance(digest, str) or not _HEXADECIMAL.fullmatch(digest):
            raise InvalidField(f"{field}.hashes.{algorithm}", f"must be a digest in hexadecimal, got {digest!r}")
    stored = StoredFile(name, size, hashes)
    if files.setdefault(name, stored) != stored:
        raise InvalidField(
            f"{field}.basename",
            f"must not be {name!r}, because the index lists this file a second time, with another size or hash",
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


def _count(entry: dict[str, Any], key: str, field: str) -> int:
    value = entry.get(key)
    if type(value) is not int:
        raise InvalidField(field, f"must be an integer, got {kind_of(value)}" if key in entry else "is missing")
    if value < 0:
        raise InvalidField(field, f"must be at least 0, got {value}")
    if value > MAX_NUMBER:
        raise InvalidField(field, f"must be at most {MAX_NUMBER}, got more")
    return value


def remedy_without_index(folder: str) -> str:
    """Looks into the folder and the folders in it, and no deeper: there may be millions of files."""
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
    if shard.ranges:
        entry["ranges"] = list(shard.ranges)
    for part, file in zip(FORMATS[shard.format].file_kinds, shard.files, strict=True):
        entry[f"raw_{part}"] = _info(file.raw)
        entry[f"zip_{part}"] = None if file.packed is None else _info(file.packed)
    return entry


def _info(file: StoredFile) -> dict[str, Any]:
    return {"basename": file.name, "bytes": file.size, "hashes": dict(file.hashes)}


def _below(folder: str, file: ShardFile) -> ShardFile:
    def moved(stored: StoredFile) -> StoredFile:
        return replace(stored, name=f"{folder}/{stored.name}")

    return ShardFile(moved(file.raw), None if file.packed is None else moved(file.packed))
