"""After a `break` a pure loader's process has half a second to leave the user's code. Then it is killed, and the next
epoch begins; no runner is lost."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Any

from lingering import acknowledged, lingering, value
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader


def epoch(number: int) -> list[int]:
    return [value(number, slot, batch) for batch in range(8) for slot in range(2)]


def firsts(batches: Any) -> list[int]:
    return [int(batch[0]) for batch in batches]


def until_exists(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_long_next_is_ended_after_a_break(appliance: Appliance, tmp_path: Path) -> None:
    """What the loop has taken stays valid, a state may be saved at once, and a launch resumed from it is equal."""
    at = 1
    with beside(appliance, num_workers_per_box=2, lane="tcp", replay=True) as own:
        loader = DataLoader(lingering, 600, str(tmp_path), at)
        for number in range(at):
            assert firsts(DataExecutor(loader, appliance=own)) == epoch(number)
        held = list(islice(DataExecutor(loader, appliance=own), 4))
        until_exists(tmp_path / "lingers")
        state = loader.state_dict()
        broke = time.monotonic()
        rest = DataExecutor(loader, appliance=own)
        assert firsts(rest) == epoch(at + 1)
        assert time.monotonic() - broke < 20
        assert firsts(held) == epoch(at)[:4]
        assert rest.stats.recoveries == 0
    assert not Path(f"/proc/{(tmp_path / 'lingers').read_text()}").exists()
    with beside(appliance, num_workers_per_box=2, lane="tcp", replay=True) as own:
        resumed = DataLoader(lingering, 0, str(tmp_path), at)
        resumed.load_state_dict(state)
        assert firsts(DataExecutor(resumed, appliance=own)) == epoch(at)[4:]


def test_what_the_ended_process_had_read_of_the_loop_is_not_lost(appliance: Appliance, tmp_path: Path) -> None:
    with beside(appliance, num_workers_per_box=2) as own:
        loader = DataLoader(acknowledged, str(tmp_path))
        assert firsts(islice(DataExecutor(loader, appliance=own), 7)) == epoch(0)[:7]
        assert firsts(DataExecutor(loader, appliance=own)) == epoch(1)
        assert loader.step == 7 + 16


def test_a_short_next_is_not_cut_off(appliance: Appliance, tmp_path: Path) -> None:
    with beside(appliance, num_workers_per_box=2) as own:
        loader = DataLoader(lingering, 0.2, str(tmp_path))
        batches = DataExecutor(loader, appliance=own)
        assert firsts(islice(batches, 4)) == epoch(0)[:4]
        assert firsts(batches) == epoch(1)
        assert (tmp_path / "left1").exists()
