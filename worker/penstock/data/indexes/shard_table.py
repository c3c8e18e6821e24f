"""Table of an index's shards: columns (arrays with a number for each shard or unit), and the shards themselves, each
made when it is used, because a million Shard objects would take gigabytes.

msgspec parses the fields that the columns need. Of entries alike but for names, digests and numbers one is checked by
`index.shard_of`, and so is each with an unusual field or a wrong one, which it names. The columns keep where each entry
lies in the index and its digest.

A *unit* decides the order and is read as a whole: a block of a file (such as a row group), or a shard without blocks. A
*part* can be fetched without the rest of its file: a block, or else a *span* of samples (see Shard.spans).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.fields import InvalidField
from penstock.data.formats.file_ranges import are_large_parts
from penstock.data.formats.format_table import FORMATS
from penstock.data.formats.index import (
    Entry,
    EntryFile,
    check_name,
    check_size,
    entries_of,
    parts_of,
    read_entry,
    shard_of,
    write_index,
)
from penstock.data.formats.shards import Shard, StoredFile
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import DatasetError

RANGES, HASHED = 1, 2
"""Flags of a shard. RANGES: its parts are worth fetching one by one. HASHED: a raw file of it has a hash."""
KEPT = 10_000
"""Shards that are kept as objects; when this is reached, all are dropped."""

AT_ONCE = 10_000
"""Entries that are parsed at a time."""

_COLUMNS = ("sizes", "begins", "lengths", "checks", "flags", "counts", "part_sizes", "part_counts")
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")

_Files = tuple[tuple[EntryFile, EntryFile | None], ...]
"""Raw and packed form of each file of a shard."""


class _UsualEntry(Entry, gc=False, forbid_unknown_fields=True):
    """Entry with the usual fields and settings alone."""


def _kind_of(entry: Entry) -> tuple[object, ...]:
    """Return all that the checks of `shard_of` depend on, except names, digests and numbers."""
    absent = entry.version, entry.raw_meta is None, entry.zip_data is None, entry.zip_meta is None
    columns = entry.column_names, entry.column_encodings, entry.column_sizes, entry.columns
    others = entry.newline, entry.separator, entry.records, entry.splits, entry.partitions, entry.fields, entry.table
    parts = bool(entry.blocks), bool(entry.spans), bool(entry.ranges), bool(entry.deleted)
    return entry.format, entry.compression, absent, *map(bytes, (*columns, *others)), parts


def _files_of(entry: Entry) -> _Files:
    data = entry.raw_data, entry.zip_data
    if entry.raw_meta is None or len(FORMATS[entry.format].file_kinds) == 1:
        return (data,)
    return data, (entry.raw_meta, entry.zip_meta)


_is_usual_name = re.compile(r"(?:[\w-][\w.=-]{0,99}/){0,20}(?!index)[\w-][\w.=-]{0,99}", re.ASCII).fullmatch
"""True for most names that `check_name` accepts, and for no other."""
_usual_entry = msgspec.json.Decoder(_UsualEntry).decode


@dataclass
class Facts:
    """Facts about all shards of an index together."""

    shards: int = 0
    units: int = 0
    hashed: bool = True
    """The index has a hash of each file, in its raw or packed form."""
    blocks: bool = False
    spans: bool = False
    splits: bool = False
    """A shard names the splits, such as "train", of its samples; see formats/records/energon_folder.py."""
    formats: tuple[str, ...] = ()
    decoded_bytes: int = 0
    decoded_samples: int = 0
    """Bytes (`decoded_bytes`) and samples of all shards whose decoded size is known."""


class ShardTable(Sequence[Shard]):
    """Sequence of an index's shards, with columns: arrays of facts about all of them."""

    def __init__(
        self, text: bytes | Descriptor, where: str, facts: Facts, fingerprint: str, columns: Mapping[str, Ints]
    ) -> None:
        """Keep what `of` made. `text`: the index, or its open file; `where`: for errors."""
        self._text, self._where, self._columns = text, where, columns
        self.facts = facts
        self.fingerprint = fingerprint
        """Digest of formats, samples, and names, sizes and hashes of files."""
        self.sizes = columns["sizes"]
        """Number of samples in each unit; shape (units,)."""
        self.counts: Ints | None = columns["counts"] if facts.blocks else None
        """Number of units in each shard; shape (shards,). None if each shard is one unit."""
        self.parts: tuple[Ints, Ints] | None = (columns["part_sizes"], columns["part_counts"]) if facts.spans else None
        """(samples in each part that can be fetched alone, parts in each shard); None if the parts are the units."""
        self.has_ranges: npt.NDArray[np.bool_] = (columns["flags"] & RANGES).astype(bool)
        """True for each shard whose parts are worth fetching one by one; shape (shards,)."""
        self.hashed: npt.NDArray[np.bool_] = (columns["flags"] & HASHED).astype(bool)
        """True for each shard if the index has a hash of one of its raw files; shape (shards,)."""
        self._known: dict[str, Mapping[str, Any]] = {}
        self._kept: dict[int, Shard] = {}
        self.reopen: tuple[Callable[..., ShardTable], tuple[object, ...]] | None = None
        """Function and arguments that make the table where it is unpickled; None: pickle the (small) text."""

    def __reduce__(self) -> tuple[Callable[..., ShardTable], tuple[object, ...]]:
        own = (self._text, self._where, self.facts, self.fingerprint, self._columns)
        return self.reopen or (ShardTable, own)

    @staticmethod
    def of(data: bytes, where: str, text: Descriptor | None = None) -> ShardTable:
        """Return an index's table. Raise DatasetError with shard and field if it is invalid. `text`: open file to read
        entries from, instead of keeping `data`; `where`: for errors."""
        entries, columns = entries_of(data, where), _Columns(where)
        begin = _begin_of(entries[0], data) if entries else 0
        for first in range(0, len(entries), AT_ONCE):
            texts = entries[first : first + AT_ONCE]
            columns.add(first, texts)
            for entry in texts:
                begin = data.index(b"{", begin)
                columns.begins.append(begin)
                begin += len(entry)
        files: dict[str, StoredFile] = {}
        for number in columns.owners_of_equal_names():
            read_entry(entries[number], f"{where}: shard {number}", {}, files)
        fingerprint = xxhash.xxh3_128(f"stream of {len(entries)}\n".encode() + "".join(columns.lines).encode())
        return ShardTable(text or data, where, columns.facts, fingerprint.hexdigest(), columns.arrays())

    @staticmethod
    def of_shards(shards: Sequence[Shard], where: str) -> ShardTable:
        return ShardTable.of(write_index(shards), where)

    def __len__(self) -> int:
        return self.facts.shards

    @overload
    def __getitem__(self, at: int) -> Shard: ...
    @overload
    def __getitem__(self, at: slice) -> list[Shard]: ...
    def __getitem__(self, at: int | slice) -> Shard | list[Shard]:
        numbers = range(len(self))[at]
        return self._shard(numbers) if isinstance(numbers, int) else [self._shard(number) for number in numbers]

    def _shard(self, number: int) -> Shard:
        shard = self._kept.get(number)
        if shard is None:
            begin, length = int(self._columns["begins"][number]), int(self._columns["lengths"][number])
            text = self._text
            entry = text[begin : begin + length] if isinstance(text, bytes) else text.read(length, begin)
            if _check(entry) != self._columns["checks"][number]:
                raise DatasetError(
                    f"{self._where} was written again since the dataset was opened. Open the dataset again"
                )
            shard = shard_of(entry, self._known, {})
            kept = self._kept
            if len(kept) >= KEPT:  # a new dict, because other threads may read the old one
                kept = self._kept = {}
            kept[number] = shard
        return shard


