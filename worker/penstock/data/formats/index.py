"""Reading and writing of index.json, in version 2 of mosaicml-streaming's format. Every field is checked when it is
read.

The index describes all of a dataset, and may come from anywhere, so every field is checked: a wrong number is an error
that names its shard and field, and not a later failure elsewhere. Datasets have up to hundreds of thousands of shards.
What is the same for all of them (names and encodings of columns) is checked once and stored once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from penstock.data.formats.compressed_files import parse_compression
from penstock.data.formats.encodings import check_encoding
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.formats.text_shards import TEXT_ENCODINGS
from penstock.proto.errors import DatasetError

__all__ = ["FORMATS", "INDEX", "join_indexes", "read_index", "write_index"]

INDEX = "index.json"
VERSION = 2
FORMATS: Mapping[str, tuple[str, ...]] = {
    "mds": ("data",),
    "json": ("data", "meta"),
    "xsv": ("data", "meta"),
    "csv": ("data", "meta"),
    "tsv": ("data", "meta"),
    # Penstock's own index of plain Parquet files, see parquet.py; mosaicml-streaming has no such format.
    "parquet": ("data",),
    # Files of other libraries, as they are: see the packages beside this module.
    "megatron": ("data", "meta"),
}
"""Kinds of files that a shard of each format consists of, in the order of `Shard.files`."""

MAX_BYTES = (1 << 32) - 1
"""Largest size in bytes of a file with offsets, which have 32 bits."""

MAX_NUMBER = 1 << 44
"""Largest size of a file in bytes, and largest number of samples in it. With this limit, sums over all shards stay
below 64 bits."""

_OWN = {"version", "format", "samples", "compression", "hashes"}
_OWN |= {f"{form}_{part}" for form in ("raw", "zip") for part in ("data", "meta")}
"""Fields of a shard's entry in the index that do not go into `Shard.settings`."""

_SMALL = {"mds", "json", "xsv", "csv", "tsv"}
"""Formats of mosaicml-streaming, whose files have offsets of 32 bits."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {form: {"size_limit": None} if form in _SMALL else {} for form in FORMATS}
"""Settings, by format, that only mosaicml-streaming's own reader needs. They are written with their default values."""

_STEP = r"(?!\.{1,2}(?:/|\Z))[^/\\\0]+"
_PLAIN_PATH = re.compile(f"{_STEP}(?:/{_STEP})*")
_OURS = re.compile(r"(?:.*/)?(?:index\.json|\.penstock(?:/.*)?)", re.DOTALL | re.IGNORECASE)
"""Names of files in a cache's folder that are not shards. A shard with such a name would overwrite the cache's own
state, which decides which of the user's files are removed."""
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")
_NONE: Mapping[str, str] = {}


