"""Bad input gets a clear error that names the thing and the remedy; nothing hangs, and the appliance lives on."""

from __future__ import annotations

import time
import warnings
from typing import Any

import hazards
import pytest
import streams
from forked import Child
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto import errors
from penstock.proto.rpc.calls import CoordinatorClient


def drain(appliance: Appliance, loader: DataLoader, steps: int | None = None) -> list[Any]:
    return list(DataExecutor(loader, num_steps=steps, appliance=appliance))


def test_failing_input_fn_shows_remote_traceback(appliance: Appliance) -> None:
    with pytest.raises(errors.InputFnError, match="returned a int"):
        drain(appliance, DataLoader(streams.returns_number))
    with pytest.raises(errors.InputFnError, match="no such dataset") as caught:
        drain(appliance, DataLoader(streams.raises))
    assert "in raises" in caught.value.remote_traceback
    assert "box 0" in str(caught.value)


def test_forked_child_cannot_act_for_its_runner(appliance: Appliance) -> None:
    loader = DataLoader(hazards.strays, 24)
    executor = DataExecutor(loader, num_steps=48, appliance=appliance)
    got = [batch["number"] for batch in executor]
    assert got == [number for n in range(1, 25) for number in (n, 1000 + n)]
    assert executor.stats.recoveries == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_of_a_trainer_gets_an_error(appliance: Appliance) -> None:
    loader = DataLoader(streams.counter, 40)
    executor = DataExecutor(loader, appliance=appliance)
    steps = iter(executor)
    first = next(steps)

    def use_it_all() -> None:
        for use in (
            lambda: next(steps),
            lambda: next(iter(DataExecutor(loader))),
            lambda: loader.state_dict(),
            lambda: next(iter(DataExecutor(DataLoader(streams.counter, 3), appliance=appliance))),
            lambda: CoordinatorClient("127.0.0.1:1", "another", insecure=True),
        ):
            with pytest.raises(errors.ForkedProcessError, match="spawn"):
                use()
        steps.close()  # type: ignore[attr-defined]
        loader.close()
        appliance.close()

    with Child(use_it_all) as child:
        child.join()
    rest = [batch["number"] for batch in steps]
    assert [first["number"], *rest] == [number for n in range(1, 41) for number in (n, 1000 + n)]
    assert loader.state_dict()["__penstock__"]["step"] == 80


def test_failing_state_dict_needs_replay(appliance: Appliance) -> None:
    """It counts as a loader without state methods: it may read a queue, which cannot be read again."""
    with beside(appliance, replay=False) as other:
        loader = DataLoader(streams.bad_state, 8)
        executor = DataExecutor(loader, num_steps=12, appliance=other)
        for _ in executor:
            if executor.step == 3:
                with pytest.raises(errors.NotRestartableError, match=r"cannot reach its server(.|\n)*replay=True"):
                    loader.state_dict()
        assert executor.step == 12


def test_failing_state_dict_of_a_pure_loader_does_no_harm(appliance: Appliance) -> None:
    """What is saved is a number of batches."""

    def numbers(steps: int) -> list[int]:
        return [int(batch["x"][0]) for batch in DataExecutor(loader, num_steps=steps, appliance=other)]

    with beside(appliance, replay=True, replay_s=0) as other:
        loader = DataLoader(streams.bad_state, 40)
        before = numbers(30)
        state = loader.state_dict()
        whole = [*before, *numbers(60)]
        loader = DataLoader(streams.bad_state, 40)
        loader.load_state_dict(state)
        assert numbers(60) == whole[30:]


def test_deaggregate_that_raises(appliance: Appliance) -> None:
    loader = DataLoader(streams.bad_deaggregate)
    drain(appliance, loader, steps=4)
    again = DataLoader(streams.bad_deaggregate)
    again.load_state_dict(loader.state_dict())
    with (
        beside(appliance, num_workers_per_box=1) as other,
        pytest.raises(errors.InputFnError, match="no such worker in the state"),
    ):
        drain(other, again, steps=2)


def test_get_worker_state_outside_of_state_dict() -> None:
    from penstock.client import get_worker_state

    with pytest.raises(RuntimeError, match="state_dict"):
        get_worker_state()


def test_unsharded_input_of_workers_warns_once(appliance: Appliance) -> None:
    deadline, warned_at = time.monotonic() + 60.0, 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, _ in enumerate(DataExecutor(DataLoader(streams.unsharded, 3000), 10**9, appliance=appliance)):
            # What the workers know comes by way of the coordinator: how many steps later is no promise.
            warned_at = warned_at or (step if caught else 0)
            if time.monotonic() > deadline or (warned_at and step > warned_at + 1000):
                break
    assert len([one for one in caught if "current_assignment" in str(one.message)]) == 1


@pytest.mark.parametrize(("how", "says"), [("exit", "SystemExit: 3"), ("mute", "Mute")])
def test_any_user_error_is_one_bounded_error(appliance: Appliance, how: str, says: str) -> None:
    got: list[int] = []
    with pytest.raises(errors.InputFnError, match=says) as caught:
        got.extend(int(batch) for batch in DataExecutor(DataLoader(streams.leaves, how), appliance=appliance))
    assert got == [0, 0, 1, 1]
    assert "in leaves" in caught.value.remote_traceback
    assert len(str(caught.value)) < 200_000
