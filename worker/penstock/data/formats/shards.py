"""Description of a dataset's shards, as its index gives it: plain data that readers, writers and the cache share.

A dataset is a folder with an index and shards. A shard consists of one file, or of two for text formats: the second one
has the offsets of the samples. Each file is stored raw, compressed, or in both forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["DEFAULT_OPTIONS", "ReadOptions", "Shard", "ShardFile", "ShardReader", "StoredFile"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the dataset's folder."""

    name: str
    """Path relative to the folder, with forward slashes. It is never absolute and never leads out of the folder."""
    size: int
    """Size in bytes."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Digests in hexadecimal by the algorithm's name; empty if the writer stored none."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """File of a shard, in its raw form and perhaps also in a compressed one."""

    raw: StoredFile
    packed: StoredFile | None = None
    """Compressed form of the file, or None. If there is one, the dataset's folder may lack the raw form."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard, as its index describes it."""

    format: str
    """Format: "mds", "json", "xsv", "csv", "tsv" or "parquet"."""
    samples: int
    files: tuple[ShardFile, ...]
    compression: str = ""
    """Compression of the packed files: "zstd", "gz", "br", "snappy" or "bz2", optionally with ":level"; "" for none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the shard's entry in the index, which its format's reader needs: column names, encodings,
    separator."""

    @property
    def name(self) -> str:
        """Name of the shard's first file, which names the shard in errors."""
        return self.files[0].raw.name

    @property
    def size(self) -> int:
        """Size of the shard's raw files together, in bytes."""
        return sum(file.raw.size for file in self.files)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How values are read from shards, as StreamingDataset's arguments of the same names."""

    allow_unsafe_types: bool = False
    """True if columns of pickles may be read, which can run any code."""
    images: Literal["pil", "array"] = "pil"
    """Kind of value for images: images of Pillow, or arrays."""


DEFAULT_OPTIONS = ReadOptions()


class ShardReader(Protocol):
    """An open shard. Safe for threads, and for forked children."""

    name: str
    """Name of the shard, for errors."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample as a dict from column name to value. Raises ShardCorruptError if the stored bytes are not
        valid."""

    def close(self) -> None:
        """Close the shard. Values that were read stay valid, and a read in progress ends normally. A later read raises
        ValueError."""
