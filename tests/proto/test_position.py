"""The record of a box: one step at a time and in strides must agree, for slots of any lengths."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.proto.errors import SAME_RELEASE, EmptyInputError, InvalidArgumentError, ProtocolError
from penstock.proto.state.position import Position, advance, chain_at


def test_last_end_begins_epoch_with_all_slots() -> None:
    position = Position.start(2)
    position.deliver()
    position.deliver()
    assert not position.exhaust()
    assert position.exhaust()
    assert (position.epoch, position.live, position.cursor, position.delivered, position.total) == (
        1,
        [0, 1],
        0,
        [0, 0],
        [1, 1],
    )


def test_the_turn_goes_on_where_it_is_carried() -> None:
    position = Position.start(2)
    position.carry()
    for length in (3, 1):  # batches dealt in turn: slot 1 begins the second epoch, slot 0 the third
        for _ in range(length):
            position.deliver()
        assert not position.exhaust()
        assert position.exhaust()
    assert (position.step, position.epoch, position.turn) == (4, 2, 0)
    position.deliver()
    position.abandon_epoch()
    assert position.turn == 0
    assert Position.from_proto(position.to_proto()).first == 0


def test_two_empty_epochs_are_an_empty_input() -> None:
    position = Position.start(1)
    assert position.exhaust()
    with pytest.raises(EmptyInputError):
        position.exhaust()


def test_an_abandoned_epoch_with_batches_parts_empty_epochs() -> None:
    position = Position.start(1)
    assert position.exhaust()
    position.deliver()
    position.abandon_epoch()
    assert position.exhaust()
    position.abandon_epoch()  # without a batch: it counts as none
    with pytest.raises(EmptyInputError):
        position.exhaust()


@st.composite
def walks(draw: st.DrawFn) -> tuple[int, list[Position], dict[tuple[int, int], int], dict[int, int]]:
    """A box's life: the position after each step, and what ends and cuts there were."""
    slots = draw(st.integers(1, 6))
    position = Position.start(slots)
    if draw(st.booleans()):
        position.carry()
    lengths: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], int] = {}
    abandoned: dict[int, int] = {}
    history = [position.copy()]
    opened = list(position.total)
    while position.step < 50:
        if any(position.delivered) and draw(st.integers(0, 30)) == 0:
            abandoned[position.epoch] = position.step
            position.abandon_epoch()
            opened = list(position.total)
            continue
        slot = position.turn
        key = (slot, position.epoch)
        if key not in lengths:
            lengths[key] = draw(st.integers(1, 6))
        if position.total[slot] - opened[slot] >= lengths[key]:
            ends[key] = position.total[slot]
            if position.exhaust():
                opened = list(position.total)
        else:
            position.deliver()
            history.append(position.copy())
    return slots, history, ends, abandoned


@settings(max_examples=30, deadline=None)
@given(walks(), st.data())
def test_strides_agree_with_single_steps(
    walk: tuple[int, list[Position], dict[tuple[int, int], int], dict[int, int]], data: st.DataObject
) -> None:
    _, history, ends, abandoned = walk
    start = data.draw(st.integers(0, 20))
    for step in range(start, 51):
        assert advance(history[start], step, ends, abandoned) == history[step]


@settings(max_examples=30, deadline=None)
@given(walks(), st.data())
def test_stream_digest_over_any_stretch(
    walk: tuple[int, list[Position], dict[tuple[int, int], int], dict[int, int]], data: st.DataObject
) -> None:
    _, history, ends, abandoned = walk
    digests: dict[tuple[int, int], int] = {}
    chain: int | None = 0
    for before, after in itertools.pairwise(history):
        (slot,) = (slot for slot, total in enumerate(after.total) if total > before.total[slot])
        digests[slot, after.total[slot]] = data.draw(st.integers(0, (1 << 64) - 1))
        told = Position.start(1)
        told.chain = chain
        told.deliver(digests[slot, after.total[slot]])
        chain = after.chain = told.chain
    start = data.draw(st.integers(0, 50))
    for step in range(start, 51):
        assert chain_at(history[start], step, ends, abandoned, digests) == history[step].chain
    if start < 50:
        del digests[next((s, t) for s, t in digests if t > history[start].total[s])]
        assert chain_at(history[start], 50, ends, abandoned, digests) is None


def test_a_chain_is_known_or_not_but_never_wrong() -> None:
    position = Position.start(2)
    assert position.to_proto().HasField("chain")
    position.deliver(5)
    assert position.chain is not None
    assert advance(position, 1, {}).chain == position.chain
    assert advance(position, 2, {}).chain is None
    assert Position.from_proto(position.to_proto()).chain == position.chain
    position.deliver()
    position.deliver(6)
    assert position.chain is None
    assert not position.to_proto().HasField("chain")
    assert Position.from_proto(position.to_proto()).chain is None


def test_unknown_ends_count_as_unfinished() -> None:
    base = Position.start(2)
    assert advance(base, 10, {}).total == [5, 5]
    assert advance(base, 10, {(0, 0): 2}).total == [2, 8]


def test_cost_of_a_stride_is_by_ends_not_steps() -> None:
    assert advance(Position.start(7), 10**15, {}).step == 10**15


def test_no_step_before_the_start_of_the_attempt() -> None:
    with pytest.raises(InvalidArgumentError, match=r"step must be at least 5, .* got 3"):
        advance(Position.start(2, step=5), 3, {})


@settings(max_examples=30, deadline=None)
@given(walks())
def test_the_record_survives_its_message(
    walk: tuple[int, list[Position], dict[tuple[int, int], int], dict[int, int]],
) -> None:
    for position in walk[1]:
        assert Position.from_proto(position.to_proto()) == position


@pytest.mark.parametrize(("live", "cursor", "first"), [([2], 0, 0), ([1, 0], 0, 0), ([0, 1], 2, 0), ([0, 1], 0, 2)])
def test_unreachable_record_is_refused(live: list[int], cursor: int, first: int) -> None:
    message = Position.start(2).to_proto()
    message.first = first
    del message.live[:]
    message.live.extend(live)
    message.cursor = cursor
    with pytest.raises(InvalidArgumentError):
        Position.from_proto(message)
    for kind in (InvalidArgumentError, ProtocolError):
        with pytest.raises(kind, match=f"{SAME_RELEASE}$"):
            Position.received(message, kind)
