"""States of loaders that an executor iterates, over runners that are threads: at steps, before the first, loaded."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import pytest
import streams
import torch
from numbered_batches import numbers, one_pass, tuples

from penstock.client import DataExecutor, DataLoader
from penstock.client.states import saved_state
from penstock.proto.errors import (
    InputFnError,
    NotRestartableError,
    StateMismatchError,
    StateUnavailableError,
)
from penstock.proto.state.codec import decode_state

# ---- states


def test_state_is_of_the_last_step_and_cached(two: Any, loader: DataLoader) -> None:
    run = None
    for batch in DataExecutor(loader, num_steps=3, appliance=two):
        del batch
        state = loader.state_dict()
        assert state == loader.state_dict()
        state["__penstock__"]["step"] = "changed by the user"
    run = two.runs[0]
    after = loader.state_dict()
    assert run.fetched == [1, 2, 3]
    assert after["__penstock__"]["step"] == 3


def test_a_state_after_break_is_still_in_mid_pass(two: Any, loader: DataLoader) -> None:
    for _ in islice(DataExecutor(loader, appliance=two), 3):
        pass
    state = loader.state_dict()
    again = DataLoader(streams.counter)
    again.load_state_dict(state)
    assert tuples(DataExecutor(again, appliance=two)) == one_pass(0)[3:]
    assert tuples(DataExecutor(loader, appliance=two)) == one_pass(1)


def test_loaded_it_goes_on_on_the_same_shape(two: Any, loader: DataLoader) -> None:
    list(DataExecutor(loader, num_steps=7, appliance=two))
    state = loader.state_dict()
    rest = tuples(DataExecutor(loader, num_steps=9, appliance=two))
    loader.load_state_dict(state)
    assert loader.step == 7
    assert loader.state_dict() == state, "not started, it comes back as given"
    executor = DataExecutor(loader, num_steps=9, appliance=two)
    assert tuples(executor) == rest
    assert executor.step == 16
    assert [opened["key"] for opened in two.opened] == ["", "#1"]
    assert two.opened[1]["seed"] == 5, "the run's seed comes along"
    blob: Any = decode_state(two.opened[1]["start"].blob)
    told = ("user", "restart", "digest", "changed")
    assert {slot: tuple(part[key] for key in told) for slot, part in blob["slots"].items()} == {
        0: ({"done": 4}, {"slot": 0}, 0, False),
        1: ({"done": 3}, {"slot": 1}, 0, False),
    }


def test_what_was_loaded_is_a_copy(two: Any, loader: DataLoader) -> None:
    list(DataExecutor(loader, num_steps=1, appliance=two))
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    loader.load_state_dict(state)
    state["__penstock__"]["step"] = 99
    assert loader.state_dict() == kept


def test_the_state_of_another_loader(two: Any, loader: DataLoader) -> None:
    list(DataExecutor(loader, num_steps=1, appliance=two))
    other = DataLoader(streams.shared)
    with pytest.raises(StateMismatchError, match="streams:shared, got one of the loader streams:counter"):
        other.load_state_dict(loader.state_dict())


def test_another_shape_or_seed(two: Any, loader: DataLoader, appliances: Any) -> None:
    list(DataExecutor(loader, num_steps=1, appliance=two))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatchError, match="1 boxes with 2 workers each and cannot be resumed on 1 with 3"):
        iter(DataExecutor(loader, appliance=appliances(numbers, num_workers_per_box=3)))
    with pytest.raises(StateMismatchError, match=r"seed must be 5, .* got Appliance\(seed=6\)"):
        iter(DataExecutor(loader, appliance=appliances(numbers, num_workers_per_box=2, seed=6)))
    assert tuples(DataExecutor(loader, appliance=two)) == one_pass(0)[1:], "nothing was lost by trying"


def test_closed_appliance_has_the_fetched_state(two: Any, loader: DataLoader) -> None:
    executor = iter(DataExecutor(loader, num_steps=3, appliance=two))
    next(executor)
    state = loader.state_dict()
    two.close()
    assert loader.state_dict() == state


def test_a_closed_appliance_says_so(two: Any, loader: DataLoader) -> None:
    list(DataExecutor(loader, num_steps=3, appliance=two))
    two.close()
    with pytest.raises(StateUnavailableError, match="the state of step 3 is gone with its appliance"):
        loader.state_dict()


def test_loaders_that_cannot_be_saved(appliances: Any) -> None:
    plain = appliances(numbers)
    plain.capabilities["state_methods"] = 0
    loader = DataLoader(streams.shuffled)
    list(DataExecutor(loader, num_steps=1, appliance=plain))
    assert not loader.is_restartable
    with pytest.raises(NotRestartableError, match=r"shuffled returned has no state_dict.*Appliance\(replay=True\)"):
        loader.state_dict()
    replayed = appliances(numbers, replay=True)
    replayed.capabilities["state_methods"] = 0
    loader = DataLoader(streams.shuffled)
    list(DataExecutor(loader, num_steps=2, appliance=replayed))
    assert loader.is_restartable
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(NotRestartableError, match=r"saved with Appliance\(replay=True\)"):
        iter(DataExecutor(loader, appliance=plain))
    assert len(list(DataExecutor(loader, appliance=replayed))) == 3
    persistent = appliances(numbers)
    persistent.capabilities["not_restartable"] = "with persistent_workers=True its worker processes keep data"
    loader = DataLoader(streams.persistent)
    list(DataExecutor(loader, num_steps=1, appliance=persistent))
    assert not loader.is_restartable
    with pytest.raises(NotRestartableError, match="persistent_workers=True"):
        loader.state_dict()


# ---- before the first step, and other work of the local instance


def test_state_before_the_first_step_is_local() -> None:
    loader = DataLoader(streams.shared, 30)
    state = loader.state_dict()
    assert {key: value for key, value in state.items() if key != "__penstock__"} == {"start": 0, "done": [0]}
    assert loader.is_restartable
    with pytest.raises(NotRestartableError):
        DataLoader(streams.shuffled).state_dict()
    assert not DataLoader(streams.shuffled).is_restartable
    assert DataLoader(streams.counter).state_dict().keys() == {"__penstock__"}


def test_state_before_the_first_step_starts_fresh(two: Any, loader: DataLoader) -> None:
    list(DataExecutor(loader, num_steps=3, appliance=two))
    loader.load_state_dict(DataLoader(streams.counter).state_dict())
    assert tuples(DataExecutor(loader, num_steps=2, appliance=two)) == one_pass(0)[:2]


def test_aggregation_gets_worker_states_in_order(two: Any) -> None:
    two.capabilities["state_methods"] = 4
    seen: list[Any] = []

    def aggregate(self: Any, states: list[Any]) -> Any:
        seen.append(states)
        return states

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams.Shared, "aggregate_state_dict", aggregate)
        loader = DataLoader(streams.shared, 30)
        list(DataExecutor(loader, num_steps=3, appliance=two))
        state = loader.state_dict()
    assert seen == [[{"done": 2}, {"done": 1}]]
    assert state["state"] == seen[0]


def test_strict_on_one_method_is_a_type_error(two: Any) -> None:
    two.capabilities["state_methods"] = 4
    good = DataLoader(streams.shared, 30)
    list(DataExecutor(good, num_steps=3, appliance=two))
    half = DataLoader(streams.half_strict, 30)
    list(DataExecutor(half, num_steps=1, appliance=two))
    with pytest.raises(TypeError, match="only deaggregate_state_dict takes `strict`"):
        half.state_dict()


def test_data_that_are_absent_here_are_said_to_be() -> None:
    loader = DataLoader(streams.raises)
    words = "the state before the first step of streams:raises needs the loader"
    with pytest.raises(InputFnError, match=words) as caught:
        loader.state_dict()
    assert isinstance(caught.value.__cause__, ValueError)


def test_worker_init_fn_stands_in_for_worker_0() -> None:
    called: list[int] = []

    class Four(torch.utils.data.DataLoader[Any]):
        state_dict = streams.Shared.state_dict
        load_state_dict = streams.Shared.load_state_dict
        aggregate_state_dict = streams.Shared.aggregate_state_dict
        deaggregate_state_dict = streams.Shared.deaggregate_state_dict
        start = done = 0

    from penstock.client.states.local_loader import LocalLoader

    built: list[Any] = []

    def make() -> Any:
        built.append(Four([1, 2], num_workers=2, worker_init_fn=called.append))  # type: ignore[arg-type]
        return built[-1]

    assert LocalLoader("m:make", make, (), {}).initial_state(5) == {"start": 0, "done": [0]}
    assert called == [0]
    assert built[0].num_workers == 0


# ---- states before the first step, and jobs after the last


def test_state_before_the_run_has_its_seed(appliances: Any, loader: DataLoader) -> None:
    loader.expect(appliances(numbers, num_workers_per_box=2))
    state = loader.state_dict()
    assert loader.state_dict() == state
    seeds = []
    for again in (loader, DataLoader(streams.counter), DataLoader(streams.counter)):
        if again is not loader:
            again.load_state_dict(state)
        appliance = appliances(numbers, num_workers_per_box=2)
        list(DataExecutor(again, num_steps=1, appliance=appliance))
        seeds.append(appliance.opened[0]["seed"])
    assert seeds[0] is not None
    assert seeds == seeds[:1] * 3


def test_seed_other_than_the_states_is_refused(appliances: Any, loader: DataLoader) -> None:
    loader.expect(appliances(numbers))
    loader.state_dict()
    with pytest.raises(StateMismatchError, match=r"which a state .* taken before the first loop"):
        iter(DataExecutor(loader, appliance=appliances(numbers, seed=6)))


def test_boxes_without_a_seed_have_no_early_state(appliances: Any, loader: DataLoader) -> None:
    loader.expect(appliances(numbers, box=1, num_boxes=2))
    with pytest.raises(StateUnavailableError, match=r"Appliance\(seed=...\)"):
        loader.state_dict()
    loader.expect(appliances(numbers, box=1, num_boxes=2, seed=3))
    assert saved_state.read(loader.state_dict()).seed == 3


def test_no_steps_open_no_run(two: Any, loader: DataLoader) -> None:
    list(DataExecutor(loader, num_steps=3, appliance=two))
    again = DataLoader(streams.counter)
    again.load_state_dict(loader.state_dict())
    opened = len(two.opened)
    executor = DataExecutor(again, num_steps=0, checkpoint_steps=1, appliance=two)
    assert list(executor) == []
    assert (executor.step, executor.on_checkpoint_step, executor.digest) == (3, False, None)
    assert len(two.opened) == opened


def test_a_digest_that_is_not_known_is_none(two: Any, loader: DataLoader) -> None:
    executor = DataExecutor(loader, num_steps=2, appliance=two)
    assert executor.digest is None
    steps = iter(executor)
    next(steps)
    assert executor.digest
    assert executor._session is not None
    executor._session.reader.position.chain = None  # as on another number of boxes
    next(steps)
    assert executor.digest is None
