"""Any stack of layers: cut at any place, saved, and gone on with elsewhere, it is the stack that was not cut."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest
from given_shards import again
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layer_stacks import STACKS, documents, stacks
from tests.datasets.sharded.contract import Fleet, Make, batches_of

from penstock.data import Chunked, Cursor, Mapped, Mixture, Packed
from penstock.data.sharded.layers.layer import Layer
from penstock.proto.errors import DatasetError
from penstock.proto.state.codec import encode_state

MOST = 40
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), min_size=1, max_size=8)
"""Steps: True if samples are skipped and not read, and their number. The stack is saved after each step."""


def read(cursor: Cursor, count: int) -> list[bytes]:
    return [encode_state(sample) for sample in itertools.islice(cursor, count)]


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(stacks(), st.integers(0, 1), st.integers(0, 2), STEPS)
def test_cut_anywhere(make: Make, shard: int, epoch: int, steps: list[tuple[bool, int]]) -> None:
    source = make()
    epoch = 0 if source.endless else epoch
    try:
        expected = read(source.open(shard, epoch, 3), MOST)
    except DatasetError as error:
        if "is empty in epoch" not in str(error):
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
        source = make()
        cursor = again(source, cursor, shard=shard, epoch=epoch, seed=3)
    assert read(cursor, MOST - at) == expected[at:]
    cursor.close()


SHAPES = st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 1), (1, 5), (2, 5), (1, 11), (1, 12), (3, 4)])


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(stacks(), st.lists(st.tuples(SHAPES, st.integers(0, 6)), min_size=1, max_size=5), st.integers(3, 6))
def test_any_stack_keeps_its_order_over_any_chain(make: Make, chain: list[Any], batch: int) -> None:
    whole = Fleet(make, (1, 1), global_batch_size=batch, tail="drop")
    expected = []
    with suppress(DatasetError):  # an epoch of a small source may have no batch, or a shard nothing to repeat
        expected = batches_of(whole.take(sum(count for _, count in chain)))
    assume(expected)
    fleet: Fleet | None = None
    got: list[list[bytes]] = []
    for shape, count in chain:
        fleet = Fleet(make, shape, fleet, global_batch_size=batch, tail="drop")
        got += batches_of(fleet.take(count))
    assert got == expected


@pytest.mark.parametrize("name", STACKS)
def test_saved_position_is_small(name: str) -> None:
    source = STACKS[name]()
    cursor = source.open(0, 0, 3)
    sizes = [len(encode_state(cursor.saved_position())) for _ in zip(range(MOST), cursor, strict=False)]
    assert max(sizes) < 800, sizes


def test_depth_counts_the_longest_way_down() -> None:
    source = Mapped(Mixture([documents(1), Packed(Chunked(documents(1), length=2), length=2)], [1, 1]), str)
    assert isinstance(source, Layer)
    # documents, Chunked, Packed, Repeated, Mixture, Mapped
    assert source.depth == 6
