"""Plan of a conversion: plain data that all its processes read, and that a second run compares with its own plan. A
conversion is divided into *parts*, each a run of consecutive samples of one shard of the source."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.data.converting.argument_names import ARGUMENTS, ArgumentNames
from penstock.data.converting.target_columns import TargetColumn
from penstock.data.formats.shards import Shard

__all__ = ["PART_BYTES", "ConversionPlan", "Part", "parts_of"]

PART_BYTES = 256 << 20
"""Size in bytes above which a source's shard is divided into several parts."""


@dataclass(frozen=True)
class Part:
    """Part of a conversion: consecutive samples of one shard of the source, which one process converts."""

    shard: int
    """Number of the shard in the source's index."""
    begin: int
    end: int
    """`begin` and `end`: number in the shard of the part's first sample, and of the one after its last."""


@dataclass(frozen=True)
class ConversionPlan:
    """Plan of the conversion of one dataset."""

    source: str
    dest: str
    to: str
    """Format of the result: "mds" or "parquet"."""
    columns: Sequence[TargetColumn]
    schema: str = ""
    """Parquet: serialized Arrow schema of the columns, in hexadecimal."""
    encoded: bool = False
    """True if the values of MDS columns are copied as they are stored, without decoding."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the result's files, such as their compression; see target_settings.py."""
    data: str = ""
    """Digest of the source's files, which changes when a file changes."""
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
    """How errors name the arguments that the user gave."""

    @property
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
    """Return the parts into which the conversion of a dataset is divided, in the order of its samples. A large shard is
    divided at the borders of its blocks (such as row groups), or between any samples if it has no blocks."""
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
