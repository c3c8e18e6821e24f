"""Stacks of sources and layers: some with names, for the contract that all sources keep, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.data import (
    Chunked,
    Filtered,
    LogicalShards,
    Mapped,
    Mixture,
    Packed,
    Repeated,
    Savable,
    WindowShuffled,
)
from penstock.data.sharded.protocol import ShardedSource

__all__ = ["SOURCES", "stacks", "texts"]

Make = Callable[[], ShardedSource]


def texts(count: int, first: int = 0) -> list[list[int]]:
    """Documents of 0 to 7 tokens, each token found once."""
    lengths = [(5 * number + 3) % 8 for number in range(count)]
    return [[first + 10 * number + at for at in range(length)] for number, length in enumerate(lengths)]


def _generated(count: int, first: int = 0) -> Callable[[], Iterator[Any]]:
    return lambda: iter(texts(count, first))


def _noisy(sample: Any, generator: np.random.Generator) -> Any:
    return [*_tokens(sample), int(generator.integers(1000))]


def _tokens(sample: Any) -> list[int]:
    return [int(token) for token in np.atleast_1d(np.asarray(sample, np.int64))]


def _some(sample: Any, generator: np.random.Generator) -> bool:
    return bool(generator.random() < 0.7)


SOURCES: dict[str, Make] = {
    "generators packed": lambda: Packed(
        Chunked(LogicalShards([_generated(5, 1000 * n) for n in range(4)], shards=2, shuffle=True), length=4, eos=-2),
        length=4,
    ),
    "streams in windows": lambda: WindowShuffled(Savable(_generated_for, shards=2, snapshot_every=3), 5),
}
"""Name -> how it is made. Of pieces that can only be read along, beneath layers."""


def _generated_for(shard: int) -> Iterator[Any]:
    return iter(texts(8 + shard, 1000 * shard))


@st.composite
def stacks(draw: st.DrawFn) -> Make:
    """A source of documents in shards, and up to four layers; each call of what comes makes it anew."""
    shards = draw(st.integers(1, 5))
    layers = draw(st.lists(_layers(), max_size=4))
    base = draw(st.sampled_from(["by position", "whole pieces", "streams"]))
    count, shuffle = draw(st.integers(shards * 4, 40)), draw(st.booleans())
    other = draw(st.integers(shards * 4, 30))
    mixed, weights = draw(st.booleans()), draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))

    def source(count: int, first: int) -> ShardedSource:
        made: ShardedSource
        if base == "by position":
            made = LogicalShards([texts(count, first), texts(count // 2, first + 5000)], shards=shards, shuffle=shuffle)
        elif base == "whole pieces":
            pieces = [_generated(1 + count // shards, first + 1000 * n) for n in range(shards + 1)]
            made = LogicalShards(pieces, shards=shards, shuffle=shuffle)
        else:
            made = Savable(
                lambda shard: iter(texts(count, first + 1000 * shard)), shards=shards, snapshot_every=3, snapshot_s=1e9
            )
        for layer in layers:
            made = layer(made)
        return made

    def make() -> ShardedSource:
        if not mixed:
            return source(count, 0)
        return Mixture([source(count, 0), source(other, 100_000)], weights)

    return make


def _layers() -> st.SearchStrategy[Callable[[ShardedSource], ShardedSource]]:
    """Each takes any sample that the others make."""
    return st.one_of(
        st.just(lambda source: Mapped(source, _noisy, random=True)),
        st.just(lambda source: Filtered(source, _some, random=True)),
        st.integers(3, 6).map(lambda n: lambda source: Chunked(source, length=n, bos=-1, eos=-2)),
        st.integers(1, 6).map(lambda n: lambda source: Packed(source, length=n, pad=0)),
        st.integers(1, 7).map(lambda n: lambda source: WindowShuffled(source, n)),
        st.just(lambda source: source if source.endless else Repeated(source)),
    )
