"""Files of other libraries through coordinator, workers and lanes: runners are killed, and the job moves."""

from __future__ import annotations

from pathlib import Path

import foreign_files
import pytest
from chains import kill_runners, runners
from format_folders import FOLDERS
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader

STEPS = 20
"""More than an epoch."""


@pytest.mark.filterwarnings("ignore:.*was recovered")
@pytest.mark.parametrize("name", ["megatron"])
def test_killed_and_moved_jobs_lose_nothing(appliance: Appliance, name: str, tmp_path: Path) -> None:
    samples = FOLDERS[name](tmp_path)

    def loader() -> DataLoader:
        return DataLoader(foreign_files.streamed, str(tmp_path), 4)

    expected = set(foreign_files.digests(samples).tolist())
    with beside(appliance, num_workers_per_box=1, job=f"whole {name}") as one:
        whole = [batch.tolist() for batch in DataExecutor(loader(), num_steps=STEPS, appliance=one)]
    epoch = -(-len(samples) // 4)
    assert sorted(row for batch in whole[:epoch] for row in batch) == sorted(foreign_files.digests(samples).tolist())
    assert {row for batch in whole for row in batch} == expected

    before, got, first = runners(), [], loader()
    with beside(appliance, num_workers_per_box=2, job=f"killed {name}") as two:
        for step, batch in enumerate(DataExecutor(first, num_steps=8, appliance=two), 1):
            got.append(batch.tolist())
            if step == 3:
                kill_runners(before)
        state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    with beside(appliance, num_workers_per_box=1, job=f"moved {name}") as moved:
        got += [batch.tolist() for batch in DataExecutor(second, num_steps=STEPS - 8, appliance=moved)]
    assert got == whole
