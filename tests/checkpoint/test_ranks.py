"""Several ranks save and restore together: real processes, gloo, one folder."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ranked import Outcome, run
from saved_states import save_of
from small_disk import small_disk_at
from waiting import until

from penstock.client.checkpoint.saving.writer import WriteFailed
from penstock.proto.state.checkpoint_files import FAILED, damage, leftovers, newest, report_name

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


def test_each_save_has_the_values_of_its_step(tmp_path: Path) -> None:
    for rank, found in enumerate(values(run(3, "ranked_saves:several", str(tmp_path), 2))):
        assert found == [[float(step + 1), step, step * rank] for step in range(6)]
    assert good(tmp_path) == 5
    assert values(run(2, "ranked_saves:stock_load", str(tmp_path / "step-5"))) == [[6.0] * 3] * 2


@pytest.mark.parametrize("what", ["object", "shape", "step"])
def test_contradictions_are_errors_on_all_ranks(tmp_path: Path, what: str) -> None:
    outcomes = run(2, "ranked_saves:different", str(tmp_path), what)
    assert {one.raised for one in outcomes} == {"InvalidArgumentError" if what == "step" else "CheckpointError"}
    assert outcomes[0].message == outcomes[1].message
    expected = {
        "object": "'number' on ranks 0 and 1",
        "shape": "'same' is a torch.int64 tensor of [5] on rank 0 and a torch.int64 tensor of [6] on rank 1",
        "step": "rank 0: 5, rank 1: 6",
    }
    assert expected[what] in outcomes[0].message
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("what", ["tensor", "generator"])
def test_tensors_that_differ_are_told_once(tmp_path: Path, what: str) -> None:
    for said in values(run(2, "ranked_saves:different", str(tmp_path), what)):
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


def test_a_rank_without_memory_is_named_on_all(tmp_path: Path) -> None:
    which = 0
    cause = f"rank {which}: CheckpointError: no memory for"
    for rank, said in enumerate(values(run(2, "ranked_saves:one_cannot_stage", str(tmp_path), which))):
        assert isinstance(said, list)
        *errors, latest = said
        assert latest == "4"
        assert errors, rank
        assert all("step 2 was not saved" in one and cause in one for one in errors), errors
    assert good(tmp_path) == 4


def test_a_report_into_a_folder_being_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives up and clears the folder, between the writing of rank 1's report and its renaming."""
    replace = os.replace

    def at_the_worst_moment(source: Path, target: Path) -> None:
        if target.name == FAILED:
            until(lambda: bool(list(target.parent.glob(f".{report_name(1)}.*"))))
        else:
            until(lambda: not source.exists())
        replace(source, target)

    monkeypatch.setattr(os, "replace", at_the_worst_moment)
    saves = [save_of(tmp_path, rank, error=error) for rank, error in enumerate(["no memory", None])]
    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(save.run) for save in saves]:
            with pytest.raises(WriteFailed) as said:
                ended.result()
            assert said.value.causes == {0: "no memory"}


def test_a_read_only_folder_fails_at_once(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", 1 << 20) as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for rank, said in enumerate(values(run(2, "ranked_saves:nowhere", str(disk)))):
            assert isinstance(said, list)
            assert f"rank {rank}: " in said[0]
            assert "Read-only file system" in said[0]


def test_ranks_that_call_different_methods(tmp_path: Path) -> None:
    for said in values(run(2, "ranked_saves:other_calls", str(tmp_path))):
        assert isinstance(said, list)
        assert said[0].startswith("InvalidArgumentError: all ranks must call the same method")
        assert "rank 0: save, rank 1: restore" in said[0]


def test_a_verdict_stays_until_all_have_read_it(tmp_path: Path) -> None:
    for said in values(run(2, "ranked_saves:lost_verdict", str(tmp_path))):
        assert isinstance(said, list)
        *errors, latest = said
        assert latest == "6"
        assert errors
        assert all("step 2 was not saved" in one and "rank 0: its writer process ended" in one for one in errors)
    assert good(tmp_path) == 6


def test_checkpointers_one_after_another(tmp_path: Path) -> None:
    assert values(run(2, "ranked_saves:reopened", str(tmp_path))) == [[None, 0, 1, 2]] * 2
