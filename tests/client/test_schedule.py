"""Checkpoint steps in all their forms."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client.stream.checkpoint_schedule import CheckpointSchedule
from penstock.proto.errors import InvalidArgumentError

STEPS = range(1, 40)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, []),
        (10, [10, 20, 30]),
        (iter([3, 7, 7, 5]), [3, 5, 7]),
        ([range(2, 6, 2), 9, range(30, 20, -4)], [2, 4, 9, 22, 26, 30]),
        (lambda step: step % 13 == 0, [13, 26, 39]),
    ],
)
def test_steps(given: Any, expected: list[int]) -> None:
    schedule = CheckpointSchedule.of(given)
    assert [step for step in STEPS if step in schedule] == expected
    walked, step = [], schedule.after(0)
    while step is not None and step in STEPS:
        walked.append(step)
        step = schedule.after(step)
    assert walked == expected


@pytest.mark.parametrize(
    ("given", "last", "expected"),
    [
        (1000, None, [1000, 2000]),
        (1000, 1500, [1000, 1500]),
        (1000, 1000, [1000]),
        (1000, 7, []),
        (3, 11, [9, 11]),
        ([9, 100], 50, [9]),
        ([9, 40, 50], None, [9, 40]),
        (lambda step: step % 20 == 0, 30, [20]),
        ([range(8, 300)], None, [*range(8, 18)]),
    ],
)
def test_steps_ahead_of_7(given: Any, last: int | None, expected: list[int]) -> None:
    assert CheckpointSchedule.of(given).ahead(7, last, 10) == expected


def test_all_steps_in_the_horizon_are_announced() -> None:
    assert CheckpointSchedule.of(1).ahead(0, None, 10_000) == [*range(1, 10_001)]


def test_only_every_n_steps_includes_the_last() -> None:
    assert CheckpointSchedule.of(5).and_last
    assert not CheckpointSchedule.of([5]).and_last
    assert not CheckpointSchedule.of(0).and_last


@pytest.mark.parametrize("bad", [-1, [0], [range(4)], [range(-2, 3)]])
def test_steps_below_one_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"checkpoint_steps|at least 1"):
        CheckpointSchedule.of(bad)


@pytest.mark.parametrize("bad", [1.5, "10", True, ["a"], [1.0]])
def test_steps_are_integers(bad: Any) -> None:
    with pytest.raises(TypeError):
        CheckpointSchedule.of(bad)
