"""Executors and loaders over runners that are threads: arguments, steps, passes, checkpoints."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import streams
import torch
from numbered_batches import numbers, one_pass, tuples

from penstock.client import DataExecutor, DataLoader, checkpoint_closure
from penstock.client.api import appliance as appliance_module
from penstock.client.api.appliance import current_appliance
from penstock.proto.errors import (
    AmbiguousContextError,
    EmptyInputError,
    InvalidArgumentError,
)
from penstock.proto.state.assignment import current_assignment

# ---- arguments


def test_a_loader_that_is_none_of_ours() -> None:
    with pytest.raises(TypeError, match=r"must be a penstock.client.DataLoader, got a torch.utils.data"):
        DataExecutor(torch.utils.data.DataLoader([1]))  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"num_steps": -1}, {"checkpoint_steps": -1}])
def test_steps_below_their_least(loader: DataLoader, given: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{next(iter(given))} must be at least [01], got -1"):
        DataExecutor(loader, **given)  # type: ignore[arg-type]


def test_arguments_are_copied_here_and_now(two: Any) -> None:
    lengths = [1, 2]
    loader = DataLoader(streams.uneven, lengths)
    lengths.append(3)
    next(iter(DataExecutor(loader, appliance=two)))
    assert two.opened[0]["arguments"] == {"args": ([1, 2],), "kwargs": {}}


# ---- epochs and steps


def test_steps_cross_epochs_and_executors(two: Any, loader: DataLoader) -> None:
    stream = one_pass(0) + one_pass(1) + one_pass(2)
    assert tuples(DataExecutor(loader, num_steps=13, appliance=two)) == stream[:13]
    second = DataExecutor(loader, num_steps=4, appliance=two)
    steps = []
    for _ in second:
        steps.append(second.step)
    assert steps == [14, 15, 16, 17]
    assert tuples(DataExecutor(loader, appliance=two)) == stream[17:20], "what is left of the epoch"


def test_persistent_executor_continues_an_epoch(two: Any, loader: DataLoader) -> None:
    executor, taken = DataExecutor(loader, appliance=two, persistent=True), []
    for _ in range(3):
        taken += tuples(islice(executor, 3))
    assert taken == one_pass(0)[:9], "loops go on where the last one was left"
    assert tuples(executor) == one_pass(0)[9:]
    assert tuples(executor) == one_pass(1)
    assert two.runs[0].progress.abandoned == ()


def test_dropped_rest_of_an_epoch_is_logged_once(
    two: Any, loader: DataLoader, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        tuples(islice(DataExecutor(loader, appliance=two), 1))
    told = [record.getMessage() for record in caplog.records if "persistent=True" in record.getMessage()]
    assert len(told) == 1
    assert "left its epoch at step 1, so the next loop begins the next epoch" in told[0]


def test_num_steps_after_break_take_the_next_one(two: Any, loader: DataLoader) -> None:
    taken = []
    for batch in DataExecutor(loader, num_steps=100, appliance=two):
        taken += tuples([batch])
        if len(taken) == 3:
            break
    assert taken + tuples(DataExecutor(loader, num_steps=4, appliance=two)) == one_pass(0)[:7]


def test_dropped_batch_is_freed(two: Any, loader: DataLoader) -> None:
    executor = DataExecutor(loader, num_steps=6, appliance=two)
    steps = iter(executor)
    batch = next(steps)
    assert executor._session is not None
    reader, alive = executor._session.reader, [weakref.ref(batch)]
    del batch
    take, left = reader.next, []

    def checked() -> Any:
        left.append(alive[-1]())
        return take()

    reader.next = checked  # type: ignore[method-assign]
    for batch in steps:
        alive.append(weakref.ref(batch))
        del batch
    assert left == [None] * 5


@pytest.mark.parametrize("num_steps", [None, 5])
def test_empty_input_names_the_loader(appliances: Any, loader: DataLoader, num_steps: int | None) -> None:
    empty = appliances(lambda slot, epoch: [], num_workers_per_box=2)
    with pytest.raises(EmptyInputError, match="streams:counter yielded no batch at all"):
        list(DataExecutor(loader, num_steps=num_steps, appliance=empty))


def test_used_up_input_has_an_empty_second_epoch(appliances: Any, loader: DataLoader) -> None:
    once = appliances(lambda slot, epoch: [] if epoch else numbers(slot, epoch))
    assert len(list(DataExecutor(loader, appliance=once))) == 5
    with pytest.raises(EmptyInputError, match="no batch in epoch 1"):
        list(DataExecutor(loader, appliance=once))


def test_a_later_loop_takes_the_stream_over(two: Any, loader: DataLoader) -> None:
    """As after a `break`: the next epoch, or with num_steps the next batch."""
    first = iter(DataExecutor(loader, appliance=two))
    next(first)
    unused = iter(DataExecutor(loader, appliance=two))
    assert tuples(islice(first, 1)) == one_pass(0)[1:2], "an iterator that took nothing takes nothing over"
    with pytest.raises(RuntimeError, match="load_state_dict was called in a loop over"):
        loader.load_state_dict({})
    second = iter(DataExecutor(loader, num_steps=3, appliance=two))
    assert tuples(islice(second, 2)) == one_pass(1)[:2]
    assert two.runs[0].progress.abandoned == ((0, 2),)
    third = iter(DataExecutor(loader, num_steps=2, appliance=two))
    assert tuples(third) == one_pass(1)[2:4]
    for replaced in (first, second):
        with pytest.raises(RuntimeError, match="another loop has taken batches"):
            next(replaced)
    assert tuples(unused) == one_pass(1)[4:]


def test_a_loader_streams_from_one_appliance(two: Any, loader: DataLoader, appliances: Any) -> None:
    next(iter(DataExecutor(loader, num_steps=1, appliance=two)))
    with pytest.raises(RuntimeError, match=r"streams from .*, not from"):
        iter(DataExecutor(loader, appliance=appliances(numbers)))
    list(DataExecutor(loader, num_steps=1))  # with none named, it goes on where it is
    two.close()
    with pytest.raises(RuntimeError, match="the stream ended at step 2, because its appliance was closed"):
        iter(DataExecutor(loader))


def test_a_dropped_loader_gives_its_run_up(two: Any) -> None:
    loader = DataLoader(streams.counter)
    next(iter(DataExecutor(loader, appliance=two)))
    assert not two.runs[0].abandoned
    del loader
    gc.collect()
    assert two.runs[0].abandoned


# ---- figures


def test_the_length_is_the_sum_over_the_box(two: Any, loader: DataLoader) -> None:
    next(iter(DataExecutor(loader, num_steps=1, appliance=two)))
    with pytest.raises(TypeError, match="has no len"):
        len(loader)
    for view in two.runs[0].views:
        view.capabilities.length = 5
    assert len(loader) == 10


def test_length_before_a_run_is_built_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NUM_WORKERS_PER_BOX", "3")
    assert len(DataLoader(streams.uneven, [2, 3, 4])) == 9
    assert current_assignment().num_workers_per_box == 1
    with pytest.raises(TypeError):
        len(DataLoader(streams.generator))


# ---- checkpoint steps


def test_checkpoint_steps(two: Any, loader: DataLoader) -> None:
    def marked(executor: DataExecutor) -> list[int]:
        return [executor.step for _ in executor if executor.on_checkpoint_step]

    assert marked(DataExecutor(loader, num_steps=7, checkpoint_steps=3, appliance=two)) == [3, 6, 7]
    assert marked(DataExecutor(loader, num_steps=5, checkpoint_steps=[8, range(11, 14)], appliance=two)) == [8, 11, 12]
    assert marked(DataExecutor(loader, num_steps=3, appliance=two)) == []
    assert marked(DataExecutor(loader, num_steps=3, checkpoint_steps=lambda step: step == 17, appliance=two)) == [17]


def test_last_step_is_known_from_lengths(appliances: Any, loader: DataLoader) -> None:
    knows = appliances(numbers, num_workers_per_box=2)
    knows.capabilities["length"] = 5
    executor = DataExecutor(loader, checkpoint_steps=4, appliance=knows)
    assert [executor.step for _ in executor if executor.on_checkpoint_step] == [4, 8, 10]


def test_closures_run_on_checkpoint_steps(two: Any, loader: DataLoader) -> None:
    @checkpoint_closure
    def save(prefix: str) -> str:
        """Saves."""
        return f"{prefix}{executor.step}"

    with pytest.raises(RuntimeError, match=r"save is a checkpoint_closure: call it inside the loop"):
        save("step ")
    executor = DataExecutor(loader, num_steps=4, checkpoint_steps=2, appliance=two)
    assert [save("step ") for _ in executor] == [None, "step 2", None, "step 4"]
    assert save.__doc__ == "Saves."
    with pytest.raises(RuntimeError):
        save("after ")


def test_a_closure_asks_the_innermost_loop(two: Any) -> None:
    outer = DataExecutor(DataLoader(streams.counter), num_steps=2, checkpoint_steps=1, appliance=two)
    inner = DataExecutor(DataLoader(streams.counter), num_steps=2, appliance=two)
    save = checkpoint_closure(lambda: True)
    seen: list[Any] = []
    for _ in outer:
        seen.append([save() for _ in inner])
        seen.append(save())
    assert seen == [[None, None], True, [None, None], True]


def test_a_loop_that_was_left_is_none(two: Any, loader: DataLoader) -> None:
    """A reference cycle may keep it, and helper threads take the only loop elsewhere."""
    left = iter(DataExecutor(loader, appliance=two))
    next(left)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(checkpoint_closure(lambda: True)).result() is None
        two.close()
        with pytest.raises(RuntimeError, match="call it inside the loop over a DataExecutor"):
            pool.submit(checkpoint_closure(lambda: True)).result()


# ---- whose appliance, whose loop


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(30)


def test_each_thread_has_its_own_appliance(two: Any, appliances: Any) -> None:
    other = appliances(numbers)
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


def test_thread_without_one_takes_the_only_one(two: Any, appliances: Any) -> None:
    scope, other = appliance_module._entered, appliances(numbers)
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


def test_checkpoint_closure_uses_its_threads_loop(two: Any, appliances: Any) -> None:
    other = appliances(numbers)
    turns = threading.Barrier(2)
    noted: dict[str, list[int]] = {"each": [], "third": []}

    def train(name: str, appliance: Any, every: int) -> None:
        executor = DataExecutor(DataLoader(streams.counter), num_steps=5, checkpoint_steps=every, appliance=appliance)

        @checkpoint_closure
        def save() -> None:
            noted[name].append(executor.step)

        for _ in executor:
            turns.wait(30)
            save()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, ["each", "third"], [two, other], [1, 3]))
    assert noted == {"each": [1, 2, 3, 4, 5], "third": [3, 5]}
