"""What a dataset consists of, as its index says: plain data that readers, writers and the cache share.

A dataset is a folder with an index and shards. A shard is one file or two (a table in text form has a second one with
the offsets of its samples), each stored raw, compressed, or both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Shard", "ShardFile", "ShardReader", "StoredFile"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as it lies in the dataset's folder."""

    name: str
    """Path relative to the folder, with forward slashes; never absolute, and never out of the folder."""
    size: int
    """Bytes."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Name of the algorithm -> digest in hexadecimal; empty if the writer kept none."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of a shard in its two forms."""

    raw: StoredFile
    packed: StoredFile | None = None
    """The compressed form; then the raw one may not lie in the dataset's folder."""


@dataclass(frozen=True, slots=True)
class Shard:
    format: str
    """Who can read it: "mds", "json", "xsv", "csv", "tsv", "parquet"."""
    samples: int
    files: tuple[ShardFile, ...]
    compression: str = ""
    """Of the packed files: "zstd", "gz", "br", "snappy" or "bz2", with or without ":level"; "" if there are none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The rest of what the index says of it, for the reader of its format: column names, encodings, separator."""

    @property
    def name(self) -> str:
        """For messages: its first file."""
        return self.files[0].raw.name

    @property
    def size(self) -> int:
        """Bytes of its raw files."""
        return sum(file.raw.size for file in self.files)


class ShardReader(Protocol):
    """A shard whose raw files are at hand. Safe for threads, and for forked children."""

    name: str
    """For messages."""

    def __len__(self) -> int:
        """Samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample: column -> value. Raises ShardCorruptError if its bytes cannot be what they claim."""

    def close(self) -> None:
        """Values that were read stay valid. A thread that is reading ends that; the next read is a ValueError."""
