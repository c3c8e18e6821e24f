"""Plan of a conversion: plain data that all processes of the conversion read. A run that continues a killed one
compares the plan of that run with its own. A conversion is divided into *parts*: consecutive samples of one shard of
the source, or of several small shards."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from penstock.data.converting.argument_names import ARGUMENTS, ArgumentNames
from penstock.data.converting.target_columns import TargetColumn
from penstock.data.formats.shards import Shard

__all__ = ["GROUP_BYTES", "GROUP_SHARDS", "PART_BYTES", "ConversionPlan", "Part", "parts_of"]

PART_BYTES = 256 << 20
"""Size in bytes above which a source's shard is divided into several parts."""
GROUP_BYTES = 16 << 20
"""Largest size in bytes of consecutive shards that are one part together. Each part costs about ten file operations and
waits for the disk three times, which takes longer than the conversion of a small shard. The limit exists because a
conversion that is killed loses the part that each process works on."""
GROUP_SHARDS = 4096
"""Largest number of shards that are one part together. Each shard takes at least about 0.5 ms."""


@dataclass(frozen=True)
class Part:
    """Part of a conversion: consecutive samples of one shard of the source, or of several small shards, which one
    process converts."""

    first: int
    """Number of the part's first shard in the source's index, from 0."""
    past: int
    """Number of the shard after the part's last one."""
    begin: int
    """Number of the part's first sample, counted from the first sample of shard `first`."""
    end: int
    """Number of the sample after the part's last one, counted from the first sample of shard `first`."""

    def pieces(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, int, int]]:
        """Yield (shard, begin, end) for each shard that has samples of the part, which are samples `begin` to `end` - 1
        of the shard. `shards`: all shards of the source."""
        offset = 0
        for shard in shards[self.first : self.past]:
            begin, end = max(self.begin - offset, 0), min(self.end - offset, shard.samples)
            if begin < end:
                yield shard, begin, end
            offset += shard.samples


@dataclass(frozen=True)
class ConversionPlan:
    """Plan of the conversion of one dataset."""

    source: str
    dest: str
    to: str
    """Format of the result: "mds" or "parquet"."""
    columns: Sequence[TargetColumn]
    schema: str = ""
    """Serialized Arrow schema of the columns, in hexadecimal, if the result is Parquet; "" for MDS."""
    encoded: bool = False
    """True if the values of MDS columns are copied as they are stored, without decoding."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the result's files, such as their compression; see target_settings.py."""
    data: str = ""
    """Digest of the source's files, see `shard_digests` in convert_part.py."""
    order: str = ""
    """Digest of the source's order, if the result keeps that order; "" otherwise."""
    parts: Sequence[Part] = ()
    verify: bool = True
    timeout_s: float = 600.0
    cache: str = ""
    """Folder on this machine that caches the files of a remote source."""
    cache_limit: int | None = None
    source_options: Mapping[str, Any] = field(default_factory=dict)
    dest_options: Mapping[str, Any] = field(default_factory=dict)
    names: ArgumentNames = ARGUMENTS
    """Names of the arguments that the user gave, for errors."""

    @cached_property
    def key(self) -> str:
        """Digest of everything that decides the result's content. A part that an earlier run finished under the same
        key is reused."""
        chosen = (self.to, self.schema, self.encoded, self.settings, self.data, self.order)
        columns, parts = [asdict(each) for each in self.columns], [asdict(each) for each in self.parts]
        text = json.dumps([chosen, columns, parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def folder_of(self, part: int) -> str:
        """Return the path of a part's folder, relative to the result's folder."""
        return f"part-{part:06}"

    def encoded_text(self) -> bytes:
        """Return the plan as JSON. Paths and options must be plain values."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decoded(text: bytes) -> ConversionPlan:
        """Return the plan from the text that `encoded_text` returned."""
        plan = ConversionPlan(**json.loads(text))
        return replace(
            plan,
            columns=[TargetColumn(**each) for each in plan.columns],  # type: ignore[arg-type]
            parts=[Part(**each) for each in plan.parts],  # type: ignore[arg-type]
            names=ArgumentNames(**plan.names),  # type: ignore[arg-type]
        )


def parts_of(shards: Sequence[Shard]) -> list[Part]:
    """Return the parts of a dataset, in the order of its samples. Consecutive small shards are one part. A large shard
    is divided between its blocks, or between any samples if it has no blocks."""
    found: list[Part] = []
    size = 0  # of the shards in the last part
    for number, shard in enumerate(shards):
        size += shard.size
        last = found[-1] if found else None
        if last and size <= GROUP_BYTES and number - last.first < GROUP_SHARDS:
            found.pop()
            found.append(replace(last, past=number + 1, end=last.end + shard.samples))
        elif shard.samples:
            found += [Part(number, number + 1, begin, end) for begin, end in itertools.pairwise(_bounds(shard))]
            size = shard.size
    return found


def _bounds(shard: Shard) -> list[int]:
    """Return the bounds of a shard's parts: the number of the first sample of each part, then the number of samples in
    the shard."""
    pieces = -(-shard.size // PART_BYTES)
    bounds = {shard.samples * piece // pieces for piece in range(1, pieces)}
    if shard.blocks:
        ends = list(itertools.accumulate(shard.blocks))
        bounds = {min(ends, key=lambda end: abs(end - bound)) for bound in bounds}
    return sorted(bounds | {0, shard.samples})
