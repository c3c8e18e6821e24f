"""States of loaders whose positions are arithmetic grow by less than 1 KB a worker; loaders that draw stay exact."""

from __future__ import annotations

from typing import Any

import pytest
import small

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.data import MDSWriter
from penstock.proto.state.codec import encode_state

KB = 1000
STEPS = (3, 25)
"""Steps at which states are saved; 25 is in the second epoch of all loaders."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("small") / "data")
    with MDSWriter(out=path, columns={"n": "int"}, size_limit=500) as writer:
        for number in range(150):
            writer.write({"n": number})
    return path


def sizes(appliance: Any, *loader: Any) -> list[int]:
    data = DataLoader(*loader)
    with appliance:
        for _ in DataExecutor(data, STEPS[-1], appliance=appliance):
            pass
        return [len(encode_state(data.state_at(step))) for step in STEPS]


@pytest.mark.parametrize("input_fn", ["mapped", "streaming", "sharded"])
def test_a_worker_adds_less_than_a_kilobyte(input_fn: str, folder: str) -> None:
    loader = (getattr(small, input_fn), *([folder] if input_fn == "streaming" else []))
    one, six = (sizes(FakeAppliance(num_workers_per_box=workers), *loader) for workers in (1, 6))
    assert all(large - few <= 5 * KB and few <= 3 * KB for large, few in zip(six, one, strict=True)), (one, six)


def test_states_of_worker_processes_are_small_and_exact(appliance: Appliance) -> None:
    first, again = DataLoader(small.augmented), DataLoader(small.augmented)
    executor = DataExecutor(first, 30, appliance=appliance)
    for _ in executor:
        if executor.step == 25:
            digest = executor.digest
    state = first.state_at(25)
    assert len(encode_state(state)) <= 5 * KB
    again.load_state_dict(state)
    resumed = DataExecutor(again, 5, appliance=appliance)
    for _ in resumed:
        pass
    assert resumed.digest == executor.digest != digest