class _Columns:
    def __init__(self, where: str) -> None:
        self.facts = Facts()
        self.lines: list[str] = []
        """For each shard, the text that goes into the fingerprint."""
        self.begins = array("q")
        """Offset of each entry in the index, in bytes."""
        self._where = where
        self._columns: dict[str, list[Any]] = {name: [np.zeros(0, np.int64)] for name in (*_COLUMNS, "names", "owners")}
        self._kinds: set[tuple[object, ...]] = set()

    def add(self, first: int, texts: Sequence[msgspec.Raw]) -> None:
        """Add the entries of the shards from number `first` on. Raises DatasetError if one is invalid."""
        try:
            entries: list[Entry] = list(map(_usual_entry, texts))
            self._check(entries, texts)
        except (msgspec.DecodeError, InvalidField, DatasetError):  # an unusual field, or a wrong one
            for number, text in enumerate(texts, first):
                self._note(read_entry(text, f"{self._where}: shard {number}", {}, {}))
            entries = [msgspec.json.decode(text, type=Entry) for text in texts]
        files = [_files_of(entry) for entry in entries]
        names = [[file.basename for forms in pairs for file in forms if file is not None] for pairs in files]
        blocks = [entry.blocks or (entry.samples,) for entry in entries]
        parts = [entry.blocks or entry.spans or (entry.samples,) for entry in entries]
        self._keep(
            sizes=[size for each in blocks for size in each],
            counts=list(map(len, blocks)),
            part_sizes=[size for each in parts for size in each],
            part_counts=list(map(len, parts)),
            lengths=list(map(len, texts)),
            checks=list(map(_check, texts)),
            flags=[
                RANGES * (bool(entry.ranges) and _has_ranges(entry)) | HASHED * any(raw.hashes for raw, _ in pairs)
                for entry, pairs in zip(entries, files, strict=True)
            ],
            names=[hash(name) for each in names for name in each],
            owners=np.repeat(np.arange(first, first + len(texts)), list(map(len, names))),
        )
        self._add_facts(entries, files)
        for entry, pairs in zip(entries, files, strict=True):
            listed = [(raw.basename, raw.bytes, sorted(raw.hashes.items()) if raw.hashes else []) for raw, _ in pairs]
            self.lines.append(f"{entry.format} {entry.samples} {listed}\n")
            if entry.deleted:
                self.lines.append(f"deleted rows {_check(entry.deleted.encode())}\n")
            if entry.content:
                self.lines.append(f"content {entry.content}\n")
            if entry.blocks:  # the order depends on them
                self.lines.append(f"blocks {tuple(entry.blocks)} of {entry.decoded_bytes} bytes\n")

    def _check(self, entries: Sequence[Entry], texts: Sequence[msgspec.Raw]) -> None:
        """Raise InvalidField or DatasetError if `shard_of` would refuse one of these entries."""
        for entry, text in zip(entries, texts, strict=True):
            kind = _kind_of(entry)
            if kind not in self._kinds:
                self._note(shard_of(text, {}, {}))
                self._kinds.add(kind)
            if entry.blocks or entry.spans:
                parts_of(entry)
        pairs = [pair for entry in entries for pair in _files_of(entry)]
        smallest = min(FORMATS[name].max_bytes for name in self.facts.formats)
        check_size("bytes", max(raw.bytes for raw, _ in pairs), smallest)
        files = [file for pair in pairs for file in pair if file is not None]
        digests = [digest for file in files if file.hashes for digest in file.hashes.values()]
        if not (all(digests) and _HEXADECIMAL.issuperset("".join(digests))):
            raise InvalidField("hashes", "must be digests in hexadecimal")
        if not all(_is_usual_name(file.basename) for file in files):
            for file in files:
                check_name("basename", file.basename)

    def _note(self, shard: Shard) -> None:
        self.facts.splits |= bool(shard.settings.get("splits"))
        if shard.format not in self.facts.formats:
            self.facts.formats += (shard.format,)

    def _keep(self, **columns: Any) -> None:
        for name, values in columns.items():
            self._columns[name].append(np.asarray(values, np.int64))

    def _add_facts(self, entries: Sequence[Entry], files: Sequence[_Files]) -> None:
        facts, sized = self.facts, [entry for entry in entries if entry.decoded_bytes]
        facts.shards += len(entries)
        facts.units += sum(len(entry.blocks) if entry.blocks else 1 for entry in entries)
        facts.hashed = facts.hashed and all(
            raw.hashes or (packed is not None and packed.hashes) for pairs in files for raw, packed in pairs
        )
        facts.blocks |= any(entry.blocks for entry in entries)
        facts.spans |= any(entry.spans for entry in entries)
        facts.decoded_bytes += sum(entry.decoded_bytes for entry in sized)
        facts.decoded_samples += sum(entry.samples for entry in sized)

    def owners_of_equal_names(self) -> list[int]:
        """Return the shards that have a file whose name is listed more than once."""
        _, numbers, counts = np.unique(self._array("names"), return_inverse=True, return_counts=True)
        owners: list[int] = np.unique(self._array("owners")[counts[numbers] > 1]).tolist()
        return owners

    def _array(self, name: str) -> Ints:
        return np.concatenate(self._columns[name])

    def arrays(self) -> dict[str, Ints]:
        self._keep(begins=self.begins)
        return {name: self._array(name) for name in _COLUMNS}


def _has_ranges(entry: Entry) -> bool:
    """Return the same as `file_ranges.has_ranges` for the entry's shard."""
    packed = entry.zip_data is not None or entry.zip_meta is not None
    return not packed and are_large_parts(len(entry.blocks or entry.spans or ()), entry.raw_data.bytes)


def _begin_of(entry: msgspec.Raw, data: bytes) -> int:
    addresses = (np.frombuffer(each, np.uint8).__array_interface__["data"][0] for each in (entry, data))
    return int(next(addresses) - next(addresses))


def _check(data: Any) -> int:
    """Return a digest of bytes as a number from 0 to 2^63 - 1."""
    return xxhash.xxh3_64_intdigest(data) >> 1
