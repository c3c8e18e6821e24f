"""Attributes of loaders and executors, helpers for steps and batch sizes, states made by hand, records."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import pytest
import streams
import torch

from penstock.client import (
    DataExecutor,
    DataLoader,
    DataLoaderCheckpoint,
    compute_num_steps,
    get_streaming_batch_size,
    infer_batch_size,
)
from penstock.client.states.local_loader import check_strict
from penstock.client.testing import FakeAppliance
from penstock.proto.errors import InvalidArgumentError, StateMismatchError, StateUnavailableError, UnsupportedStateError
from penstock.proto.state.assignment import Assignment, assigned, current_assignment


def rows() -> list[dict[str, Any]]:
    """Three batches a slot, of 4, 4 and 2 rows."""
    current_assignment()
    return [{"x": torch.zeros(size, 3), "y": torch.zeros(size), "name": "text"} for size in (4, 4, 2)]


@pytest.fixture
def loader() -> DataLoader:
    return DataLoader(streams.shared, 30)


def test_a_loader_shows_what_it_was_made_of() -> None:
    lengths = [1, 2]
    loader = DataLoader(streams.uneven, lengths)
    lengths.append(3)  # arguments are copied here and now
    assert loader.input_fn is streams.uneven
    loader.input_fn_params[0][0].append(3)
    assert loader.input_fn_params == (([1, 2],), {})
    assert DataLoader(streams.uneven, [1]).id == loader.id + 1
    assert copy.copy(loader).id == loader.id + 2


def test_the_loader_in_this_process(loader: DataLoader) -> None:
    here = loader.dataloader
    assert [batch["number"] for batch in here] == list(range(30))
    assert loader.dataloader is here
    with pytest.raises(TypeError, match="only deaggregate_state_dict takes `strict`"):
        _ = DataLoader(streams.half_strict, 30).dataloader


def test_the_batch_size_is_that_of_the_last_batch(two: FakeAppliance) -> None:
    def of_two_and_three() -> list[Any]:
        return [(torch.zeros(2 + current_assignment().slot), torch.zeros(3))]

    loader, unlike = DataLoader(rows), DataLoader(of_two_and_three)
    assert loader.batch_size is None
    assert [loader.batch_size for _ in DataExecutor(loader, appliance=two)] == [4, 4, 4, 4, 2, 2]
    assert [unlike.batch_size for _ in DataExecutor(unlike, appliance=two)] == [None, 3]


def test_an_executor_counts_its_own_steps(two: FakeAppliance) -> None:
    loader = DataLoader(rows)
    list(DataExecutor(loader, num_steps=2, appliance=two))
    executor = DataExecutor(loader, num_steps=3, appliance=two)
    assert (executor.dataloader, len(executor), executor.iteration) == (loader, 3, -1)
    seen = [
        (executor.iteration, executor.user_iteration, executor.is_initial_step, executor.on_final_iteration)
        for _ in executor
    ]
    assert seen == [(0, 1, True, False), (1, 2, False, False), (2, 3, False, True)]
    rest = DataExecutor(loader, appliance=two)
    assert [rest.on_final_iteration for _ in rest] == [True], "by the loaders' lengths"
    assert len(rest) == 6


def test_strict_on_one_method_is_refused() -> None:
    """Of a class, and of one that is found by an annotation."""
    with pytest.raises(TypeError, match="HalfStrict: only deaggregate_state_dict takes `strict`"):
        DataLoader(streams.HalfStrict, 30)

    def make() -> streams.HalfStrict:
        return streams.HalfStrict(30)

    with pytest.raises(TypeError, match="HalfStrict"):
        check_strict(make)
    check_strict(streams.shared)
    make.__annotations__["return"] = "NoSuchName"
    check_strict(make)


# ---- helpers


@dataclass
class Pair:
    a: torch.Tensor
    b: Any


def test_a_batch_size_is_inferred() -> None:
    assert infer_batch_size({"x": torch.zeros(4, 2), "more": [(torch.zeros(4), "text")]}) == 4
    assert infer_batch_size(Pair(torch.tensor(1.0), [torch.zeros(1, 7)])) == 1
    with pytest.warns(UserWarning, match=r"same number of rows, got \[2, 3\]"):
        assert infer_batch_size([torch.zeros(2), torch.zeros(3)]) is None
    with pytest.warns(UserWarning, match="must have 4 rows, like earlier batches, got 2"):
        assert infer_batch_size(torch.zeros(2), 4) == 2
    with pytest.raises(InvalidArgumentError, match="got a dict"):
        infer_batch_size({"x": 3})


def test_a_box_s_part_of_the_global_batch() -> None:
    assert get_streaming_batch_size(10) == 10, "outside a worker"
    with assigned(Assignment(box=2, num_boxes=3, slot=1, num_workers_per_box=2, seed=0, first_step=1)):
        assert get_streaming_batch_size(10) == 3
        assert [get_streaming_batch_size(11, rank) for rank in range(6)] == [4, 4, 4, 4, 3, 3]
        with pytest.raises(InvalidArgumentError, match=r">= the number of boxes \(3\), got 2"):
            get_streaming_batch_size(2)
        with pytest.raises(InvalidArgumentError, match=r"in \[0, 6\), got 6"):
            get_streaming_batch_size(9, 6)
    with pytest.raises(TypeError, match=r"an integer, got 2\.0"):
        get_streaming_batch_size(2.0)  # type: ignore[arg-type]


def test_numbers_of_steps() -> None:
    ten, endless = list(range(10)), iter(range(3))
    assert compute_num_steps(ten, num_epochs=3) == 30
    assert compute_num_steps(ten, num_epochs=3, grad_accum_steps=4) == 6, "two whole steps an epoch"
    assert compute_num_steps(ten, num_epochs=3, steps_per_epoch=7) == 21
    assert compute_num_steps(ten, initial_step=90, num_epochs=3, max_steps=100) == 10
    assert compute_num_steps(endless, num_steps=8, max_steps=5) == 5
    for words, arguments in {
        "pass num_steps or num_epochs, not both": {"num_epochs": 1, "num_steps": 1},
        "num_steps, max_steps or num_epochs": {},
        "below max_steps=5, got 5": {"initial_step": 5, "max_steps": 5},
        "steps_per_epoch must be at most the 10": {"num_epochs": 1, "steps_per_epoch": 11},
        "grad_accum_steps must be at most the 10": {"num_epochs": 1, "grad_accum_steps": 11},
    }.items():
        with pytest.raises(InvalidArgumentError, match=words):
            compute_num_steps(ten, **arguments)
    with pytest.raises(InvalidArgumentError, match=r"needs a dataloader with a len"):
        compute_num_steps(endless, num_epochs=1)
    with pytest.raises(InvalidArgumentError, match="must be >= 1"):
        compute_num_steps([], num_steps=1)


# ---- states made by hand


def test_handmade_state_is_read_by_the_loader(
    two: FakeAppliance, loader: DataLoader, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"start": 12, "done": [0, 0]}
    with caplog.at_level(logging.WARNING, "penstock.client"):
        loader.load_state_dict(state, strict=False)
    assert "was not made by DataLoader.state_dict()" in caplog.text
    assert loader.state_dict() == state, "not started, it comes back as given"
    state["start"] = 99
    assert [batch["number"] for batch in DataExecutor(loader, num_steps=2, appliance=two)] == [12, 13]
    assert loader.checkpoints()[0].lifetime_appliance_step == 2


def test_handmade_state_needs_four_methods() -> None:
    with pytest.raises(StateMismatchError, match=r"dict without the key '__penstock__'"):
        DataLoader(streams.counter).load_state_dict({"done": 3})
    with pytest.raises(StateMismatchError, match="got a list"):
        DataLoader(streams.shared).load_state_dict([1])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedStateError):
        DataLoader(streams.shared).load_state_dict({"done": object()})
    DataLoader(streams.only_on_workers).load_state_dict({"start": 0, "done": [3]})


# ---- records


def test_records_count_this_launch_and_all(two: FakeAppliance, loader: DataLoader) -> None:
    with pytest.raises(StateUnavailableError, match=r"checkpoints\(\): step must be one delivered since .*, got 0"):
        loader.checkpoints()
    list(DataExecutor(loader, num_steps=3, appliance=two))
    first, second = loader.checkpoints()
    assert first == DataLoaderCheckpoint(0, 2, 1, 0, 3, 2, 8, {"start": 0, "done": 2}, 3, 2, 8)
    assert second == DataLoaderCheckpoint(1, 2, 1, 0, 3, 1, 4, {"start": 0, "done": 1}, 3, 1, 4)
    assert (second.global_worker_id, second.total_num_workers) == (1, 2)
    loader.load_state_dict(loader.state_dict())
    list(DataExecutor(loader, num_steps=2, appliance=two))
    with pytest.raises(StateUnavailableError, match=r"checkpoints\(\): step must be one delivered since .*, got 3"):
        loader.checkpoints(3)
    again = loader.checkpoints(5)
    assert [(c.appliance_step, c.worker_step, c.samples_streamed) for c in again] == [(2, 1, 4), (2, 1, 4)]
    assert [(c.lifetime_appliance_step, c.lifetime_worker_step) for c in again] == [(5, 3), (5, 2)]
