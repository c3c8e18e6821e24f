"""A runner is killed: the training loop notices nothing but time, and gets the batches of a run without the fault."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import doubtful
import gappy
import pytest
import streams
import traps
from chains import kill_runners, plain, resumed, runners
from neighbours import beside
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto import errors
from penstock.proto.rpc.calls import CoordinatorClient


@pytest.fixture
def undisturbed() -> Iterator[Appliance]:
    """An appliance for the run without a fault, in this process: test_appliance_contract.py shows that it is the
    same."""
    with FakeAppliance(num_workers_per_box=2, seed=7, replay=True) as fake:
        yield fake


def test_runners_killed_at_several_points(appliance: Appliance) -> None:
    """Kill them from outside, with the worker processes of their loaders, wherever they are."""

    def train(kill: bool) -> list[Any]:
        before, got = runners(), []
        executor = DataExecutor(DataLoader(streams.stateful, 400, 2, True), num_steps=150, appliance=appliance)
        for batch in executor:
            got.append(plain(batch))
            if kill and executor.step in (3, 60, 120):
                victims = runners() - before
                assert victims
                with contextlib.suppress(ProcessLookupError):
                    os.kill(min(victims), signal.SIGKILL)
        assert executor.stats.recoveries >= kill
        return got

    with pytest.warns(UserWarning, match="recovered"):
        got = train(kill=True)
    assert got == train(kill=False)


@pytest.mark.parametrize(
    ("lengths", "input_fn", "arguments"),
    [
        ((5, 4, 6), streams.shared, (40,)),
        ((2, 2, 6), streams.fresh, (40,)),
        ((5, 4, 6), streams.stateful, (80, 2, True)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_runners_killed_right_behind_a_break(
    appliance: Appliance,
    undisturbed: Appliance,
    lengths: tuple[int, ...],
    input_fn: Any,
    arguments: tuple[Any, ...],
) -> None:
    """Kill runners when nothing of the new epoch is durable yet. The durable snapshot was taken in the epoch before,
    maybe beyond the break."""

    def passes(appliance: Appliance, kill: bool) -> tuple[list[list[Any]], int | None]:
        before, loader = runners(), DataLoader(input_fn, *arguments)
        seen: list[list[Any]] = []
        for wanted in lengths:
            executor = DataExecutor(loader, appliance=appliance)
            taken: list[Any] = []
            for batch in executor:
                taken.append(plain(batch))
                if kill and seen and len(taken) == 1:
                    kill_runners(before)
                if len(taken) == wanted:
                    break
            seen.append(taken)
        return seen, executor.digest

    alone = undisturbed if arguments[1:2] != (2,) else appliance  # only a runner forks processes without threads
    assert passes(appliance, kill=True) == passes(alone, kill=False)


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


def test_state_is_answered_while_the_runner_waits(appliance: Appliance) -> None:
    """The loop is in state_dict(), so it does not reconnect; the recovered runner waits for just that."""
    before = runners()
    loader = DataLoader(streams.stateful, 400)
    executor = DataExecutor(loader, num_steps=190, appliance=appliance)
    got: list[Any] = []
    states: list[Any] = []

    def train() -> None:
        for batch in executor:
            got.append(plain(batch))
            if executor.step == 12:
                kill_runners(before)
                states.append(loader.state_dict())

    with pytest.warns(UserWarning, match="recovered"):
        train()
    assert resumed(appliance, states[0], 18, streams.stateful, 400) == got[12:30]


def test_three_launches_of_an_adding_loader(appliance: Appliance, undisturbed: Appliance) -> None:
    """Runners are lost in the second launch, too: counts go on, and nothing is loaded but what deaggregate returned."""
    steps = DataExecutor(DataLoader(doubtful.streamed), num_steps=60, appliance=undisturbed)
    whole, got = [plain(batch) for batch in steps], []
    state: dict[str, Any] | None = None
    for launch in range(3):
        before = runners()
        loader = DataLoader(doubtful.streamed)
        if state is not None:
            loader.load_state_dict(state)
        # Longer than its part, so that the runners that are lost are missed.
        executor = DataExecutor(loader, num_steps=300, checkpoint_steps=[20], appliance=appliance)
        batches: Any = iter(executor)
        with contextlib.closing(batches), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*was recovered")
            part = [plain(batch) for batch in islice(batches, 12)]
            if launch == 1:
                kill_runners(before)
            part += [plain(batch) for batch in islice(batches, 8)]
            state = loader.state_dict()
        assert state["all_samples"] == 20 * 4 * (launch + 1)
        got += part
    assert got == whole


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_late_starting_loader_saved_in_recovery(appliance: Appliance) -> None:
    """Save in a recovery when there is hardly a durable snapshot yet: the state is found by replay from where the run
    began."""
    before = runners()
    loader = DataLoader(traps.slow_to_save, 10)
    executor = DataExecutor(loader, num_steps=60, appliance=appliance)
    whole, states = [], []

    def train() -> None:
        for batch in executor:
            whole.append(batch.tolist())
            if executor.step == 51:
                kill_runners(before)
                states.append(loader.state_dict())

    train()
    assert resumed(appliance, states[0], 9, traps.slow_to_save, 10) == whole[51:]


@pytest.mark.parametrize(
    ("input_fn", "arguments"),
    [(streams.shared, (40,)), (streams.stateful, (80, 0, True))],
)
@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_state_after_a_break_of_killed_runners(appliance: Appliance, input_fn: Any, arguments: tuple[Any, ...]) -> None:
    """The new runners have not heard of the break when they are asked: the coordinator tells where it was."""
    before, loader = runners(), DataLoader(input_fn, *arguments)
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
        got = resumed(appliance, state, 30 - taken, input_fn, *arguments)
        assert got == rest[taken:], f"saved behind {taken} batches"


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_runner_killed_after_its_empty_epochs(appliance: Appliance, undisturbed: Appliance) -> None:
    """Kill a runner after its empty epochs, and after an epoch that the loop left before it had any of this slot's
    batches."""
    empty = 3

    def stream(appliance: Appliance, kill: bool) -> list[Any]:
        before, loader = runners(), DataLoader(gappy.late_slot, empty)
        got: list[Any] = []
        for _ in range(empty):
            got += map(plain, DataExecutor(loader, appliance=appliance))
        got += map(plain, islice(DataExecutor(loader, appliance=appliance), 1))
        for number, batch in enumerate(DataExecutor(loader, num_steps=12, appliance=appliance)):
            got.append(plain(batch))
            if kill and number == 0:
                kill_runners(before)
        return got

    assert stream(appliance, kill=True) == stream(undisturbed, kill=False)


def test_only_settled_epochs_become_durable(appliance: Appliance) -> None:
    """Its workers are many epochs ahead. A snapshot of these would outlive a break, and be gone on from later."""
    access = appliance._access
    assert access is not None
    with (
        CoordinatorClient(access.address, access.token) as coordinator,
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
