"""The batches of the rank that reads for a model, on the other ranks of the model."""

from __future__ import annotations

from led import batches
from ranked import run

from penstock.client.integrations.rank_groups import RankGroups


def test_ranks_are_grouped_by_box() -> None:
    assert [RankGroups.of_boxes(rank, [0, 0, 1, 1]).peers for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    other = RankGroups.of_boxes(2, [0, 1, 0, 1])
    assert (other.peers, other.readers, other.num_boxes, other.reads) == ((0, 2), (0, 1), 2, False)
    assert RankGroups.of_boxes(0, [0]).reads


def test_all_ranks_get_the_leaders_batches() -> None:
    outcomes = run(3, "led:read")
    assert [one.value for one in outcomes] == [[repr(batch) for batch in batches()]] * 3


def test_leaders_error_reaches_all_ranks() -> None:
    leader, follower = (one.value for one in run(2, "led:fail"))
    assert leader == ["tensor([1.])", "ValueError: the data end here"]
    assert follower == [
        "tensor([1.])",
        "PenstockError: the reader, rank 0, failed with ValueError: the data end here",
    ]
