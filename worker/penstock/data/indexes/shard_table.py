"""Shards of a dataset's index in the form of columns: arrays with the facts that an epoch's order needs of all shards,
such as their numbers of samples. A Shard object is made only when a shard is used.

A small index is a list of shards. For a large one there is a file of columns, which all processes of the host map:

    header    4096 bytes: digest of the header, JSON padded with spaces
    lines     text from which the dataset's fingerprint is computed
    columns   8 bytes for each shard or unit, see `_COLUMNS`; flags: 1 byte

The columns `begins`, `lengths` and `checks` hold the offset, length and digest of each shard's entry in index.json.
When a shard is used, its entry is read from index.json, compared with the digest, and parsed. So the names of files
are never taken from the file of columns.

A *unit* decides the order and is read as a whole: a block of a file (such as a row group), or a shard without blocks. A
*part* can be fetched without the rest of its file: a block, or else a *span* of samples (see Shard.spans).
"""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.fields import InvalidField
from penstock.data.formats.index import invalid_index, shard_of
from penstock.data.formats.ranges.file_ranges import has_ranges
from penstock.data.formats.shards import Shard
from penstock.data.indexes.index_entries import IndexEntries
from penstock.data.indexes.shards_on_demand import ShardsOnDemand
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import DatasetError

__all__ = ["ListedShards", "ShardTable", "StoredShards", "write_columns"]

VERSION = 2
HEADER_BYTES = 4096
RANGES, HASHED = 1, 2
"""Flags of a shard. RANGES: its parts are worth fetching one by one. HASHED: the index has a hash of one of its files
in decompressed form."""
PIECE = 1 << 20
KEPT = 1024
"""Largest number of shards of a large index that are kept as objects; when it is reached, all are dropped."""
_COLUMNS = {
    **dict.fromkeys(("sizes", "starts", "begins", "lengths", "counts", "part_sizes", "part_counts"), "<i8"),
    "checks": "<u8",
}


@dataclass
class Facts:
    """Facts about all shards of an index together."""

    shards: int = 0
    units: int = 0
    hashed: bool = True
    """True if the index has a hash of each file, in its decompressed or compressed form."""
    blocks: bool = False
    """True if any shard has blocks (such as row groups)."""
    spans: bool = False
    """True if any shard has spans (consecutive samples that can be fetched alone)."""
    splits: bool = False
    """True if any shard names the splits, such as "train", that its samples belong to; see
    formats/records/energon_folder.py."""
    formats: tuple[str, ...] = ()
    decoded_bytes: int = 0
    decoded_samples: int = 0
    """`decoded_bytes` and `decoded_samples`: bytes and number of samples of all shards whose decoded size is known."""


class _Collected:
    """Columns of an index's shards, while the shards are added one by one."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.sizes, self.counts, self.flags = array("q"), array("q"), array("B")
        self.part_sizes, self.part_counts = array("q"), array("q")

    def add(self, shard: Shard) -> None:
        facts = self.facts
        facts.shards += 1
        facts.units += len(shard.units)
        facts.hashed &= all(file.raw.hashes or (file.packed and file.packed.hashes) for file in shard.files) is True
        facts.blocks |= bool(shard.blocks)
        facts.spans |= bool(shard.spans)
        facts.splits |= bool(shard.settings.get("splits"))
        if shard.format not in facts.formats:
            facts.formats += (shard.format,)
        if shard.decoded_bytes:
            facts.decoded_bytes += shard.decoded_bytes
            facts.decoded_samples += shard.samples
        self.sizes.extend(shard.units)
        self.counts.append(len(shard.units))
        self.part_sizes.extend(shard.parts)
        self.part_counts.append(len(shard.parts))
        self.flags.append(RANGES * has_ranges(shard) | HASHED * shard.is_verifiable)


class ShardTable(ShardsOnDemand):
    """Sequence of an index's shards, in its order, with columns: arrays of facts about all of the shards."""

    facts: Facts
    sizes: Ints
    """Number of samples in each unit, which is a block or a shard without blocks; shape (units,)."""
    starts: Ints
    """Number of the first sample of each unit, and at the end the number of all samples; shape (units + 1,)."""
    counts: Ints | None
    """Number of units in each shard; shape (shards,). None if each shard is one unit."""
    flags: npt.NDArray[np.uint8]
    parts: tuple[Ints, Ints] | None
    """(number of samples in each part that can be fetched alone, number of parts in each shard), two arrays; None if
    the parts are the same as the units."""

    def __len__(self) -> int:
        return self.facts.shards

    @property
    def has_ranges(self) -> npt.NDArray[np.bool_]:
        """True for each shard whose parts are worth fetching one by one; shape (shards,)."""
        return (self.flags & RANGES).astype(bool)

    @property
    def hashed(self) -> npt.NDArray[np.bool_]:
        """True for each shard if the index has a hash of one of its decompressed files; shape (shards,)."""
        return (self.flags & HASHED).astype(bool)

    def describe(self, digest: Any) -> None:
        """Update `digest`, a hash object, with the facts about the shards that make the dataset's fingerprint."""
        raise NotImplementedError


