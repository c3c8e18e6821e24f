"""Shards of a dataset's index as columns: what orders and epochs need of all shards. A Shard is made on demand.

A small index is a list of shards. A large one has a file of columns, which all processes of the host map:

    header    4096 bytes: digest of the header, JSON padded with spaces
    lines     text from which the dataset's fingerprint is computed
    columns   8 bytes for each shard or unit, see `_COLUMNS`; flags: 1 byte

Its `begins`, `lengths` and `checks` say where a shard's entry lies in index.json. The entry is read from there,
compared with its check, and parsed, when the shard is asked for: so names of files come from the index alone.
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
"""Flags of a shard: its parts are worth fetching one by one; a raw file of it has a hash."""
PIECE = 1 << 20
KEPT = 1024
"""Number of shards of a large index that stay in memory."""
_COLUMNS = {
    **dict.fromkeys(("sizes", "starts", "begins", "lengths", "counts", "part_sizes", "part_counts"), "<i8"),
    "checks": "<u8",
}


@dataclass
class Facts:
    """Values that hold for all shards of an index together."""

    shards: int = 0
    units: int = 0
    hashed: bool = True
    """True if each file has a hash, in its raw or packed form."""
    blocks: bool = False
    """True if any shard has blocks."""
    spans: bool = False
    """True if any shard has spans."""
    splits: bool = False
    """True if any shard names splits, see formats/records/energon_folder.py."""
    formats: tuple[str, ...] = ()
    decoded_bytes: int = 0
    decoded_samples: int = 0
    """Bytes and samples of all shards whose decoded size is known."""


class _Collected:
    """Columns of shards that are added one by one."""

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
    """Shards of an index, in its order, and columns of them."""

    facts: Facts
    sizes: Ints
    """Number of samples in each unit that is read as a whole: a block, or else the shard."""
    starts: Ints
    """Number of the first sample of each unit, and at the end the number of all samples; shape (units + 1,)."""
    counts: Ints | None
    """Number of units in each shard; None if each has one."""
    flags: npt.NDArray[np.uint8]
    parts: tuple[Ints, Ints] | None
    """Number of samples in each part that can be fetched alone, and number of parts in each shard; None if the parts
    are the units."""

    def __len__(self) -> int:
        return self.facts.shards

    @property
    def has_ranges(self) -> npt.NDArray[np.bool_]:
        """True for each shard whose parts are worth fetching one by one."""
        return (self.flags & RANGES).astype(bool)

    @property
    def hashed(self) -> npt.NDArray[np.bool_]:
        """True for each shard that has a hash of a raw file."""
        return (self.flags & HASHED).astype(bool)

    def describe(self, digest: Any) -> None:
        """Add to a digest what the fingerprint of a dataset consists of."""
        raise NotImplementedError


class ListedShards(ShardTable):
    """Shards of a small index, which are in memory."""

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
    """Shards of a large index, by its file of columns."""

    def __init__(self, index: Descriptor, columns: Descriptor, digest: str, where: str) -> None:
        """
        Args:
            digest: digest of the index, to which the columns must belong.
            where: address of the index, for errors.

        Raises ValueError if the file is not that of this index, or is damaged.
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
    """Write the columns of an index into an empty file, and return the index's digest. Raises DatasetError if it is not
    an index."""
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
        raise ValueError("its header is damaged")
    header: dict[str, Any] = json.loads(data[32:])
    if header["version"] != VERSION or header["index"] != digest:
        raise ValueError("it belongs to another index")
    if _digest(columns, HEADER_BYTES, header["size"]) != header["body"]:
        raise ValueError("its columns are damaged")
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
    """Return the shards of which a file has the name of another file with another content, by digests of both."""
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
