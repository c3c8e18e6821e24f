"""States of loaders whose positions are arithmetic grow by less than 1 KB a worker; loaders that draw stay exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import small

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.data import MDSWriter
from penstock.proto.state.codec import encode_state
from penstock.proto.state.generators import capture_rng, seed_rng
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.slot_loader import SlotLoader
from penstock.worker.runner.in_process_slot import ProcessGlobals

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
    loader = (getattr(small, input_fn), *([folder] if input_fn in ("streaming", "counted") else []))
    one, six = (sizes(FakeAppliance(num_workers_per_box=workers), *loader) for workers in (1, 6))
    assert all(large - few <= 5 * KB and few <= 3 * KB for large, few in zip(six, one, strict=True)), (one, six)


@pytest.mark.parametrize("input_fn", ["augmented", "counted"])
def test_states_of_worker_processes_are_small_and_exact(appliance: Appliance, input_fn: str, folder: str) -> None:
    loader = (getattr(small, input_fn), *([folder] if input_fn == "counted" else []))
    first, again = DataLoader(*loader), DataLoader(*loader)
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


# ---- which loaders draw


def source_of(input_fn: str, **arguments: Any) -> SlotLoader:
    loader = records_pb2.LoaderSpec(
        input_fn=f"small:{input_fn}", allow=["small"], arguments=encode_state({"args": (), "kwargs": arguments})
    )
    source = SlotLoader(records_pb2.WorkerAssignment(num_boxes=1, num_workers_per_box=1, loader=loader))
    source.build()
    source.open_epoch()
    return source


@pytest.fixture
def worker() -> Iterator[None]:
    """What user code finds in a worker's process, for loaders that are made in this one."""
    with ProcessGlobals().in_place():
        yield


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(("input_fn", "arguments"), [("augmented", {"reseed": False}), ("wrapped", {})], ids=str)
def test_generators_of_loaders_that_may_draw_are_saved(input_fn: str, arguments: dict[str, Any]) -> None:
    source = source_of(input_fn, **arguments)
    source.next()
    snapshot = source.snapshot(1)
    batch = source.next()
    source.restore(snapshot)
    assert source.next().tolist() == batch.tolist()
    assert len(snapshot.rng) > 10 * KB


@pytest.mark.usefixtures("worker")
def test_a_stray_draw_depends_on_the_position_alone() -> None:
    source, seeded = source_of("mapped"), []
    for _ in range(2):
        source.next()
        snapshot = source.snapshot(1)
        assert snapshot.rng == b""
        for _ in range(2):
            source.restore(snapshot)
            seeded.append(capture_rng())
            seed_rng(5)
    assert seeded[0] == seeded[1] != seeded[2] == seeded[3]
