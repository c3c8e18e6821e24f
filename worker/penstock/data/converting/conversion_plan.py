"""Plan of a conversion, as plain data that its processes share and that a second run compares."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.data.converting.target_columns import TargetColumn
from penstock.data.formats.shards import Shard

__all__ = ["JOB", "PART_BYTES", "ConversionPlan", "Part", "parts_of"]

JOB = struct.Struct("<Q")
"""Number of a part, as it stands in the file from which processes take parts."""
PART_BYTES = 256 << 20
"""Bytes of a source's shard from which on its samples are divided into several parts."""


@dataclass(frozen=True)
class Part:
    """Samples of a source's shard that are converted at a time."""

    shard: int
    """Number of the shard in the source's index."""
    begin: int
    end: int
    """Numbers of the first sample in the shard, and of the one after the last."""


@dataclass(frozen=True)
class ConversionPlan:
    """Conversion of one dataset."""

    source: str
    dest: str
    to: str
    """Format of the result: "mds" or "parquet"."""
    columns: Sequence[TargetColumn]
    schema: str = ""
    """Parquet: serialized Arrow schema of the columns, in hexadecimal."""
    encoded: bool = False
    """True if values of MDS columns are copied as they are stored."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the result's files."""
    data: str = ""
    """Digest of the source's files."""
    order: str = ""
    """Digest of the order that the result keeps; "" for an order of its own."""
    parts: Sequence[Part] = ()
    verify: bool = True
    timeout_s: float = 600.0
    cache: str = ""
    """Folder on this machine that caches the files of a remote source."""
    cache_limit: int | None = None
    source_options: Mapping[str, Any] = field(default_factory=dict)
    dest_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Digest of everything that decides the result's content. Parts with this key need not be made again."""
        chosen = (self.to, self.schema, self.encoded, self.settings, self.data, self.order)
        columns, parts = [asdict(each) for each in self.columns], [asdict(each) for each in self.parts]
        text = json.dumps([chosen, columns, parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def folder_of(self, part: int) -> str:
        """Return the path of a part's folder below the result's."""
        return f"part-{part:06}"

    def encoded_text(self) -> bytes:
        """Return the plan as JSON. Paths and options must be plain values."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decoded(text: bytes) -> ConversionPlan:
        """Return the plan of a text that `encoded_text` made."""
        plan = ConversionPlan(**json.loads(text))
        return replace(
            plan,
            columns=[TargetColumn(**each) for each in plan.columns],  # type: ignore[arg-type]
            parts=[Part(**each) for each in plan.parts],  # type: ignore[arg-type]
        )


def parts_of(shards: Sequence[Shard]) -> list[Part]:
    """Return the parts of a dataset, in the order of its samples. A large shard is divided between its blocks, or
    between any samples if it has none."""
    found = []
    for number, shard in enumerate(shards):
        pieces = -(-shard.size // PART_BYTES)
        bounds = {shard.samples * piece // pieces for piece in range(1, pieces)}
        if shard.blocks:
            ends = list(itertools.accumulate(shard.blocks))
            bounds = {min(ends, key=lambda end: abs(end - bound)) for bound in bounds}
        bounds |= {0, shard.samples}
        ordered = sorted(bounds)
        found += [Part(number, begin, end) for begin, end in itertools.pairwise(ordered) if begin < end]
    return found