class _Bad(Exception):
    """Error about one field of a shard's entry in the index. `read_index` adds the shard's name to the message."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")


def read_index(data: bytes, where: str) -> list[Shard]:
    """Return the shards of an index. `where` is its address, for messages. Raises DatasetError."""
    try:
        entries = _entries(data)
    except _Bad as error:
        raise DatasetError(f"{where}: {error}") from None
    shards: list[Shard] = []
    known: dict[str, Mapping[str, Any]] = {}
    files: dict[str, StoredFile] = {}
    for number, entry in enumerate(entries):
        try:
            shards.append(_shard(entry, known, files))
        except (_Bad, DatasetError) as error:
            raise DatasetError(f"{where}: shard {number}: {error}") from None
    return shards


def write_index(shards: Iterable[Shard]) -> bytes:
    """Return the index as mosaicml-streaming writes it, byte for byte."""
    index = {"version": VERSION, "shards": [_entry(shard) for shard in shards]}
    return json.dumps(index, sort_keys=True).encode()


def join_indexes(parts: Iterable[tuple[str, Iterable[Shard]]]) -> list[Shard]:
    """Return the shards of several folders as those of one dataset in their common folder. `parts`: (path of the folder
    below the common one, its shards) for each."""
    return [
        replace(shard, files=tuple(_below(folder, file) for file in shard.files))
        for folder, shards in parts
        for shard in shards
    ]


def _entries(data: bytes) -> list[Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        index = json.loads(data.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _Bad("is not JSON:", str(error)) from None
    if not isinstance(index, dict):
        raise _Bad("is not an index:", f"it must be a JSON object, got {_kind(index)}")
    if "version" not in index:
        raise _Bad("version", "is missing")
    _check_version(index["version"])
    shards = index.get("shards")
    if not isinstance(shards, list):
        raise _Bad("shards", f"must be a list, got {_kind(shards)}")
    return shards


def _check_version(version: object) -> None:
    if type(version) is not int or version != VERSION:
        raise _Bad("version", f"must be {VERSION}, got {version!r}")


def _shard(entry: Any, known: dict[str, Mapping[str, Any]], files: dict[str, StoredFile]) -> Shard:
    if not isinstance(entry, dict):
        raise _Bad("its entry", f"must be an object, got {_kind(entry)}")
    _check_version(entry.get("version"))
    form = entry.get("format")
    parts = FORMATS.get(form) if isinstance(form, str) else None
    if parts is None or not isinstance(form, str):
        raise _Bad("format", f"must be one of {', '.join(FORMATS)}, got {form!r}")
    samples = _count(entry, "samples", "samples")
    compression = entry.get("compression")
    if compression is None:
        compression = ""
    elif isinstance(compression, str) and compression:
        parse_compression(compression)
    else:
        raise _Bad("compression", f"must be a name or null, got {_kind(compression)}")
    pairs = []
    for part in parts:
        raw = _stored(entry, f"raw_{part}", files)
        packed = _stored(entry, f"zip_{part}", files) if entry.get(f"zip_{part}") is not None else None
        if (packed is None) == bool(compression):
            what = "is missing, though compression is" if compression else "must be absent, because compression is"
            raise _Bad(f"zip_{part}", f"{what} {compression or None!r}")
        if form in _SMALL and raw.size > MAX_BYTES:
            raise _Bad(f"raw_{part}.bytes", f"must be at most {MAX_BYTES}, the limit of its offsets, got {raw.size}")
        pairs.append(ShardFile(raw, packed))
    rest = {**_DEFAULTS[form], **{name: value for name, value in entry.items() if name not in _OWN}}
    key = f"{form} {rest!r}"
    settings = known.get(key)
    if settings is None:
        _CHECKS[form](rest)
        settings = known[key] = rest
    return Shard(form, samples, tuple(pairs), compression, settings)


def _stored(entry: dict[str, Any], field: str, files: dict[str, StoredFile]) -> StoredFile:
    info = entry.get(field)
    if not isinstance(info, dict):
        raise _Bad(field, f"must be an object, got {_kind(info)}" if field in entry else "is missing")
    name = info.get("basename")
    if not isinstance(name, str):
        raise _Bad(f"{field}.basename", f"must be a string, got {_kind(name)}")
    if not _PLAIN_PATH.fullmatch(name):
        raise _Bad(f"{field}.basename", f"must be a plain path below the dataset's folder, got {name!r}")
    encoded = name.encode(errors="replace")
    if encoded.decode() != name or len(encoded) > 3000 or any(len(step) > 255 for step in encoded.split(b"/")):
        raise _Bad(f"{field}.basename", f"must be a name that a file can have, got {name[:100]!r}")
    if _OURS.fullmatch(name):
        raise _Bad(f"{field}.basename", f"must not be a name that the cache uses itself, got {name!r}")
    size = _count(info, "bytes", f"{field}.bytes")
    hashes = info.get("hashes")
    if hashes is None or hashes == {}:
        hashes = _NONE
    elif not isinstance(hashes, dict):
        raise _Bad(f"{field}.hashes", f"must be an object, got {_kind(hashes)}")
    for algorithm, digest in hashes.items():
        if not isinstance(digest, str) or not _HEXADECIMAL.fullmatch(digest):
            raise _Bad(f"{field}.hashes.{algorithm}", f"must be a digest in hexadecimal, got {digest!r}")
    stored = StoredFile(name, size, hashes)
    if files.setdefault(name, stored) != stored:
        raise _Bad(f"{field}.basename", f"is {name!r}, which another entry lists with another size or hash")
    return stored


def _count(entry: dict[str, Any], key: str, field: str) -> int:
    value = entry.get(key)
    if type(value) is not int:
        raise _Bad(field, f"must be an integer, got {_kind(value)}" if key in entry else "is missing")
    if value < 0:
        raise _Bad(field, f"must be at least 0, got {value}")
    if value > MAX_NUMBER:
        raise _Bad(field, f"must be at most {MAX_NUMBER}, got more")
    return value


def _names(rest: dict[str, Any], field: str) -> list[str]:
    value = rest.get(field)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _Bad(field, "must be a list of strings" if field in rest else "is missing")
    return value


def _columns(rest: dict[str, Any]) -> dict[str, str]:
    names, encodings = _names(rest, "column_names"), _names(rest, "column_encodings")
    if len(set(names)) != len(names):
        raise _Bad("column_names", f"must be unique, got {', '.join(names)}")
    if len(names) != len(encodings):
        raise _Bad("column_encodings", f"must have one entry for each of {len(names)} columns, got {len(encodings)}")
    return dict(zip(names, encodings, strict=True))


def _check_mds(rest: dict[str, Any]) -> None:
    columns = _columns(rest)
    for name, encoding in columns.items():
        try:
            check_encoding(encoding)
        except DatasetError as error:
            raise _Bad("column_encodings", f"is invalid for column {name!r}: {error.message}") from None
    sizes = rest.get("column_sizes")
    if not isinstance(sizes, list) or len(sizes) != len(columns):
        raise _Bad("column_sizes", f"must be a list with {len(columns)} sizes")
    for name, size in zip(columns, sizes, strict=True):
        if size is not None and (type(size) is not int or not 0 <= size <= MAX_BYTES):
            raise _Bad("column_sizes", f"must be a number of bytes or null for column {name!r}, got {size!r}")


def _check_text(field: str, columns: dict[str, str]) -> None:
    for name, encoding in columns.items():
        if encoding not in TEXT_ENCODINGS:
            known = ", ".join(TEXT_ENCODINGS)
            raise _Bad(field, f"must be one of {known} for column {name!r}, got {encoding!r}")


def _check_json(rest: dict[str, Any]) -> None:
    columns = rest.get("columns")
    if not isinstance(columns, dict) or not all(isinstance(encoding, str) for encoding in columns.values()):
        raise _Bad("columns", "must be an object of strings" if "columns" in rest else "is missing")
    _check_text("columns", columns)


def _check_xsv(rest: dict[str, Any]) -> None:
    _check_csv(rest)
    _mark(rest, "separator")


def _check_csv(rest: dict[str, Any]) -> None:
    _check_text("column_encodings", _columns(rest))
    _mark(rest, "newline")


def _mark(rest: dict[str, Any], field: str) -> None:
    if not isinstance(rest.get(field), str) or not rest[field]:
        raise _Bad(field, "must be a string that is not empty")


def _check_nothing(rest: dict[str, Any]) -> None:
    del rest  # the file describes its columns itself


_CHECKS = {
    "mds": _check_mds,
    "json": _check_json,
    "xsv": _check_xsv,
    "csv": _check_csv,
    "tsv": _check_csv,
    "parquet": _check_nothing,
    "megatron": _check_nothing,
}


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _entry(shard: Shard) -> dict[str, Any]:
    entry: dict[str, Any] = {
        **_DEFAULTS[shard.format],
        **shard.settings,
        "version": VERSION,
        "format": shard.format,
        "samples": shard.samples,
        "compression": shard.compression or None,
        "hashes": sorted(shard.files[0].raw.hashes),
    }
    for part, file in zip(FORMATS[shard.format], shard.files, strict=True):
        entry[f"raw_{part}"] = _info(file.raw)
        entry[f"zip_{part}"] = None if file.packed is None else _info(file.packed)
    return entry


def _info(file: StoredFile) -> dict[str, Any]:
    return {"basename": file.name, "bytes": file.size, "hashes": dict(file.hashes)}


def _below(folder: str, file: ShardFile) -> ShardFile:
    def moved(stored: StoredFile) -> StoredFile:
        return replace(stored, name=f"{folder}/{stored.name}")

    return ShardFile(moved(file.raw), None if file.packed is None else moved(file.packed))