class ListedShards(ShardTable):
    """Table of a small index, whose shards are all in memory."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = list(shards)
        columns = _Collected()
        for shard in self._shards:
            columns.add(shard)
        self.facts = columns.facts
        self.sizes, self.flags = np.array(columns.sizes, np.int64), np.array(columns.flags, np.uint8)
        self.starts = _starts(self.sizes)
        self.counts = np.array(columns.counts, np.int64) if columns.facts.blocks else None
        parts = np.array(columns.part_sizes, np.int64), np.array(columns.part_counts, np.int64)
        self.parts = parts if columns.facts.spans else None

    def describe(self, digest: Any) -> None:
        for shard in self._shards:
            digest.update(_line(shard))

    def _shard(self, number: int) -> Shard:
        return self._shards[number]


class StoredShards(ShardTable):
    """Table of a large index, read from its file of columns."""

    def __init__(self, index: Descriptor, columns: Descriptor, digest: str, where: str) -> None:
        """Map the file of columns.

        Args:
            index: the open index.
            columns: the open file of columns.
            digest: digest of the index to which the columns must belong.
            where: address of the index, for errors.

        Raises ValueError if the file belongs to another index, or is damaged.
        """
        header = _read_header(columns, digest)
        self.facts = Facts(**{**header["facts"], "formats": tuple(header["facts"]["formats"])})
        self._index, self._columns, self._where = index, columns, where
        self._line_bytes = header["lines"]
        mapped = mmap.mmap(columns.fileno(), header["size"], access=mmap.ACCESS_READ)
        found = {name: np.frombuffer(mapped, kind, count, begin) for name, kind, count, begin in header["columns"]}
        self.sizes, self.starts, self.flags = found["sizes"], found["starts"], found["flags"]
        self.counts = found.get("counts")
        self.parts = (found["part_sizes"], found["part_counts"]) if self.facts.spans else None
        self._begins, self._lengths, self._checks = found["begins"], found["lengths"], found["checks"]
        self._known: dict[str, Mapping[str, Any]] = {}
        self._kept: dict[int, Shard] = {}

    def describe(self, digest: Any) -> None:
        for piece in _pieces(self._columns, HEADER_BYTES, HEADER_BYTES + self._line_bytes):
            digest.update(piece)

    def _shard(self, number: int) -> Shard:
        shard = self._kept.get(number)
        if shard is None:
            text = self._index.read(int(self._lengths[number]), int(self._begins[number]))
            if xxhash.xxh3_64_intdigest(text) != self._checks[number]:
                raise DatasetError(
                    f"{self._where} was written again since the dataset was opened. Write new data to a new folder, or "
                    "open the dataset again"
                )
            shard = shard_of(json.loads(text), self._known, {})
            kept = self._kept
            if len(kept) >= KEPT:  # a new dict, because other threads may read the old one
                kept = self._kept = {}
            kept[number] = shard
        return shard


def write_columns(index: Descriptor, file: BinaryIO, where: str) -> str:
    """Write the columns of an index into an empty file, and return the index's digest. Raise DatasetError if `index` is
    not an index. `where`: address of the index, for errors."""
    columns, entries = _Collected(), IndexEntries(index)
    begins, lengths, checks = array("q"), array("q"), array("Q")
    names, contents, owners = array("Q"), array("Q"), array("q")
    known: dict[str, Mapping[str, Any]] = {}
    file.write(bytes(HEADER_BYTES))
    lines = 0
    try:
        for entry in entries:
            try:
                shard = shard_of(entry.value, known, {})
            except (InvalidField, DatasetError) as error:
                raise invalid_index(f"{where}: shard {len(begins)}", error) from None
            for stored in (one for pair in shard.files for one in (pair.raw, pair.packed) if one is not None):
                names.append(xxhash.xxh3_64_intdigest(stored.name.encode()))
                contents.append(xxhash.xxh3_64_intdigest(repr((stored.size, sorted(stored.hashes.items()))).encode()))
                owners.append(len(begins))
            columns.add(shard)
            begins.append(entry.begin)
            lengths.append(len(entry.text))
            checks.append(xxhash.xxh3_64_intdigest(entry.text))
            lines += file.write(_line(shard))
    except InvalidField as error:
        raise invalid_index(where, error) from None
    suspects = _same_names(names, contents, owners)
    del names, contents, owners
    files: dict[str, Any] = {}
    for number in suspects:
        text = index.read(lengths[number], begins[number])
        try:
            shard_of(json.loads(text), known, files)
        except (InvalidField, ValueError) as error:
            raise invalid_index(f"{where}: shard {number}", error) from None
    sizes = np.array(columns.sizes, np.int64)
    arrays: dict[str, Any] = {"sizes": sizes, "starts": _starts(sizes)}
    arrays |= {"begins": begins, "lengths": lengths, "checks": checks}
    if columns.facts.blocks:
        arrays["counts"] = columns.counts
    if columns.facts.spans:
        arrays |= {"part_sizes": columns.part_sizes, "part_counts": columns.part_counts}
    file.write(bytes(-lines % 8))
    at = HEADER_BYTES + lines + -lines % 8
    placed = []
    for name, values in [*arrays.items(), ("flags", columns.flags)]:
        kind = _COLUMNS.get(name, "u1")
        column = np.asarray(values).astype(kind, copy=False)
        placed.append((name, kind, len(column), at))
        at += file.write(column.data)
    file.flush()
    header = {
        "version": VERSION,
        "index": entries.digest,
        "size": at,
        "lines": lines,
        "facts": asdict(columns.facts),
        "columns": placed,
        "body": _digest(Descriptor(f"/proc/self/fd/{file.fileno()}"), HEADER_BYTES, at),
    }
    text_of = json.dumps(header).encode().ljust(HEADER_BYTES - 32)
    file.seek(0)
    file.write(xxhash.xxh3_128_hexdigest(text_of).encode() + text_of)
    file.flush()
    return entries.digest


def _read_header(columns: Descriptor, digest: str) -> dict[str, Any]:
    data = columns.read(HEADER_BYTES, 0)
    if len(data) != HEADER_BYTES or xxhash.xxh3_128_hexdigest(data[32:]).encode() != data[:32]:
        raise ValueError("the header of the file of columns is damaged")
    header: dict[str, Any] = json.loads(data[32:])
    if header["version"] != VERSION or header["index"] != digest:
        raise ValueError("the file of columns belongs to another index")
    if _digest(columns, HEADER_BYTES, header["size"]) != header["body"]:
        raise ValueError("the data in the file of columns are damaged")
    return header


def _digest(file: Descriptor, begin: int, end: int) -> str:
    digest = xxhash.xxh3_128()
    for piece in _pieces(file, begin, end):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(file: Descriptor, begin: int, end: int) -> Iterable[bytes]:
    for at in range(begin, end, PIECE):
        yield file.read(min(PIECE, end - at), at)


def _same_names(names: Any, contents: Any, owners: Any) -> list[int]:
    """Return the numbers of the shards with a file that has the same name as a different file.

    For each file of the index, `names` has the digest of its name, `contents` the digest of its size and hashes, and
    `owners` the number of its shard. Files of one name are different if their contents differ.
    """
    name, content = np.asarray(names), np.asarray(contents)
    order = np.argsort(name, kind="stable")
    differs = (name[order][1:] == name[order][:-1]) & (content[order][1:] != content[order][:-1])
    pairs = np.flatnonzero(differs)
    found: list[int] = np.unique(np.asarray(owners)[order[np.union1d(pairs, pairs + 1)]]).tolist()
    return found


def _starts(sizes: Ints) -> Ints:
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _line(shard: Shard) -> bytes:
    files = [(file.raw.name, file.raw.size, sorted(file.raw.hashes.items())) for file in shard.files]
    line = f"{shard.format} {shard.samples} {files}\n"
    if shard.blocks:  # the order depends on them
        line += f"blocks {shard.blocks} of {shard.decoded_bytes} bytes\n"
    return line.encode()
