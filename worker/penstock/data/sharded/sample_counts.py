"""Counting of samples from sources in logical shards, by the source of a mixture, including the samples that layers
leave out."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.data.loading.counting import SampleCounter, skipped_rows
from penstock.data.sharded.layers.mixture import Mixture
from penstock.data.sharded.protocol import ShardedSource, summed
from penstock.data.sharded.shard_cursors import HeldSample
from penstock.proto.state.counts import Group, Row, cut_name, merged_rows

__all__ = ["counted_samples", "wanted_shares"]


def counted_samples(counter: SampleCounter, samples: Sequence[HeldSample]) -> dict[Group, Row]:
    """Return the counts of a batch's samples, and of the samples that layers left out before them."""
    origins = [held.origin for held in samples]
    values, sources = [held.sample for held in samples], [cut_name(origin.source) for origin in origins]
    parts = None
    if any(origin.parts for origin in origins):
        parts = [[(cut_name(source), size) for source, size in origin.parts] for origin in origins]
    counted = counter.count(values, sources, parts)
    skipped: dict[str, int] = {}
    for origin in origins:
        if origin.skipped:
            skipped = summed(skipped, {cut_name(source): count for source, count in origin.skipped.items()})
    return merged_rows([counted, skipped_rows(skipped)]) if skipped else counted


def wanted_shares(source: ShardedSource) -> dict[str, tuple[int, int]]:
    """Return, for each source of the mixtures in a stack, its share in millionths of (samples, tokens), as the weights
    want it; one of the two is 0. Nested mixtures with different units have no shares."""
    units: set[str] = set()

    def walk(source: object, name: str, share: float) -> dict[str, float]:
        if isinstance(source, Mixture):
            units.add(source.by)
            found: dict[str, float] = {}
            for own, below, part in zip(source.names, source.sources, source.wanted(), strict=True):
                found.update(walk(below, f"{name}/{own}" if name else own, share * part))
            return found
        inner = getattr(source, "source", None)
        return {name: share} if inner is None else walk(inner, name, share)

    shares = walk(source, "", 1.0)
    if len(units) != 1:
        return {}
    of_tokens = units == {"tokens"}
    return {
        cut_name(name): (0, round(1e6 * share)) if of_tokens else (round(1e6 * share), 0)
        for name, share in shares.items()
    }
