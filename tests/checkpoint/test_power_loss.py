"""A loss of power at any operation of a save leaves whole checkpoints; and one that was said to be there is there.

Nobody can cut the power in a test. What the writer does to the disk is recorded instead (tests/support/
traced_writer.py), and from the record the disks are made that a loss after each operation could leave
(tests/support/power_loss.py): by the promises of fsync, with as much of the rest as chance will have.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import traced_writer
from power_loss import LOSSES, Disk, Tree, at_random, lay_out
from saved_states import mark_of, state_of
from traced_writer import operations, stop_at

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.saving import writer_process
from penstock.proto.errors import CheckpointError
from penstock.proto.state.checkpoint_files import LATEST, checkpoints, damage, newest

SEEDS = range(3)
WHERE = "runs/today/checkpoints"
"""Folder on the disk; none of its parents exists at first."""


@dataclass
class Recorded:
    """Saves into a folder of a disk, one after the other, by a traced writer."""

    root: Path
    room: Path
    patch: pytest.MonkeyPatch
    """Patch that makes checkpointers start traced writers."""
    keep_last: int | None = None
    at_first: Tree = field(default_factory=dict)
    contents: dict[str, Tree] = field(default_factory=dict)
    """Id of a save -> the files of its checkpoint, as they were when it was said to be there."""
    marks: dict[str, int] = field(default_factory=dict)
    """Id of a save -> what was saved."""

    @property
    def folder(self) -> Path:
        return self.root / WHERE

    def save(self, step: int, mark: int) -> str:
        """Its id."""
        return self.saves((step, mark))[0]

    def saves(self, *saves: tuple[int, int]) -> list[str]:
        """Ids of saves by one writer, each of a step and a mark."""
        with AsyncCheckpointer(self.folder, keep_last=self.keep_last, timeout_s=30) as checkpointer:
            return [self._saved(checkpointer, *one) for one in saves]

    def _saved(self, checkpointer: AsyncCheckpointer, step: int, mark: int) -> str:
        checkpointer.save(step, state_of(mark))
        checkpointer.wait()
        return self._learn(mark)

    def killed(self, step: int, mark: int, number: int) -> str:
        """Return the mark of the newest checkpoint after a save whose writer is killed after this operation; "" if
        none."""
        stop_at(self.room, "after", number)
        with AsyncCheckpointer(self.folder, keep_last=self.keep_last, timeout_s=30) as checkpointer:
            checkpointer.save(step, state_of(mark))
            with pytest.raises(CheckpointError, match="SIGKILL"):
                checkpointer.wait()
        return self._learn(mark)

    def renames(self) -> list[int]:
        """Numbers of the operations of the last save that renamed checkpoints."""
        done = operations(self.room)
        begun = max(number for number, one in enumerate(done) if one.kind == "begin")
        changes = done[begun + 1 :]
        parent = str(self.folder)
        return [
            number
            for number, one in enumerate(changes)
            if one.kind == "rename" and str(Path(one.to).parent) == parent and Path(one.to).name != LATEST
        ]

    def _learn(self, mark: int) -> str:
        found = newest(self.folder)
        if found is None:
            return ""
        assert found.manifest is not None
        save = found.manifest.save
        self.contents.setdefault(save, files(found.path))
        self.marks.setdefault(save, mark)
        return save


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    root, room = tmp_path / "disk", tmp_path / "room"
    root.mkdir()
    room.mkdir()
    monkeypatch.setattr(writer_process, "WRITER", traced_writer.THIS)
    monkeypatch.setenv(traced_writer.ROOM, str(room))
    return Recorded(root, room, monkeypatch)


def files(folder: Path) -> Tree:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tree(folder: Path) -> Tree:
    paths = sorted(folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes() for path in paths}


def survives(recorded: Recorded, before: set[str], after: str) -> None:
    """Lose the power after each operation of the last save.

    before, after: ids of the saves of which one must then be the newest there; "": none.
    """
    done = operations(recorded.room)
    assert done[-1].kind == "done"
    last = max(number for number, one in enumerate(done) if one.kind == "begin")
    disk = Disk(recorded.root, recorded.at_first)
    for one in done[:last]:
        disk.do(one)
    found: dict[frozenset[tuple[str, bytes | None]], tuple[Tree, set[str], str]] = {}
    for number, one in enumerate(done[last:]):
        disk.do(one)
        losses = {**LOSSES, **{f"seed {seed}": at_random(100 * number + seed) for seed in SEEDS}}
        for name, loss in losses.items():
            left = disk.after(loss)
            # The first of those that are the same: what must be there is no less for being there later on as well.
            allowed = {after} if one.kind == "done" else {*before, after}
            key = frozenset(left.items())
            if key not in found or allowed < found[key][1]:
                found[key] = left, allowed, f"lost: {name}, after operation {number}: {one.kind} {one.path} {one.to}"
    assert disk.now() == tree(recorded.root), "the record has not all that was done"

    lost = recorded.root.with_name("lost")
    shapes: set[frozenset[str]] = set()
    recorded.patch.undo()  # now real ones
    with AsyncCheckpointer(lost / WHERE, keep_last=recorded.keep_last, timeout_s=30) as again:
        for left, allowed, what in found.values():
            print(what.replace(f"{recorded.folder}/", ""))  # for whoever looks into a failure
            lay_out(left, lost)
            save, steps = newest_of(recorded, lost / WHERE)
            assert save in allowed
            # What is in the files is no matter for what follows: those of checkpoints are whole, others are not read.
            if frozenset(left) not in shapes:
                shapes.add(frozenset(left))
                goes_on(again, recorded.marks.get(save, 0), steps, recorded.keep_last)
            shutil.rmtree(lost)


def newest_of(recorded: Recorded, folder: Path) -> tuple[str, set[str]]:
    """The newest checkpoint's save, and the names of all. Each is, to the last byte, one that was saved."""
    found = newest(folder)
    there = checkpoints(folder)
    for one in there:
        assert one.manifest is not None, one.damage
        assert not list(damage(one.path, one.manifest, contents=True))
        assert files(one.path) == recorded.contents[one.manifest.save]
    assert {one.path for one in there} >= {path for path in folder.glob("step-*") if "." not in path.name}
    steps = {f"step-{one.step}" for one in there}
    pointer = folder / LATEST
    if pointer.is_file():  # it never runs ahead
        assert pointer.read_text().strip() in steps
    return found.manifest.save if found is not None and found.manifest is not None else "", steps


