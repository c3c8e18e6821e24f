"""Layers and stacks of them over documents, named and random, for whoever checks what holds for any source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from given_shards import Given
from hypothesis import strategies as st

from penstock.data import (
    Chunked,
    Filtered,
    Grouped,
    LogicalShards,
    Mapped,
    Mixture,
    Packed,
    Ramp,
    Repeated,
    Savable,
    Schedule,
    ShardedSource,
    SkipSample,
    WindowShuffled,
)

__all__ = ["STACKS", "changes_of", "documents", "parity", "schedule", "stacks", "weights_of"]

Over = Callable[[ShardedSource], ShardedSource]


def documents(*lengths: int, first: int = 0, **options: Any) -> Given:
    """Return a source with this many documents in each shard, of 1 to 9 tokens, all different."""
    shards = [
        [
            list(range(10 * (100 * (first + shard) + at), 10 * (100 * (first + shard) + at) + 1 + (7 * at + shard) % 9))
            for at in range(length)
        ]
        for shard, length in enumerate(lengths)
    ]
    return Given(shards, shuffled=True, **options)


def add(document: Any, generator: np.random.Generator) -> Any:
    """Another number to each token."""
    return np.asarray(document, np.int64) + generator.integers(0, 1 << 40, len(document))


def keep(document: Any, generator: np.random.Generator) -> bool:
    return len(document) > 1 or bool(generator.random() < 0.5)


def pick(document: Any, generator: np.random.Generator) -> Any:
    """Some are not wanted."""
    if generator.random() < 0.3:
        raise SkipSample
    return document


def _language_model() -> ShardedSource:
    corpora = [documents(9, 4, 7, first=first) for first in (0, 10)]
    pieces = [Chunked(Repeated(corpus), length=6, bos=-1, eos=-2, min_length=2) for corpus in corpora]
    packed = [Packed(source, length=8, bos=-1, eos=-2) for source in pieces]
    return Mixture([WindowShuffled(lines, 5) for lines in packed], [0.7, 0.3])


def _documents(first: int, count: int = 4) -> Iterator[list[int]]:
    """Return documents of 0 to 7 tokens."""
    return ([1000 * first + 10 * at + token for token in range((5 * at + 3) % 8)] for at in range(count))


def _generators(pieces: int) -> ShardedSource:
    return LogicalShards([lambda first=n: _documents(first) for n in range(pieces)], shards=2, shuffle=True)


def _streams(shards: int) -> ShardedSource:
    return Savable(lambda shard: _documents(shard, 8 + shard), shards=shards, snapshot_every=3, snapshot_s=1e9)


def parity(document: Any) -> int:
    return len(document) % 2


FIELDS: dict[str, Any] = {
    "labels": True,
    "shift": True,
    "positions": True,
    "segments": True,
    "cu_seqlens": True,
    "loss_mask": True,
}


def fitted(source: ShardedSource, length: int, window: int) -> ShardedSource:
    return Packed(source, length=length, pad=-3, split=False, window=window)


STACKS: dict[str, Callable[[], ShardedSource]] = {
    "repeated": lambda: Repeated(documents(5, 1, 3)),
    "mapped, skipping": lambda: Mapped(documents(9, 0, 7), pick, random=True, skip_failures=1),
    "filtered": lambda: Filtered(documents(9, 0, 7, known=False), keep, random=True),
    "chunked": lambda: Chunked(documents(5, 0, 3), length=4, bos=-1, eos=-2),
    "packed by best fit": lambda: Packed(documents(9, 0, 7), length=10, pad=-3, split=False, window=4),
    "packed with fields": lambda: Packed(Repeated(Chunked(documents(9, 1, 3), length=4, eos=-2)), length=7, **FIELDS),
    "shuffled in windows": lambda: WindowShuffled(documents(9, 0, 8), 4),
    "grouped": lambda: Grouped(documents(9, 0, 8), parity, 2, window=5),
    "grouped, rests dropped": lambda: Grouped(documents(9, 0, 8, known=False), parity, 3, window=4, drop_rest=True),
    "mixture to the first end": lambda: Mixture([documents(9, 0), documents(3, 4, first=5)], [2, 1], stop="first"),
    "mixture to the last end": lambda: Mixture([documents(9, 0), documents(3, 4, first=5)], [2, 1], stop="last"),
    "mixture by tokens": lambda: Mixture([documents(9, 2), documents(3, 4, first=5)], [2, 1], stop="last", by="tokens"),
    "mixture by tokens, scheduled": lambda: Mixture(
        [documents(9, 2), documents(3, 4, first=5)], Schedule({0: [2, 1], 7: Ramp([1, 5], 9), 20: [0, 1]}), by="tokens"
    ),
    "language model": _language_model,
    "generators packed": lambda: Packed(Chunked(_generators(3), length=4, eos=-2), length=4),
    "streams in windows": lambda: WindowShuffled(_streams(2), 5),
    "language model, one epoch": lambda: WindowShuffled(
        Packed(Chunked(Mapped(documents(20, 0, 15), add, random=True), length=6, eos=-2), length=8, pad=-3), 5
    ),
}
"""Name -> a new source each time."""


def weights_of(sources: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 9), min_size=sources, max_size=sources).filter(any)


def changes_of(sources: int) -> st.SearchStrategy[list[tuple[int, list[int], int]]]:
    """For each change of weights: samples since the one before, weights, and length of the ramp; 0: none."""
    return st.lists(st.tuples(st.integers(0, 60), weights_of(sources), st.integers(0, 60)), max_size=4)


def schedule(begin: list[int], changes: Sequence[tuple[int, list[int], int]]) -> Schedule:
    found: dict[int, Any] = {0: begin}
    position = before = 0
    for gap, weights, over in changes:
        position += max(gap, not before) + before  # a ramp may end where the next weights begin
        found[position], before = Ramp(weights, over) if over else weights, over
    return Schedule(found)


def _mixed(weights: list[int], stop: Any, twice: bool) -> Over:
    def over(source: ShardedSource) -> ShardedSource:
        other = source if twice else documents(6, 3, first=50)
        return Mixture([source, other], weights, stop="never" if source.endless else stop)

    return over


def _scheduled(begin: list[int], changes: list[tuple[int, list[int], int]], by: Any) -> Over:
    def over(source: ShardedSource) -> ShardedSource:
        return Mixture([source, documents(6, 3, first=60)], schedule(begin, changes), by=by)

    return over


BASES: dict[str, Callable[[], ShardedSource]] = {
    "lists": lambda: documents(7, 4),
    "by position": lambda: LogicalShards([list(_documents(n, 9)) for n in range(2)], shards=2, shuffle=True),
    "whole pieces": lambda: _generators(3),
    "streams": lambda: _streams(2),
}
OVERS: st.SearchStrategy[Over] = st.one_of(
    st.just(lambda source: source if source.endless else Repeated(source)),
    st.sampled_from([0, 2]).map(
        lambda n: lambda source: Mapped(source, pick if n else add, random=True, skip_failures=n)
    ),
    st.just(lambda source: Filtered(source, keep, random=True)),
    st.tuples(st.integers(1, 7), st.sampled_from([None, -1]), st.sampled_from([None, -2])).map(
        lambda drawn: lambda source: Chunked(source, length=drawn[0], bos=drawn[1], eos=drawn[2])
    ),
    st.tuples(st.integers(1, 12), st.sampled_from([None, -3])).map(
        lambda drawn: lambda source: Packed(source, length=drawn[0], pad=drawn[1])
    ),
    st.tuples(st.integers(1, 12), st.integers(1, 5)).map(lambda drawn: lambda source: fitted(source, *drawn)),
    st.integers(1, 9).map(lambda window: lambda source: WindowShuffled(source, window)),
    st.builds(
        _mixed,
        st.lists(st.integers(0, 3), min_size=2, max_size=2).filter(any),
        st.sampled_from(["never", "first", "last"]),
        st.booleans(),
    ),
    st.builds(_scheduled, weights_of(2), changes_of(2), st.sampled_from(["samples", "tokens"])),
)


@st.composite
def stacks(draw: st.DrawFn) -> Callable[[], ShardedSource]:
    """A source of two shards and up to five layers; each call of what comes makes it anew."""
    base, overs = draw(st.sampled_from(sorted(BASES))), draw(st.lists(OVERS, max_size=5))

    def make() -> ShardedSource:
        source = BASES[base]()
        for over in overs:
            source = over(source)
        return source

    return make
