"""Several ranks save and restore together: real processes, gloo, one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranked import Outcome, run

from penstock.proto.state.checkpoint_files import damage, leftovers, newest

pytestmark = pytest.mark.timeout(240)


def values(outcomes: list[Outcome]) -> list[object]:
    assert not [one for one in outcomes if one.raised], outcomes
    return [one.value for one in outcomes]


def good(folder: Path) -> int:
    """The step of the newest checkpoint, whose files are all as they were written; and nothing else is there."""
    found = newest(folder)
    assert found is not None
    assert found.manifest is not None
    assert not list(damage(found.path, found.manifest, contents=True))
    assert not leftovers(folder)
    return found.step


def test_two_ranks_replicas_resume_on_any_number(tmp_path: Path) -> None:
    saved = values(run(2, "ranked_saves:ddp_save", str(tmp_path)))
    assert saved[0] == saved[1]
    assert good(tmp_path) == 3
    for then in (1, 3):
        assert values(run(then, "ranked_saves:ddp_restore", str(tmp_path))) == [saved[0]] * then


def test_ranks_agree_on_the_newest(tmp_path: Path) -> None:
    """Each waits for its own save, and the one that was saved last is the newest."""
    assert values(run(2, "ranked_saves:agreed", str(tmp_path))) == [[None, 5, 3]] * 2


def test_shards_go_on_on_any_number(tmp_path: Path) -> None:
    saved = values(run(2, "ranked_saves:fsdp_save", str(tmp_path)))
    assert good(tmp_path) == 4
    names = {path.name for path in (tmp_path / "step-4").glob("*.distcp")}
    assert {f"optimizer__{rank}_0.distcp" for rank in range(2)} <= names
    for then in (3, 1):
        assert values(run(then, "ranked_saves:fsdp_restore", str(tmp_path))) == [saved[0]] * then


def test_quantised_rows_go_on_on_any_number(tmp_path: Path) -> None:
    def rows(ranks: int, what: str) -> list[object]:
        parts = values(run(ranks, f"ranked_saves:{what}", str(tmp_path)))
        return [[row for part in parts for row in part[number]] for number in range(2)]  # type: ignore[index]

    saved = rows(2, "quantised_save")
    for then in (1, 2, 4):
        assert rows(then, "quantised_restore") == saved


def test_contradictions_are_errors_on_all_ranks(tmp_path: Path) -> None:
    one, other = values(run(2, "ranked_saves:contradictions", str(tmp_path)))
    assert isinstance(one, list)
    assert one == other
    for said, kind, what in zip(
        one,
        ("CheckpointError", "CheckpointError", "InvalidArgumentError"),
        (
            "'number' on ranks 0 and 1",
            "'same' is a torch.int64 tensor of [5] on rank 0 and a torch.int64 tensor of [6] on rank 1",
            "rank 0: 5, rank 1: 6",
        ),
        strict=True,
    ):
        assert said.startswith(kind)
        assert what in said
    assert not list(tmp_path.glob("step-*"))


def test_tensors_that_differ_are_told_once(tmp_path: Path) -> None:
    for said in values(run(2, "ranked_saves:different", str(tmp_path), "tensor")):
        assert isinstance(said, list)
        [one] = said
        assert "different values in 1 tensors" in one
        assert "'same' on ranks 0 and 1" in one
    assert good(tmp_path) == 5


def test_outside_of_the_group_or_made_too_early(tmp_path: Path) -> None:
    inside, outside = values(run(2, "ranked_saves:outside", str(tmp_path)))
    early = "CheckpointError: this AsyncCheckpointer was created before init_process_group, and covers only this rank"
    assert isinstance(inside, list)
    assert isinstance(outside, list)
    assert [one.startswith(early) for one in inside] == [True]
    assert outside[0].startswith("InvalidArgumentError: rank 1 must be in AsyncCheckpointer(group=...)")
    assert outside[1].startswith(early)
    assert not list(tmp_path.glob("step-*"))


def test_a_failing_rank_is_named_on_all(tmp_path: Path) -> None:
    which = 1
    found = values(run(2, "ranked_saves:one_cannot_collect", str(tmp_path), which))
    own, other = found[which], found[1 - which]
    assert own == ["OSError: the state is out", "3"]
    assert other == [f"CheckpointError: step 2 was not saved: rank {which}: OSError: the state is out", "3"]
    assert good(tmp_path) == 3


def test_ranks_that_call_different_methods(tmp_path: Path) -> None:
    for said in values(run(2, "ranked_saves:other_calls", str(tmp_path))):
        assert isinstance(said, list)
        assert said[0].startswith("InvalidArgumentError: all ranks must call the same method")
        assert "rank 0: save, rank 1: restore" in said[0]
        assert said[1] == "InvalidArgumentError: all ranks must restore the same step, got rank 0: 3, rank 1: 4"


def test_a_rank_that_cannot_load_leaves_all_as_they_were(tmp_path: Path) -> None:
    found: Any = values(run(2, "ranked_saves:one_cannot_load", str(tmp_path)))
    for said, left in found:
        assert "OSError: it does not go in" in said
        assert left == [0.0, 0.0]


def test_a_verdict_stays_until_all_have_read_it(tmp_path: Path) -> None:
    for said in values(run(2, "ranked_saves:lost_verdict", str(tmp_path))):
        assert isinstance(said, list)
        *errors, latest = said
        assert latest == "6"
        assert errors
        assert all("step 2 was not saved" in one and "rank 0: its writer process ended" in one for one in errors)
    assert good(tmp_path) == 6
