"""Description of a dataset's shards: plain data from the index that readers, writers and the cache share.

A dataset is a folder with an index and shards. A shard is a file of consecutive samples, in some formats with a second
file that has the samples' offsets. Each file is stored raw, packed (compressed), or in both forms. A large file
may be fetched in parts. A part is either a block, which is decoded as a whole (a row group of Parquet), or a span: a
few MiB of consecutive samples, each of which can be decoded alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from penstock.data.batch_columns import Columns
from penstock.data.ordering.permutation import Ints

__all__ = [
    "DEFAULT_OPTIONS",
    "BlockReader",
    "ColumnReader",
    "ReadOptions",
    "Shard",
    "ShardFile",
    "ShardReader",
    "StoredFile",
    "columns_of_rows",
    "rows_of",
]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """File in the dataset's folder, or a range of a remote file that the cache stores as a file."""

    name: str
    """Path relative to the dataset's folder, with forward slashes; never a path to outside of this folder."""
    size: int
    """Size of the file in bytes."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Digests of the content in hexadecimal, by the algorithm's name; empty if the writer stored no digest."""
    source: str = ""
    """Name of the remote file that this file is a range of; "" for a whole file. Only a cache stores ranges as
    files."""
    begin: int = 0
    """Offset in `source` of the range's first byte; 0 for a whole file."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """File of a shard, in its raw form and perhaps also in a packed (compressed) form."""

    raw: StoredFile
    packed: StoredFile | None = None
    """Packed form of the file; None if there is only the raw form. With a packed form, the dataset's folder may lack
    the raw one."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard of a dataset (one file of consecutive samples, or two), as the dataset's index describes it."""

    format: str
    """Name of the format, a key of format_table.FORMATS."""
    samples: int
    files: tuple[ShardFile, ...]
    compression: str = ""
    """Compression of the packed files: "zstd", "gz", "br", "snappy" or "bz2", optionally with ":level"; "" for none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All other fields of the shard's entry in the index. Some of them its format's reader needs: column names,
    encodings, separator."""
    blocks: tuple[int, ...] = ()
    """Number of samples in each block of the file, in the order of the file. A block, such as a row group of Parquet,
    is decoded as a whole. Empty for a format without blocks, or if the index does not list them."""
    decoded_bytes: int = 0
    """Estimate, from the file's own description, of the number of bytes that the shard's blocks together take in memory
    once they are decoded; mostly too low. 0 if it is unknown."""

    spans: tuple[int, ...] = ()
    """Number of samples in each span of the file, in the order of the file. A span is a group of consecutive samples
    that can be fetched without the rest. Empty for files with blocks, for small files, and for formats that are read
    whole."""
    ranges: tuple[int, ...] = ()
    """Offsets in the file, in bytes, so that its parts (blocks or spans) can be fetched without the rest; shape (2 *
    parts + 1,), empty if unknown. First the beginning and the end of each part. Then one border of the bytes that all
    parts need: the beginning of Parquet's footer, the end of Arrow's header; for other formats the end of the file. For
    a Parquet file of 2 row groups and 950 bytes: (4, 500, 500, 900, 900)."""

    @property
    def units(self) -> tuple[int, ...]:
        """Number of samples in each unit that the shuffle moves as a whole: each block, or the shard if it has no
        blocks."""
        return self.blocks or (self.samples,)

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of samples in each part that can be fetched without the rest of the file: each block or span; or the
        whole shard, if it has neither."""
        return self.blocks or self.spans or (self.samples,)

    @property
    def is_verifiable(self) -> bool:
        """True if the index has a hash of a raw file. The file is then fetched as a whole, to be verified, unless the
        dataset was opened with validate_hash=False."""
        return any(file.raw.hashes for file in self.files)

    @property
    def name(self) -> str:
        """Name of the shard's first file, by which errors name the shard."""
        return self.files[0].raw.name

    @property
    def size(self) -> int:
        """Size of the shard's raw files together, in bytes."""
        return sum(file.raw.size for file in self.files)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for reading values from shards. StreamingDataset has arguments of the same names, except `encoded`."""

    allow_unsafe_types: bool = False
    """True if columns of pickles may be read, which can run any code."""
    images: Literal["pil", "array", "file"] = "pil"
    """Type of the values of image columns: "pil": images of Pillow; "array": numpy arrays; "file": bytes of the stored
    file, or for raw pixels of a PNG file (a TIFF file if PNG lacks the mode). With "file", pickles of MDS columns stay
    bytes, too."""
    columns: Sequence[str] | None = None
    """Names of the columns that samples have; None: all columns."""
    encoded: bool = False
    """True if the values of MDS columns are returned as bytes, as they are stored. Conversion of datasets uses it."""
    clips: Mapping[str, Any] = field(default_factory=dict)
    """VideoClip or AudioClip to decode, by the name of the column with the videos or sounds."""


DEFAULT_OPTIONS = ReadOptions()


class ShardReader(Protocol):
    """Open shard. Thread-safe, and usable in forked children.

    Readers may have two more methods. `get_many(rows: Sequence[int]) -> list[dict]` returns the samples at these
    indexes, in this order, faster than one call for each sample (see `rows_of`). `get_columns(rows: Ints) -> Columns |
    None` returns the same samples by column (see `columns_of_rows`).
    """

    name: str
    """Name or address of the shard, for errors."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample as a dict from column name to value. Raises ShardCorruptError if the stored bytes are not
        valid."""

    def close(self) -> None:
        """Close the shard. Values that were read stay valid, and a read in progress ends normally. A later read raises
        ValueError."""


def rows_of(reader: ShardReader, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return the samples at these indexes, in this order. Calls the reader's `get_many` if it has this method."""
    many = getattr(reader, "get_many", None)
    if many is None:
        return [reader[row] for row in rows]
    found: list[dict[str, Any]] = many(rows)
    return found


def columns_of_rows(reader: ShardReader, rows: Ints) -> Columns | None:
    """Return the samples at these indexes (at least one) by column, as the reader's `get_columns` returns them. Return
    None if the reader has no such method or returns None, or if a sample cannot be read: the caller then reads row by
    row, which raises an error that names the sample."""
    columns = getattr(reader, "get_columns", None)
    if columns is None:
        return None
    try:
        found: Columns | None = columns(rows)
    except Exception:
        return None
    return found


@runtime_checkable
class ColumnReader(Protocol):
    """Open shard that can read some columns without the others."""

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns from now on. Raises DatasetError if the shard lacks one of these columns."""


@runtime_checkable
class BlockReader(Protocol):
    """Open shard that consists of blocks, which are decoded as a whole."""

    def load(self, block: int) -> None:
        """Decode block number `block`, if it is not in memory. Raises what `__getitem__` raises."""

    def forget(self, block: int) -> None:
        """Mark block number `block` as not needed soon, so that its memory is freed before that of others."""
