"""A writer that is killed at any operation of a save of several ranks leaves whole checkpoints, all ranks learn of it,
and the next save leaves a clean folder.

Real checkpointers and real writers; tests/support/traced_writer.py has these killed (SIGKILL). What one rank's killed
writer leaves is among the disks of test_power_loss.py: those of a loss of nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ranked import run


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
