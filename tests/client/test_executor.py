"""Executors and loaders over workers in this process: arguments, steps, closures, whose appliance, states."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import streams
import torch

from penstock.client import DataExecutor, DataLoader, checkpoint_closure
from penstock.client.api import appliance as appliance_module
from penstock.client.api.appliance import current_appliance
from penstock.client.states import saved_state
from penstock.client.testing import FakeAppliance
from penstock.proto.errors import (
    AmbiguousContextError,
    EmptyInputError,
    InputFnError,
    InvalidArgumentError,
    NotRestartableError,
    StateMismatchError,
    StateUnavailableError,
)
from penstock.proto.state.assignment import current_assignment


def test_arguments_that_cannot_be_meant(loader: DataLoader) -> None:
    with pytest.raises(TypeError, match=r"must be a penstock.client.DataLoader, got a torch.utils.data"):
        DataExecutor(torch.utils.data.DataLoader([1]))  # type: ignore[arg-type]
    for name in ("num_steps", "checkpoint_steps"):
        with pytest.raises(InvalidArgumentError, match=rf"{name} must be at least [01], got -1"):
            DataExecutor(loader, **{name: -1})  # type: ignore[arg-type]


def test_dropped_batch_is_freed(two: FakeAppliance, loader: DataLoader) -> None:
    executor = DataExecutor(loader, num_steps=6, appliance=two)
    steps = iter(executor)
    batch = next(steps)["x"]
    assert executor._session is not None
    reader, alive = executor._session.reader, [weakref.ref(batch)]
    del batch
    take, left = reader.next, []

    def checked() -> Any:
        left.append(alive[-1]())
        return take()

    reader.next = checked  # type: ignore[method-assign]
    for batch in steps:
        alive.append(weakref.ref(batch["x"]))
        del batch
    assert left == [None] * 5


def test_empty_input_names_the_loader(two: FakeAppliance) -> None:
    with pytest.raises(EmptyInputError, match="streams:empty yielded no batch at all"):
        list(DataExecutor(DataLoader(streams.empty), num_steps=5, appliance=two))


def test_a_loader_streams_from_one_appliance(two: FakeAppliance, loader: DataLoader) -> None:
    next(iter(DataExecutor(loader, num_steps=2, appliance=two)))
    with pytest.raises(RuntimeError, match=r"streams from .*, not from"):
        iter(DataExecutor(loader, appliance=FakeAppliance()))
    rest = [batch["number"] for batch in DataExecutor(loader, num_steps=1)]
    assert rest == [1001], "with none named, it goes on where it is; with num_steps, with the next batch"


def test_length_before_a_run_is_built_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NUM_WORKERS_PER_BOX", "3")
    assert len(DataLoader(streams.uneven, [2, 3, 4])) == 9
    assert current_assignment().num_workers_per_box == 1
    with pytest.raises(TypeError):
        len(DataLoader(streams.generator))


# ---- closures


def test_closures_run_on_checkpoint_steps(two: FakeAppliance, loader: DataLoader) -> None:
    """Those of the innermost loop."""

    @checkpoint_closure
    def save(prefix: str) -> str:
        """Saves."""
        return f"{prefix}{executor.step}"

    with pytest.raises(RuntimeError, match=r"save is a checkpoint_closure: call it inside the loop"):
        save("step ")
    executor = DataExecutor(loader, num_steps=4, checkpoint_steps=2, appliance=two)
    inner = DataExecutor(DataLoader(streams.counter), num_steps=8, appliance=two)
    assert [([save("") for _ in zip("ab", inner, strict=False)], save("step ")) for _ in executor] == [
        ([None, None], saved) for saved in (None, "step 2", None, "step 4")
    ]
    assert save.__doc__ == "Saves."
    with pytest.raises(RuntimeError):
        save("after ")


def test_a_loop_that_was_left_is_none(two: FakeAppliance, loader: DataLoader) -> None:
    """A reference cycle may keep it, and helper threads take the only loop elsewhere."""
    left = iter(DataExecutor(loader, appliance=two))
    next(left)
    assert in_a_thread(checkpoint_closure(lambda: True)) is None
    two.close()
    with pytest.raises(RuntimeError, match="call it inside the loop over a DataExecutor"):
        in_a_thread(checkpoint_closure(lambda: True))


# ---- whose appliance


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(30)


def test_each_thread_has_its_own_appliance(two: FakeAppliance) -> None:
    other = FakeAppliance()
    turns = threading.Barrier(2)

    def entering(appliance: Any) -> Any:
        scope = appliance_module._entered
        scope.enter(appliance)
        turns.wait(30)  # the other has entered its own by now
        try:
            return current_appliance()
        finally:
            turns.wait(30)
            scope.leave(appliance)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(entering, [two, other]))
    assert found == [two, other]


def test_thread_without_one_takes_the_only_one(two: FakeAppliance) -> None:
    scope, other = appliance_module._entered, FakeAppliance()
    scope.enter(two)
    try:
        assert in_a_thread(current_appliance) is two
        scope.enter(other)
        try:
            assert current_appliance() is other, "the innermost"
            with pytest.raises(AmbiguousContextError, match=r"got 2 in .*DataExecutor\(loader, appliance=...\)"):
                in_a_thread(current_appliance)
            other.close()
            assert in_a_thread(current_appliance) is two, "one that is closed is not meant"
        finally:
            scope.leave(other)
    finally:
        scope.leave(two)
    assert scope.innermost() is None


# ---- states


def numbers(batches: Any) -> list[int]:
    return [batch["number"] for batch in batches]


def test_a_state_is_a_copy(two: FakeAppliance, loader: DataLoader) -> None:
    """What is returned, and what is loaded."""
    list(DataExecutor(loader, num_steps=3, appliance=two))
    kept = loader.state_dict()
    changed = loader.state_dict()
    changed["__penstock__"]["step"] = "changed by the user"
    assert loader.state_dict() == kept
    given = loader.state_dict()
    loader.load_state_dict(given)
    given["__penstock__"]["step"] = 99
    assert loader.state_dict() == kept
    assert loader.step == 3


def test_a_state_after_break_is_still_in_mid_pass(two: FakeAppliance, loader: DataLoader) -> None:
    for _ in islice(DataExecutor(loader, appliance=two), 17):
        pass
    again = DataLoader(streams.counter)
    again.load_state_dict(loader.state_dict())
    assert numbers(DataExecutor(again, appliance=two)) == [1009, 10, 1010]
    assert numbers(islice(DataExecutor(loader, appliance=two), 2)) == [1, 1001]


def test_the_state_of_another_loader_or_seed(two: FakeAppliance, loader: DataLoader) -> None:
    list(DataExecutor(loader, num_steps=1, appliance=two))
    with pytest.raises(StateMismatchError, match="streams:shared, got one of the loader streams:counter"):
        DataLoader(streams.shared).load_state_dict(loader.state_dict())
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatchError, match=r"seed must be 5, .* got Appliance\(seed=6\)"):
        iter(DataExecutor(loader, appliance=FakeAppliance(num_workers_per_box=2, seed=6)))
    assert numbers(DataExecutor(loader, num_steps=1, appliance=two)) == [1001], "nothing was lost by trying"


def test_a_closed_appliance_has_what_was_fetched(two: FakeAppliance, loader: DataLoader) -> None:
    steps = iter(DataExecutor(loader, num_steps=3, appliance=two))
    next(steps)
    state = loader.state_dict()
    next(steps)
    two.close()
    assert loader.state_at(1) == state
    with pytest.raises(StateUnavailableError, match="the state of step 2 is gone with its appliance"):
        loader.state_dict()


def test_loaders_that_cannot_be_saved(two: FakeAppliance, loader: DataLoader) -> None:
    """Without methods, but by replay, or with processes that keep data."""
    replayed = FakeAppliance(seed=5, replay=True)
    plain = DataLoader(streams.shuffled)
    list(DataExecutor(plain, num_steps=2, appliance=replayed))
    assert plain.is_restartable
    plain.load_state_dict(plain.state_dict())
    with pytest.raises(NotRestartableError, match=r"saved with Appliance\(replay=True\)"):
        iter(DataExecutor(plain, appliance=FakeAppliance(seed=5)))
    assert len(list(DataExecutor(plain, appliance=replayed))) == 4
    list(DataExecutor(loader, num_steps=1, appliance=two))
    assert loader.is_restartable
    assert loader._session is not None
    loader._session.run.views[0].capabilities.not_restartable = "with persistent_workers=True its processes keep data"
    assert not loader.is_restartable
    with pytest.raises(NotRestartableError, match="persistent_workers=True"):
        loader.state_dict()


# ---- before the first step, and other work of the local instance


def test_state_before_the_first_step_is_local() -> None:
    loader = DataLoader(streams.shared, 30)
    state = loader.state_dict()
    assert {key: value for key, value in state.items() if key != "__penstock__"} == {"start": 0, "done": [0]}
    assert loader.is_restartable
    with pytest.raises(
        NotRestartableError, match=r"the loader of \S+shuffled has no state_dict.*Appliance\(replay=True\)"
    ):
        DataLoader(streams.shuffled).state_dict()
    assert not DataLoader(streams.shuffled).is_restartable
    assert DataLoader(streams.counter).state_dict().keys() == {"__penstock__"}


def test_data_that_are_absent_here_are_said_to_be() -> None:
    loader = DataLoader(streams.raises)
    words = "the state before the first step of streams:raises needs the loader"
    with pytest.raises(InputFnError, match=words) as caught:
        loader.state_dict()
    assert isinstance(caught.value.__cause__, ValueError)


def test_seed_other_than_the_states_is_refused(loader: DataLoader) -> None:
    loader.expect(FakeAppliance())
    loader.state_dict()
    with pytest.raises(StateMismatchError, match=r"which a state .* taken before the first loop"):
        iter(DataExecutor(loader, appliance=FakeAppliance(seed=6)))


def test_boxes_without_a_seed_have_no_early_state(loader: DataLoader) -> None:
    loader.expect(FakeAppliance(box=1, num_boxes=2))
    with pytest.raises(StateUnavailableError, match=r"Appliance\(seed=...\)"):
        loader.state_dict()
    loader.expect(FakeAppliance(box=1, num_boxes=2, seed=3))
    assert saved_state.read(loader.state_dict()).seed == 3


def test_no_steps_open_no_run(two: FakeAppliance, loader: DataLoader) -> None:
    executor = DataExecutor(loader, num_steps=0, checkpoint_steps=1, appliance=two)
    assert list(executor) == []
    assert (executor.step, executor.on_checkpoint_step, executor.digest) == (0, False, None)
    assert loader._session is None
