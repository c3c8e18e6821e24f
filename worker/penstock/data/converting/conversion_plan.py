"""Plan of a conversion: plain data that all its processes read. A conversion is divided into *parts*: consecutive
samples of the source, which one process converts at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from penstock.data.converting.target_columns import TargetColumn
from penstock.data.formats.shards import Shard

__all__ = ["PART_BYTES", "ConversionPlan", "part_folder", "parts_of"]

PART_BYTES = 64 << 20
"""Size in bytes above which a shard is divided. A part ends with the shard or piece with which it has half of this. So
most shards are one part, and small ones are joined: each part costs about ten file operations and waits for the disk
three times. A conversion that is killed loses the part that each process works on."""
SHARD_BYTES = 16 << 10
"""Number of bytes that count for a shard besides its size, because opening one takes at least about 0.5 ms."""

Piece = tuple[int, int, int]
"""Samples of one shard: (number of the shard, its first sample, the sample after the last one)."""


@dataclass(frozen=True)
class ConversionPlan:
    """Plan of the conversion of one dataset."""

    source: str
    dest: str
    to: str
    """Format of the result: "mds" or "parquet"."""
    columns: Sequence[TargetColumn]
    schema: str
    """Serialized Arrow schema of the columns, in hexadecimal, if the result is Parquet; "" for MDS."""
    encoded: bool
    """True if the values of MDS columns are copied as they are stored, without decoding."""
    settings: Mapping[str, Any]
    """Settings of the result's files, such as their compression, as keyword arguments of their writer."""
    parts: Sequence[Sequence[Piece]]
    """Pieces of shards of which each part consists."""
    key: str
    """Digest of everything that decides the result's content. A part that an earlier run finished under the same key is
    kept."""
    verify: bool
    timeout_s: float
    cache: str
    """Folder on this machine that caches the files of a remote source."""
    cache_limit: int
    source_options: Mapping[str, Any]
    dest_options: Mapping[str, Any]

    def encoded_text(self) -> bytes:
        """Return the plan as JSON. Paths and options must be plain values."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decoded(text: bytes) -> ConversionPlan:
        """Return the plan from the text that `encoded_text` returned."""
        fields = json.loads(text)
        return ConversionPlan(**{**fields, "columns": [TargetColumn(**each) for each in fields["columns"]]})


def part_folder(number: int) -> str:
    """Return the name of a part's folder in the result's folder."""
    return f"part-{number:06}"


def parts_of(shards: Sequence[Shard]) -> list[list[Piece]]:
    """Return the parts of a dataset. Small shards are joined; a large shard is divided between its blocks, or between
    any samples if it has no blocks."""
    parts: list[list[Piece]] = []
    size = PART_BYTES
    for number, shard in enumerate(shards):
        end = 0
        for samples in filter(None, shard.blocks or _even_pieces(shard)):
            begin, end = end, end + samples
            if size >= PART_BYTES // 2:
                parts.append([])
                size = 0
            if parts[-1] and parts[-1][-1][0] == number:
                _, begin, _ = parts[-1].pop()
            parts[-1].append((number, begin, end))
            size += SHARD_BYTES + shard.size * samples // shard.samples
    return parts


def _even_pieces(shard: Shard) -> list[int]:
    pieces = max(1, -(-shard.size // PART_BYTES))
    bounds = [shard.samples * piece // pieces for piece in range(pieces + 1)]
    return [end - begin for begin, end in pairwise(bounds)]
