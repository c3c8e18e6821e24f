"""Staging from a CUDA device, in the order that makes it right: by a torch.cuda that takes notes; for real on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import FakeRuntime

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.saving import staging
from penstock.client.checkpoint.saving.staging import SharedImage


class FakeCuda:
    """torch.cuda, as far as staging needs it."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.runtime = FakeRuntime()

    def Stream(self, device: torch.device) -> Any:
        cuda = self

        class Stream:
            def wait_stream(self, other: str) -> None:
                cuda.did.append(f"wait for {other}")

            def synchronize(self) -> None:
                cuda.did.append("synchronize")

        return Stream()

    def cudart(self) -> FakeRuntime:
        return self.runtime

    def current_stream(self, device: torch.device) -> str:
        return "the loop's"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.did.append("begin")
        yield
        self.did.append("end")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield


def test_copies_follow_the_loop_and_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, image = FakeCuda(), SharedImage(1 << 16)
    copies = staging.CudaCopies(torch.device("cuda", 0), cuda)

    address, nbytes = image.address, image.nbytes

    def copy(targets: Any, sources: Any, *, non_blocking: bool) -> None:
        cuda.did.append(f"copy {non_blocking} {cuda.runtime.covers(address, nbytes)}")

    monkeypatch.setattr(staging, "copy_all", copy)
    for _ in range(2):
        copies.copy(image, [], [])
    one = ["wait for the loop's", "begin", "copy True True", "end", "synchronize"]
    assert cuda.did == one * 2
    assert cuda.runtime.locked == {address: nbytes}
    image.close()
    del image
    assert cuda.runtime.unlocked == [address]


def test_unlockable_memory_is_logged_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, image, taken = FakeCuda(), SharedImage(1 << 16), list[torch.device]()
    monkeypatch.setattr(staging, "take_error", taken.append)
    cuda.runtime.error = 2
    copies = staging.CudaCopies(torch.device("cuda", 0), cuda)
    with pytest.warns(UserWarning, match=r"65,536 bytes of shared memory could not be page-locked"):
        copies.copy(image, [image.view(0, torch.float32, (4,))], [torch.ones(4)])
    assert image.view(0, torch.float32, (4,)).eq(1).all()
    assert taken == [torch.device("cuda", 0)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device(tmp_path: Path) -> None:
    values = torch.arange(1 << 22, device="cuda")
    state = {"x": values, "y": torch.ones(5)}
    with AsyncCheckpointer(tmp_path) as checkpointer:
        for step in range(3):
            values += 1
            checkpointer.save(step, state)
            values.fill_(-1)
            values.copy_(torch.arange(1 << 22, device="cuda") + step + 1)
        checkpointer.wait()
        for step in range(3):
            found = {"x": torch.zeros(1 << 22, dtype=torch.int64, device="cuda"), "y": torch.zeros(5)}
            checkpointer.restore(found, step=step)
            assert torch.equal(found["x"], torch.arange(1 << 22, device="cuda") + step + 1)
