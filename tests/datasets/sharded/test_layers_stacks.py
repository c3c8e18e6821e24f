"""Any stack of layers: cut at any place, saved, and gone on with elsewhere, it is the stack that was not cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from given_shards import again
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layer_stacks import STACKS, add, documents, keep, pick

from penstock.data import (
    Chunked,
    Cursor,
    Filtered,
    Mapped,
    Mixture,
    Packed,
    Repeated,
    ShardedSource,
    WindowShuffled,
)
from penstock.data.sharded.layers.layer import Layer
from penstock.proto.errors import DatasetError
from penstock.proto.state.codec import encode_state

MOST = 40
Over = Callable[[ShardedSource], ShardedSource]


def mixed(weights: list[int], stop: Any, twice: bool) -> Over:
    def over(source: ShardedSource) -> ShardedSource:
        other = source if twice else documents(6, 3, first=50)
        return Mixture([source, other], weights, stop="never" if source.endless else stop)

    return over


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
    st.integers(1, 9).map(lambda window: lambda source: WindowShuffled(source, window)),
    st.builds(
        mixed,
        st.lists(st.integers(0, 3), min_size=2, max_size=2).filter(any),
        st.sampled_from(["never", "first", "last"]),
        st.booleans(),
    ),
)


def built(overs: list[Over]) -> ShardedSource:
    source: ShardedSource = documents(7, 4)
    for over in overs:
        source = over(source)
    return source


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), min_size=1, max_size=8)
"""Whether samples are passed over or read, and how many. Behind each step the stack is saved."""


def read(cursor: Cursor, count: int) -> list[bytes]:
    return [encode_state(sample) for sample in itertools.islice(cursor, count)]


@settings(max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.lists(OVERS, min_size=1, max_size=5), st.integers(0, 1), st.integers(0, 2), STEPS)
def test_cut_anywhere(overs: list[Over], shard: int, epoch: int, steps: list[tuple[bool, int]]) -> None:
    source = built(overs)
    epoch = 0 if source.endless else epoch
    try:
        expected = read(source.open(shard, epoch, 3), MOST)
    except DatasetError as error:
        if "has no sample in epoch" not in str(error):
            raise
        assume(False)  # what is repeated has lost all of its samples below
    ends = len(expected) < MOST
    at = 0
    cursor = source.open(shard, epoch, 3)
    for passing, count in steps:
        step = count if ends else min(count, MOST - at)
        if passing:
            assert cursor.skip(step) == min(step, len(expected) - at)
        else:
            assert read(cursor, step) == expected[at : at + step]
        at = min(at + step, len(expected))
        source = built(overs)
        cursor = again(source, cursor, shard=shard, epoch=epoch, seed=3)
    assert read(cursor, MOST - at) == expected[at:]
    cursor.close()


@pytest.mark.parametrize("name", STACKS)
def test_a_token_is_small(name: str) -> None:
    source = STACKS[name]()
    cursor = source.open(0, 0, 3)
    sizes = [len(encode_state(cursor.token())) for _ in zip(range(MOST), cursor, strict=False)]
    assert max(sizes) < 800, sizes


def test_a_lengths_promise_is_kept() -> None:
    for make in STACKS.values():
        source = make()
        lengths = source.lengths(0)
        if lengths is not None:
            assert [sum(1 for _ in source.open(shard, 0, 3)) for shard in range(source.num_shards)] == list(lengths)


def test_depth_counts_the_longest_way_down() -> None:
    source = Mapped(Mixture([documents(1), Packed(Chunked(documents(1), length=2), length=2)], [1, 1]), str)
    assert isinstance(source, Layer)
    # documents, Chunked, Packed, Repeated, Mixture, Mapped
    assert source.depth == 6
