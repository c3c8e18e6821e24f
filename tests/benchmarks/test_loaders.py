"""The sources keep what the comparison rests on."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.cases import PATH, Case
from benchmarks.loaders import Ready, Stateful, make, source
from benchmarks.measure import batch_bytes
from benchmarks.slots import Order


@pytest.mark.parametrize("case", PATH, ids=lambda case: case.name)
def test_batches_have_the_bytes_of_their_case(case: Case) -> None:
    for batch in islice(make(case), 3):
        assert batch_bytes(batch) == case.nbytes


def test_each_tensor_is_new_and_its_memory_is_not() -> None:
    first, second = islice(Ready(Case("x", 4096)), 2)
    assert first is not second
    assert first.data_ptr() == second.data_ptr()


def test_a_dict_has_leaves_of_their_own() -> None:
    (batch,) = islice(Ready(Case("x", 64 << 10, leaves=8)), 1)
    assert len(batch) == len({leaf.data_ptr() for leaf in batch.values()}) == 8
    assert all(leaf.dtype == torch.int64 and leaf.shape == (8, 128) for leaf in batch.values())


def test_a_source_goes_through_plain_values() -> None:
    case = Case("x", 64, state_tensors=2)
    made = source(**case.to_json())
    assert isinstance(made, Stateful)
    assert made.case == case


def test_a_restored_source_yields_the_same() -> None:
    case = Case("x", 64, state_tensors=3)
    there = make(case)
    assert isinstance(there, Stateful)
    batches = iter(there)
    for _ in range(5):
        next(batches)
    state = there.state_dict()
    assert (state["at"], len(state["tensors"]), state["tensors"][0].nbytes) == (5, 3, 1024)
    again = Stateful(case)
    again.load_state_dict(state)
    assert torch.equal(next(iter(again)), next(batches))
    assert again.state_dict()["at"] == 6


def test_states_are_counted_and_share_no_memory(tmp_path: Path) -> None:
    counter = tmp_path / "states"
    counter.write_bytes(bytes(8))
    there = make(Case("x", 64, state_tensors=1, counter=str(counter)))
    assert isinstance(there, Stateful)
    first, second = there.state_dict(), there.state_dict()
    assert first["tensors"][0].data_ptr() != second["tensors"][0].data_ptr()
    assert np.fromfile(counter, np.int64).tolist() == [2]


@pytest.mark.parametrize(
    ("more", "clock"), [({"busy_s": 0.002}, time.perf_counter), ({"work": 100_000}, time.thread_time)]
)
def test_a_slow_source_takes_its_time(more: dict[str, Any], clock: Callable[[], float]) -> None:
    batches = iter(Ready(Case("x", 64, **more)))
    next(batches)
    started = clock()
    next(batches)
    assert clock() - started > 0.001


def test_order_is_checked_at_every_step() -> None:
    order = Order(2)
    for slot, index in ((0, 0), (1, 0), (0, 1)):
        order.check(torch.tensor([slot, index]))
    with pytest.raises(SystemExit, match="step 3 must be batch 1 of slot 1, got batch 2 of slot 0"):
        order.check(torch.tensor([0, 2]))
