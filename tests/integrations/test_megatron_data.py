"""Batches of one reader for all ranks of a box, without Megatron: make frameworks runs its schedules over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from led import batches
from ranked import run

from penstock.client.integrations.batch_messages import BatchMessages
from penstock.client.integrations.megatron_data import RankGroups
from penstock.proto.errors import InvalidArgumentError, PenstockError


def groups(**other: Any) -> RankGroups:
    given = {"rank": 0, "box": 0, "stage": 0, "num_stages": 3, "peers": (0, 1), "leaders": (0, 4, 8), "readers": (0, 2)}
    return RankGroups(**{**given, "num_boxes": 2, **other})


def values(function: str, size: int, *arguments: Any) -> list[Any]:
    outcomes = run(size, f"model_ranks:{function}", *arguments)
    assert not any(one.raised for one in outcomes), outcomes
    return [one.value for one in outcomes]


# ---- who reads, and who gets batches


def test_ends_of_a_pipeline_take_batches() -> None:
    first, middle = groups(), groups(stage=1)
    last = groups(rank=9, stage=2, peers=(8, 9))
    assert [one.takes("ends", 0, 1) for one in (first, middle, last)] == [True, False, True]
    assert [one.takes("all", 0, 1) for one in (first, middle, last)] == [True, True, True]
    assert [first.takes("ends", chunk, 2) for chunk in range(2)] == [True, False]
    assert [last.takes("ends", chunk, 2) for chunk in range(2)] == [False, True]
    assert (first.targets("ends"), first.targets("all")) == ((8,), (4, 8))
    assert (first.reads, middle.reads, last.leads) == (True, False, False)


@pytest.mark.parametrize(
    "wrong", [{"peers": (1, 2)}, {"leaders": (4, 0)}, {"leaders": (4, 8, 12)}, {"readers": (0,)}], ids=str
)
def test_groups_must_fit_their_rank(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="must"):
        groups(**wrong)


# ---- messages


def test_message_holds_a_whole_batch() -> None:
    messages = BatchMessages()
    batch: dict[str, Any] = {
        "x": torch.arange(6.0).reshape(2, 3).t(),
        "names": ["a", "b"],
        "y": np.arange(3),
        "empty": torch.empty(3, 0),
    }
    message = messages.pack(batch)
    assert messages.rows(message) == 3
    found, again = messages.unpack(message), BatchMessages().unpack(message)
    assert found["names"] == ["a", "b"]
    assert torch.equal(found["x"], batch["x"])
    assert found is not messages.unpack(message)
    assert np.array_equal(again["y"], np.arange(3))
    assert messages.rows(messages.pack({"x": torch.ones(2), "y": torch.ones(3)})) is None


def test_damaged_messages_are_errors() -> None:
    message = BatchMessages().pack({"x": torch.ones(4), "n": 3})
    for at in range(message.numel()):
        for value in (0, 1, 0x7F, 0xFF):
            damaged = message.clone()
            damaged[at] = value
            try:
                BatchMessages().unpack(damaged)
            except PenstockError:
                pass
    for size in range(message.numel()):
        with pytest.raises(PenstockError, match=r"must|0 or more"):
            BatchMessages().unpack(message[:size].clone())


# ---- ranks


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2), (1, 3)])
def test_all_ranks_of_a_box_get_its_batches(tp: int, pp: int) -> None:
    """And the reader does not wait for later stages."""
    expected = [list(range(at, at + 4)) for at in range(0, 20, 4)]
    found = values("one_box", tp * pp, tp, pp, 5)
    ends = [rank for rank in range(tp * pp) if rank // tp in (0, pp - 1)]
    assert [found[rank] for rank in ends] == [expected] * len(ends)


@pytest.mark.parametrize(("before", "after"), [((2, 1), (4, 1)), ((4, 1), (2, 2)), ((2, 2), (1, 1)), ((1, 1), (2, 1))])
def test_state_resumes_on_other_ranks(before: tuple[int, int], after: tuple[int, int]) -> None:
    """Samples of each step are the next ones, and are counted, over all boxes."""
    found = values("resumed", 4, before, after, 2)
    for at, (tp, pp) in enumerate((before, after)):
        dp = 4 // (tp * pp)
        steps = [found[rank][2 * at] for rank in range(0, tp * dp, tp)]
        for step in range(2):
            first = (2 * at + step) * 8
            assert sorted(row for box in steps for row in box[step]) == list(range(first, first + 8))
    assert [(one[1], one[3]) for one in found] == [(16, 32)] * 4


def test_state_goes_into_a_checkpoint(tmp_path: Path) -> None:
    first, second = values("checkpointed", 2, str(tmp_path))
    assert first[0] is second[0] is None
    assert sorted(row for box in (first[1], second[1]) for step in box for row in step) == list(range(24))
    assert first[3:] == second[3:] == [3, [list(range(24, 32)), list(range(32, 40))], 24]


def test_virtual_pipeline() -> None:
    expected = [list(range(at, at + 4)) for at in range(0, 12, 4)]
    first, last = values("chunks", 2, "ends")
    assert first[0] == last[1] == expected
    refused = "next(data_iterator) must be called on the first stage's first model chunk and the last stage's last only"
    assert first[1].startswith(f"{refused}, got a call on chunk 1 of 2, stage 0 ")
    assert last[0].startswith(f"{refused}, got a call on chunk 0 of 2, stage 1 ")
    assert values("chunks", 3, "all") == [[expected, expected]] * 3


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_readers_error_reaches_other_ranks(tp: int, pp: int) -> None:
    reader, other = values("failing", 2, tp, pp)
    assert reader == other
    assert reader[0] == "2"
    assert reader[1] == reader[2]
    assert reader[1].startswith("InputFnError: ")


def test_death_of_the_reader_is_named() -> None:
    _, other = run(2, "model_ranks:reader_dies")
    assert (other.raised, other.value) == ("LaneLostError", None)
    assert other.message.startswith("rank 1 could not exchange batches with the other ranks of box 0")


# ---- all ranks take all batches, as with torchtitan


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
