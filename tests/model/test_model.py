"""The model itself: what a box receives, by examples that one can read."""

from __future__ import annotations

import pytest
from proof.model import Box, NoInputError

LENGTHS = {0: [3, 1, 2], 1: [1, 0, 2], 2: [2, 2, 0]}
"""For each slot the lengths of its epochs, again and again."""


def made(slot: int, epoch: int, number: int) -> str | None:
    return f"{epoch}{'abc'[slot]}{number}" if number < LENGTHS[slot][epoch % 3] else None


def test_slots_take_turns_until_each_has_ended() -> None:
    box = Box(2, made)
    assert list(box.loop()) == ["0a0", "0b0", "0a1", "0a2"]
    assert list(box.loop()) == ["1a0"], "slot 1 is empty"
    assert list(Box(2, made).loop(6)) == ["0a0", "0b0", "0a1", "0a2", "1a0", "2a0"], "num_steps crosses ends"


def test_a_break_begins_the_next_epoch() -> None:
    box = Box(3, made)
    assert next(box.loop()) == "0a0"
    assert list(box.loop()) == ["1a0", "1c0", "1c1"]


def test_some_loops_stay_in_the_epoch() -> None:
    box = Box(1, made)
    assert next(box.loop(persistent=True)) == "0a0"
    box.loop()  # an iterator that takes nothing
    assert next(box.loop(5)) == "0a1"
    assert list(box.loop()) == ["0a2"], "the rest of the epoch"


def test_a_resume_goes_on_where_the_batch_was() -> None:
    box = Box(1, made)
    loop = box.loop()
    next(loop)
    resumed = box.resumed()
    del loop
    assert list(resumed.loop()) == ["0a1", "0a2"]
    assert list(box.loop()) == ["1a0"], "this one has left the epoch"
    assert list(resumed.moved(3, made).loop()) == ["1a0", "1c0", "1c1"]


def test_an_empty_epoch_of_all_slots_is_an_error() -> None:
    box = Box(1, lambda slot, epoch, number: None if epoch else "batch"[number : number + 1] or None)
    assert "".join(box.loop()) == "batch"
    with pytest.raises(NoInputError):
        next(box.loop())
