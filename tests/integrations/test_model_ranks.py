"""The batches of the rank that reads for a model, on the other ranks of the model."""

from __future__ import annotations

from led import batches
from ranked import run

from penstock.client.integrations.model_ranks import ranks_of_boxes


def test_ranks_are_grouped_by_box() -> None:
    assert ranks_of_boxes([0, 0, 1, 1]) == [[0, 1], [2, 3]]
    assert ranks_of_boxes([0, 1, 0, 1]) == [[0, 2], [1, 3]]
    assert ranks_of_boxes([0]) == [[0]]


def test_all_ranks_get_the_leaders_batches() -> None:
    outcomes = run(3, "led:read")
    assert [one.value for one in outcomes] == [[repr(batch) for batch in batches()]] * 3


def test_leaders_error_reaches_all_ranks() -> None:
    leader, follower = (one.value for one in run(2, "led:fail"))
    assert leader == ["tensor([1.])", "ValueError: the data end here"]
    assert follower == [
        "tensor([1.])",
        "PenstockError: rank 0, which reads the batches of this rank, failed: ValueError: the data end here",
    ]
