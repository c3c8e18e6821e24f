"""A slot of a loader with four methods whose replay from the launch's start would take long: all slots of the run
restart from the newest saved state."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch_counts
import pytest
from chains import runners
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.stream import open_run

pytestmark = pytest.mark.filterwarnings("ignore:.*was recovered", "ignore:.*moved to")


@pytest.fixture(autouse=True)
def offers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_run, "OFFER_EVERY_S", 0.0)


def made_after(log: Path, before: list[str]) -> dict[str, list[int]]:
    """Batches by the process that made them, since `before` was read."""
    found: dict[str, list[int]] = {}
    for line in log.read_text().splitlines()[len(before) :]:
        pid, batch = line.split()
        found.setdefault(pid, []).append(int(batch))
    return found


def offered(loader: DataLoader) -> None:
    """Wait until the state of this step is at the coordinator."""
    run: Any = loader._session.run  # type: ignore[union-attr]
    until = time.monotonic() + 20
    while run._restarts is not run._restarts_known or run._restarts[0].start.step != loader.step:
        assert time.monotonic() < until
        time.sleep(0.01)


def restarts(loader: DataLoader) -> list[str]:
    """Texts of the coordinator's events of restarts of this run."""
    run: Any = loader._session.run  # type: ignore[union-attr]
    return [
        event.text
        for event in run._client.status().events
        if (event.kind, event.run) == ("run restarted", "restarts/0")
    ]


def kill(number: int, before: set[int]) -> None:
    """Kill a runner that was not there before. Choose a step whose batches were not made before an earlier kill: the
    runners have rings again."""
    found = sorted(runners() - before)
    os.kill(found[number % len(found)], signal.SIGKILL)


def follow(executor: DataExecutor, at: dict[int, Callable[[], None]]) -> None:
    for batch in executor:
        assert int(batch[0]) == executor.step - 1
        at.get(executor.step, lambda: None)()


def test_all_slots_restart_from_the_newest_saved_state(appliance: Appliance, tmp_path: Path) -> None:
    """Again and again, and states that are saved afterwards are right."""
    log, before, seen, states = tmp_path / "log", runners(), [], {}
    loader = DataLoader(launch_counts.Dealt, str(log), 0.01)

    def save(step: int) -> None:
        states[step] = loader.state_dict()
        if step % 2 == 0:
            offered(loader)

    def lose(number: int) -> None:
        seen.append(log.read_text().splitlines())
        kill(number, before)

    with beside(appliance, num_workers_per_box=2, replay_s=0.2, job="restarts") as job:
        executor = DataExecutor(loader, num_steps=260, appliance=job)
        events = {80: lambda: save(80), 91: lambda: save(91), 100: lambda: lose(0), 121: lambda: save(121)}
        events |= {160: lambda: save(160), 170: lambda: lose(1), 200: lambda: save(200)}
        follow(executor, events)
        counts = [(c.appliance_step, c.worker_step, c.lifetime_appliance_step) for c in loader.checkpoints(250)]
        restarted = restarts(loader)
    assert counts == [(90, 45, 250), (90, 45, 250)]
    assert [re.findall(r"state of step (\d+)", text) for text in restarted] == [["80"], ["160"]]
    for made, step in zip(seen, (80, 160), strict=True):
        firsts = {batches[0] for batches in made_after(log, made).values()}
        assert {step, step + 1} <= firsts, "both slots begin there"
    assert {step: state["batches"] for step, state in states.items()} == {80: 80, 91: 91, 121: 121, 160: 160, 200: 200}
    with beside(appliance, num_workers_per_box=3) as job:
        again = DataLoader(launch_counts.Dealt, str(log))
        again.load_state_dict(states[200])
        follow(DataExecutor(again, num_steps=20, appliance=job), {})