def goes_on(checkpointer: AsyncCheckpointer, mark: int, steps: set[str], keep_last: int | None) -> None:
    """Restore the checkpoint with this mark, save after it, and find no leftovers."""
    folder, state = checkpointer.folder, state_of(0)
    assert (checkpointer.restore(state, verify=True) is None) == (not mark)
    assert mark_of(state) == mark
    checkpointer.save(9, state_of(9))
    checkpointer.wait()
    found = newest(folder)
    assert found is not None
    assert found.manifest is not None
    assert found.step == checkpointer.latest() == 9
    assert not list(damage(found.path, found.manifest, contents=True))
    kept = steps if keep_last is None else set()
    assert {path.name for path in folder.iterdir()} == {".lock", "latest", "step-9", *kept}


def test_first_save_creates_its_folders(recorded: Recorded) -> None:
    survives(recorded, {""}, recorded.save(1, 1))


def test_a_first_save_into_folders_of_a_killed(recorded: Recorded) -> None:
    before = recorded.killed(1, 1, WHERE.count("/"))
    assert tree(recorded.root) == {"runs": None, "runs/today": None, WHERE: None}
    survives(recorded, {before}, recorded.save(1, 2))


@pytest.mark.parametrize("keep_last", [None, 1])
def test_a_second_save(recorded: Recorded, keep_last: int | None) -> None:
    recorded.keep_last = keep_last
    survives(recorded, {recorded.save(1, 1)}, recorded.save(2, 2))


@pytest.mark.parametrize("keep_last", [None, 1])
def test_a_second_save_of_one_writer(recorded: Recorded, keep_last: int | None) -> None:
    recorded.keep_last = keep_last
    first, second = recorded.saves((1, 1), (2, 2))
    survives(recorded, {first}, second)


@pytest.mark.parametrize("keep_last", [None, 1])
def test_each_save_syncs_its_files_and_four_times_more(recorded: Recorded, keep_last: int | None) -> None:
    recorded.keep_last = keep_last
    recorded.saves((1, 1), (2, 2), (3, 3))
    first, *later = synced(recorded)
    expected = len(files(recorded.folder / "step-3")) + 4
    assert [len(one) for one in later] == [expected, expected]
    parents = {str(path) for path in recorded.folder.parents if path.is_relative_to(recorded.root)}
    assert parents < {*first}
    assert not parents & {*later[0], *later[1]}


def test_a_folder_made_anew_is_synced_anew(recorded: Recorded) -> None:
    parent = str(recorded.folder.parent)
    with AsyncCheckpointer(recorded.folder) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
            checkpointer.wait()
            shutil.rmtree(recorded.folder)
    assert [one.count(parent) for one in synced(recorded)] == [1, 1]


def synced(recorded: Recorded) -> list[list[str]]:
    """Paths that each save has synced."""
    saves: list[list[str]] = []
    for one in operations(recorded.room):
        if one.kind == "begin":
            saves.append([])
        elif one.kind == "sync":
            saves[-1].append(one.path)
    return saves


def test_the_same_step_again(recorded: Recorded) -> None:
    survives(recorded, {recorded.save(1, 1)}, recorded.save(1, 2))


def test_a_pointer_that_cannot_be_written(recorded: Recorded) -> None:
    """A failure to write it fails no save, so nothing may depend on it."""
    recorded.keep_last = 1
    (recorded.folder / LATEST).mkdir(parents=True)
    recorded.at_first = tree(recorded.root)
    survives(recorded, {recorded.save(1, 1)}, recorded.save(2, 2))


@pytest.mark.parametrize("number", [0, 1])
def test_a_save_after_a_killed_one(recorded: Recorded, number: int) -> None:
    """The killed one was replacing a checkpoint, which is half done, or done and not on the disk. The next one tidies
    up what it left: not before that is no longer needed."""
    recorded.save(1, 1)
    replaced = recorded.save(1, 2)
    left = recorded.killed(1, 3, recorded.renames()[number])
    survives(recorded, {replaced, left}, recorded.save(2, 4))
