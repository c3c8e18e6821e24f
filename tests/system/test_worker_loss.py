"""A runner is killed: the training loop notices nothing but time, and gets the batches of a run without the fault."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import pytest
import streams
from chains import kill_runners, plain, resumed, runners
from neighbours import beside
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto import errors
from penstock.proto.rpc.calls import CoordinatorClient


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_unreproducible_loader_is_an_error(appliance: Appliance) -> None:
    before, got = runners(), 0
    executor = DataExecutor(DataLoader(streams.unrepeatable), num_steps=400, appliance=appliance)

    def train() -> None:
        nonlocal got
        for _ in executor:
            got += 1
            if got == 20:
                kill_runners(before)

    with pytest.raises(errors.ReplayMismatchError, match="is not deterministic"):
        train()
    assert got >= 20


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_state_after_a_break_of_killed_runners(appliance: Appliance) -> None:
    """The new runners have not heard of the break when they are asked: the coordinator tells where it was."""
    before, loader = runners(), DataLoader(streams.shared, 40)
    for _ in islice(DataExecutor(loader, appliance=appliance), 5):
        pass
    executor = DataExecutor(loader, num_steps=30, appliance=appliance)
    rest: list[Any] = []
    states: dict[int, Any] = {}
    for batch in executor:
        rest.append(plain(batch))
        if len(rest) in (1, 4):
            kill_runners(before)
            states[len(rest)] = loader.state_dict()
    for taken, state in states.items():
        got = resumed(appliance, state, 30 - taken, streams.shared, 40)
        assert got == rest[taken:], f"saved behind {taken} batches"


def test_only_settled_epochs_become_durable(appliance: Appliance) -> None:
    """Its workers are many epochs ahead. A snapshot of these would outlive a break, and be gone on from later."""
    access = appliance._access
    assert access is not None
    with (
        CoordinatorClient(access.address, access.token, insecure=True) as coordinator,
        beside(appliance, job="ahead", num_workers_per_box=1) as alone,
    ):

        def farthest() -> int:
            (history,) = coordinator.fetch_histories("ahead/0", 0)
            return max(snapshot.total for snapshot in history.slots[0].snapshots)

        steps = enumerate(DataExecutor(DataLoader(streams.stateful), num_steps=100_000, appliance=alone), 1)
        for _ in range(3):
            next(steps)
        time.sleep(2)  # as in an evaluation: snapshots are made durable once a second
        assert farthest() < 3

        def goes_on() -> bool:
            """Take a step, because the first snapshot that was verified may be that of a batch much further on."""
            taken, _ = next(steps)
            reached = farthest()
            assert reached < taken
            return reached > 3

        until(goes_on)
