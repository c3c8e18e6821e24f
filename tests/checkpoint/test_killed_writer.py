"""A writer that is killed at any operation of a save leaves whole checkpoints, and the next save a clean folder.

Real checkpointers and real writers; tests/support/traced_writer.py has these killed (SIGKILL).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import traced_writer
from ranked import run
from saved_states import mark_of, state_of
from traced_writer import forget, operations, points, stop_at

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.saving import writer_process
from penstock.proto.errors import CheckpointError
from penstock.proto.state.checkpoint_files import checkpoints, damage


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the traced writers' records."""
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setattr(writer_process, "WRITER", traced_writer.THIS)
    monkeypatch.setenv(traced_writer.ROOM, str(room))
    return room


def whole(folder: Path) -> None:
    """Whatever has a checkpoint's name is one, to the last byte."""
    found = checkpoints(folder)
    for one in found:
        assert one.manifest is not None, one.damage
        assert not list(damage(one.path, one.manifest, contents=True))
    assert {one.path.name for one in found} >= {path.name for path in folder.glob("step-*") if "." not in path.name}


@pytest.mark.parametrize(
    ("step", "keep_last", "left"),
    [
        pytest.param(1, None, {"step-1", "step-9"}, id="the same step again"),
        pytest.param(2, 1, {"step-9"}, id="the second save, and the first one is deleted"),
    ],
)
def test_killed_writers_leave_the_old_or_the_new(
    tmp_path: Path, room: Path, step: int, keep_last: int | None, left: set[str]
) -> None:
    """Other saves, and each disk that they leave, are in test_power_loss.py."""
    folder, good = tmp_path / "checkpoints", tmp_path / "good"
    with AsyncCheckpointer(folder, keep_last=keep_last, separation_hint="optimizer", timeout_s=30) as checkpointer:

        def start_over() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            forget(room)

        checkpointer.save(1, state_of(1))
        checkpointer.wait()
        folder.rename(good)
        start_over()
        mark = step + 100
        checkpointer.save(step, state_of(mark))
        checkpointer.wait()
        places = list(points(operations(room)))
        assert len(places) > 30

        for place in places:
            start_over()
            stop_at(room, *place)
            checkpointer.save(step, state_of(mark))
            with pytest.raises(
                CheckpointError, match=rf"step {step} was not saved .*: rank 0: .*ended .* \(killed by SIGKILL"
            ):
                checkpointer.wait()
            done = operations(room)
            print(place, done[-1:])  # for whoever looks into a failure

            committed = any(one.kind == "rename" and one.to == str(folder / f"step-{step}") for one in done)
            expected = (step, mark) if committed else (1, 1)
            assert checkpointer.latest() == expected[0]
            whole(folder)
            state = state_of(0)
            assert checkpointer.restore(state, verify=True) == expected[0]
            assert mark_of(state) == expected[1]

            checkpointer.save(9, state_of(9))
            checkpointer.wait()
            assert checkpointer.latest() == 9
            whole(folder)
            assert {path.name for path in folder.iterdir()} == {".lock", "latest", *left}
            state = state_of(0)
            assert checkpointer.restore(state) == 9
            assert mark_of(state) == 9


@pytest.mark.parametrize(("victim", "every"), [(0, 5), (1, 1)])
def test_all_ranks_learn_whose_writer_was_killed(tmp_path: Path, victim: int, every: int) -> None:
    """A few of the places in rank 0's writer, and all in that of rank 1."""
    folder, room = tmp_path / "checkpoints", tmp_path / "room"
    room.mkdir()
    outcomes = run(2, "stopped_saves:killed", str(folder), str(room), victim, every)
    assert not [one for one in outcomes if one.raised], outcomes
    times = list(zip(*(one.value for one in outcomes), strict=True))
    assert len(times) > 8
    for seen in times:
        print(seen)  # for whoever looks into a failure
        committed = "step-2" in seen[0]["renamed"] if victim == 0 else seen[0]["latest"] == 2
        reported = "rank-1.json" in seen[0]["renamed"]
        assert f"rank {victim}: its writer process ended before the save did (killed by SIGKILL" in seen[victim]["said"]
        other = seen[1 - victim]["said"]
        if committed:
            assert not other
            assert victim == 0 or reported
        else:
            assert f"rank {victim}: its writer process ended before the save did (killed by SIGKILL" in other
        step = 2 if committed else 1
        assert not [name for name in seen[0]["files"] if "rank" in name or "failed" in name]
        for rank, one in enumerate(seen):
            assert one["latest"] == step
            assert one["restored"] == [step, 10 * step + rank]
            assert one["after"] == ["", 3]
            assert one["names"] == [".lock", "latest", *(f"step-{number}" for number in range(1, step + 1)), "step-3"]
