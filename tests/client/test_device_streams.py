"""Whole streams with a device, from real workers: the same as without one, batch by batch and state by state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import streams
import torch
from described import described
from devices import FakeBackend
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.stream import device_reader

TWO: dict[str, Any] = {"num_workers_per_box": 2, "seed": 11}
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="finds no CUDA device")


@pytest.fixture(scope="module")
def daemons() -> Iterator[Appliance]:
    with Appliance(**TWO) as appliance:
        yield appliance


def plain(value: Any) -> Any:
    """A batch as values that can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def stream(daemons: Appliance, **settings: Any) -> list[Any]:
    """What a loop sees in ten steps, over the end of an epoch of eight: batches, digests of the stream so far, and the
    state at each step."""
    found = []
    with beside(daemons, **TWO, **settings) as appliance:
        loader = DataLoader(streams.mixed, 4)
        executor = DataExecutor(loader, num_steps=10, appliance=appliance)
        for batch in executor:
            digest, state = executor.digest, described(loader.state_dict())
            assert loader._session is not None
            reader = loader._session.reader
            assert isinstance(reader, device_reader.DeviceReader) == bool(settings)
            if isinstance(reader, device_reader.DeviceReader) and isinstance(reader._backend, FakeBackend):
                reader._backend.finish()  # all copies that are under way
            assert batch["matrix"].device.type == settings.get("device", "cpu")
            found.append((plain(batch), digest, state))
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_CUDA)])
def test_device_changes_no_stream_or_state(daemons: Appliance, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, copies happen when they have been asked after often, or when the batch is looked at."""
    if device == "cpu":
        monkeypatch.setattr(device_reader, "backend_of", lambda name: FakeBackend(patience=4))
    expected = stream(daemons)
    for lane in ("auto", "tcp"):
        assert stream(daemons, device=device, lane=lane) == expected
