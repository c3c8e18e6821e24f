"""Whole streams with a device, from real workers: the same as without one, batch by batch and state by state."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import streams
import torch
from described import described
from devices import FakeBackend
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.stream import device_reader

Lane = Literal["auto", "tcp"]
SEED = 11


@pytest.fixture(scope="module")
def appliance() -> Iterator[Any]:
    """Appliances by device and lane, on the daemons of one; one of each kind serves all tests."""
    with contextlib.ExitStack() as stack:
        daemons = stack.enter_context(Appliance(num_workers_per_box=2, seed=SEED))

        @functools.cache
        def make(device: str | None, lane: Lane = "auto") -> Appliance:
            settings = {"num_workers_per_box": 2, "seed": SEED, "device": device, "lane": lane}
            return stack.enter_context(beside(daemons, **settings))

        yield make


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="finds no CUDA device")


@pytest.fixture(params=["late", pytest.param("cuda", marks=NO_CUDA)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name to pass. "late": copies happen when they have been asked after often, or when `arrived` says so."""
    if request.param == "late":
        backends: list[FakeBackend] = []

        def late(name: str) -> FakeBackend:
            backends.append(FakeBackend(patience=4))
            return backends[-1]

        monkeypatch.setattr(device_reader, "backend_of", late)
        yield "cpu"
        assert all(backend.started for backend in backends)
    else:
        yield request.param


def arrived(loader: DataLoader) -> None:
    """All copies that are under way have happened."""
    reader = loader._session.reader if loader._session is not None else None
    if isinstance(reader, device_reader.DeviceReader) and isinstance(reader._backend, FakeBackend):
        reader._backend.finish()


def plain(value: Any) -> Any:
    """A batch as values that can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def stream(where: Appliance, steps: int) -> tuple[list[Any], list[int | None], list[Any]]:
    """Return what a loop sees: batches, digests of the stream so far, and the state at each step."""
    batches, digests, states = [], [], []
    loader = DataLoader(streams.mixed, 4)
    executor = DataExecutor(loader, num_steps=steps, appliance=where)
    for batch in executor:
        digests.append(executor.digest)
        states.append(described(loader.state_dict()))
        arrived(loader)
        assert batch["matrix"].device.type == (where.settings.device or "cpu")
        batches.append(plain(batch))
    assert executor.step == steps
    return batches, digests, states


@pytest.fixture(scope="module")
def expected(appliance: Any) -> tuple[list[Any], list[int | None], list[Any]]:
    """Without a device: ten steps, over the end of an epoch of eight."""
    return stream(appliance(None), 10)


@pytest.mark.parametrize("lane", ["auto", "tcp"])
def test_device_changes_no_stream_or_state(appliance: Any, device: str, lane: Lane, expected: Any) -> None:
    batches, digests, states = stream(appliance(device, lane), 10)
    assert batches == expected[0]
    assert digests == expected[1]
    assert states == expected[2]


def test_state_of_a_device_resumes_exactly(appliance: Any, device: str, expected: Any) -> None:
    """From the middle of an epoch."""
    at, loader = 3, DataLoader(streams.mixed, 4)
    iterator: Any = iter(DataExecutor(loader, num_steps=10, appliance=appliance(device)))
    for _ in range(at):
        next(iterator)
    state = copy.deepcopy(loader.state_dict())
    iterator.close()
    loader.close()
    again = DataLoader(streams.mixed, 4)
    again.load_state_dict(state)
    batches = []
    for batch in DataExecutor(again, num_steps=10 - at, appliance=appliance(device)):
        arrived(again)
        batches.append(plain(batch))
    assert batches == expected[0][at:]
