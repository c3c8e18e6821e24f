from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.data.loading.counting import SampleCounter, skipped_rows
from penstock.data.sharded.layers.layer import position_function
from penstock.data.sharded.layers.mapped import Mapped
from penstock.data.sharded.layers.mixture import Mixture
from penstock.data.sharded.protocol import PositionOf, SavedPosition, ShardedSource, summed
from penstock.data.sharded.shard_cursors import HeldSample
from penstock.proto.state.counts import Group, Row, cut_name, merged_rows


def counted_samples(counter: SampleCounter, samples: Sequence[HeldSample]) -> dict[Group, Row]:
    """Return the counts of a batch's samples, and of those that layers left out just before each of them."""
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


def changes_shares(source: ShardedSource) -> bool:
    if isinstance(source, Mixture):
        return source.changes or any(map(changes_shares, source.sources))
    inner = getattr(source, "source", None)
    return inner is not None and changes_shares(inner)


def wanted_shares(
    source: ShardedSource, shard: int = 0, saved: SavedPosition = None, position_of: PositionOf | None = None
) -> dict[str, tuple[int, int]]:
    """Return the share that each source should have: by name, (share of samples, share of tokens) in millionths, one of
    them 0. Empty without a mixture, or if nested mixtures use both units. `saved`: where the weights are looked up."""
    units: set[str] = set()

    def walk(
        source: object, name: str, share: float, saved: object, position_of: PositionOf | None
    ) -> dict[str, float]:
        inner = getattr(source, "source", None)
        if not isinstance(source, Mixture):
            kept = position_of if isinstance(source, Mapped) and source.one_to_one else None
            return {name: share} if inner is None else walk(inner, name, share, _entry(saved, "source"), kept)
        units.add(source.by)
        index, sources = _entry(saved, "index"), _entry(saved, "sources")
        position = position_function(position_of, shard, source.num_shards)(index) if isinstance(index, int) else 0
        below = sources if isinstance(sources, list) else []
        found: dict[str, float] = {}
        for number, part in enumerate(source.wanted(position)):
            own, at = source.names[number], below[number] if number < len(below) else None
            found.update(walk(source.sources[number], f"{name}/{own}" if name else own, share * part, at, None))
        return found

    shares = walk(source, "", 1.0, saved, position_of)
    if len(units) != 1:
        return {}
    of_tokens = units == {"tokens"}
    return {
        cut_name(name): (0, round(1e6 * share)) if of_tokens else (round(1e6 * share), 0)
        for name, share in shares.items()
    }


def _entry(saved: object, name: str) -> object:
    return saved.get(name) if isinstance(saved, Mapping) else None
