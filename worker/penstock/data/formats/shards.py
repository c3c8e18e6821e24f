"""Description of a dataset's shards: plain data from the index that readers, writers and the cache share.

A shard is a file of consecutive samples, in some formats with a second file of the samples' offsets. Each is stored
raw, packed (compressed), or both. A large file may be fetched in parts: blocks, which are decoded as a whole (row
groups of Parquet), or spans, a few MiB of samples, each of which can be decoded alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from penstock.data.batch_columns import Columns
from penstock.data.ordering.permutation import Ints


@dataclass(frozen=True, slots=True)
class StoredFile:
    """File in the dataset's folder, or a range of a remote file that the cache stores as a file."""

    name: str
    """Path relative to the dataset's folder, with forward slashes; never outside of it."""
    size: int
    """In bytes."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Digests in hexadecimal, by the algorithm's name; empty if the writer stored none."""
    source: str = ""
    """Remote file that this file is a range of; "" for a whole file. Only a cache stores ranges."""
    begin: int = 0
    """Offset in `source` of the range's first byte; 0 for a whole file."""
    version: str = field(default="", compare=False)
    """Of a file at a remote: digest of its address, and the ETag or time that it had when it was indexed; "" if
    unknown (remote/file_versions.py)."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    raw: StoredFile
    packed: StoredFile | None = None
    """Compressed form, None if there is none. With one, the dataset's folder may lack the raw form."""


@dataclass(frozen=True, slots=True)
class Shard:
    format: str
    samples: int
    files: tuple[ShardFile, ...]
    compression: str = ""
    """Of the packed files: "zstd", "gz", "br", "snappy" or "bz2", optionally with ":level"; "" for none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All other fields of the shard's entry in the index, such as column names, encodings, separator."""
    blocks: tuple[int, ...] = ()
    """Number of samples in each block, in the order of the file; empty without blocks, or if the index lists none."""
    decoded_bytes: int = 0
    """Estimate, mostly too low, of the bytes that all decoded blocks take in memory; 0 if unknown."""

    spans: tuple[int, ...] = ()
    """Number of samples in each span; empty with blocks, for small files, and for formats that are read whole."""
    ranges: tuple[int, ...] = ()
    """Offsets in the file, in bytes, of its parts; shape (2 * parts + 1,), empty if unknown. First the begin and end of
    each part. Then one border of the bytes that all parts need: the begin of Parquet's footer, the end of Arrow's
    header; else the end of the file. For a Parquet file of 2 row groups and 950 bytes: (4, 500, 500, 900, 900)."""
    deleted: str = ""
    """Rows of a table's file that are deleted (parquet/table_files.py); "" if none is."""
    content: str = ""
    """Digest of what indexing read of the first file (contents.py); "" if unknown."""

    @property
    def units(self) -> tuple[int, ...]:
        """Number of samples in each unit that the shuffle moves as a whole: each block, or else the shard."""
        return self.blocks or (self.samples,)

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of samples in each part that can be fetched alone: each block or span, or else the shard."""
        return self.blocks or self.spans or (self.samples,)

    @property
    def name(self) -> str:
        """Name of the shard's first file, for errors."""
        return self.files[0].raw.name

    @property
    def size(self) -> int:
        return sum(file.raw.size for file in self.files)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """As StreamingDataset's arguments of the same names, except `encoded`."""

    allow_unsafe_types: bool = False
    """True if columns of pickles may be read, which can run any code."""
    images: Literal["pil", "array", "file"] = "pil"
    """"pil": images of Pillow; "array": numpy arrays; "file": bytes of the stored file, or for raw pixels of a PNG file
    (TIFF if PNG lacks the mode); pickles of MDS columns then stay bytes, too."""
    columns: Sequence[str] | None = None
    encoded: bool = False
    """True if values of MDS columns are returned as stored bytes, for conversion of datasets."""
    clips: Mapping[str, Any] = field(default_factory=dict)
    """By the name of the column with the videos or sounds."""
    fill: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_OPTIONS = ReadOptions()


class ShardReader(Protocol):
    """Open shard. Thread-safe, and usable in forked children.

    Optional methods: `get_many(rows: Sequence[int]) -> list[dict]`, faster than one call for each sample (see
    `rows_of`), and `get_columns(rows: Ints) -> Columns | None` (see `columns_of_rows`).
    """

    name: str

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample by column. Raises ShardCorruptError if the stored bytes are not valid."""

    def close(self) -> None:
        """Close the shard. Values stay valid, a read in progress ends normally, a later one raises ValueError."""


def rows_of(reader: ShardReader, rows: Sequence[int]) -> list[dict[str, Any]]:
    many = getattr(reader, "get_many", None)
    if many is None:
        return [reader[row] for row in rows]
    found: list[dict[str, Any]] = many(rows)
    return found


def columns_of_rows(reader: ShardReader, rows: Ints) -> Columns | None:
    """Return samples (at least one) by column; None if the reader cannot, or a sample cannot be read: the caller then
    reads row by row, which raises an error that names the sample."""
    columns = getattr(reader, "get_columns", None)
    if columns is None:
        return None
    try:
        found: Columns | None = columns(rows)
    except Exception:
        return None
    return found


@runtime_checkable
class BlockReader(Protocol):
    def load(self, block: int) -> None:
        """Decode block number `block`, if it is not in memory. Raises what `__getitem__` raises."""

    def forget(self, block: int) -> None:
        """Mark a block as not needed soon, so that its memory is freed before that of others."""
