"""Devices: one suite for every backend, how CUDA is asked for things, page-locking, and which devices are taken."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from devices import FakeRuntime, in_a_ring

from penstock.client.stream.cuda import CudaBackend, PageLocks
from penstock.client.stream.device import CpuBackend, DeviceBackend, check_device
from penstock.proto.batch.flatten import wrap_buffer
from penstock.proto.batch.tree import TORCH_NAMES
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.lane.ring import Ring

# ---- torch.cuda, as far as the backend uses it


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.notes.append(f"{self.name} waits for event {event.number}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        cuda.events += 1
        self.cuda, self.number = cuda, cuda.events

    def record(self, stream: FakeStream) -> None:
        self.cuda.notes.append(f"event {self.number} recorded on {stream.name}")

    def query(self) -> bool:
        return True


class FakeCuda:
    """Takes notes of what is asked of torch.cuda; the memory is the CPU's."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events = 0
        self.runtime = FakeRuntime()

    def current_device(self) -> None:
        self.notes.append("current device")

    def Stream(self, device: torch.device) -> FakeStream:
        self.notes.append("a stream")
        return FakeStream(self, "side")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def _scope(self, what: str) -> Iterator[None]:
        self.notes.append(f"on {what}")
        yield
        self.notes.append(f"off {what}")

    def stream(self, stream: FakeStream) -> AbstractContextManager[None]:
        return self._scope(stream.name)

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return self._scope("device")

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, "loop")

    def cudart(self) -> FakeRuntime:
        return self.runtime


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()

    def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
        cuda.notes.append(f"{stream.name} uses {tensor.nbytes} bytes")

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return cuda


# ---- the contract


def _cpu(cuda: FakeCuda) -> DeviceBackend:
    return CpuBackend()


def _cuda_on_the_cpu(cuda: FakeCuda) -> DeviceBackend:
    return CudaBackend(torch.device("cpu"), cuda)


def _cuda(cuda: FakeCuda) -> DeviceBackend:
    return CudaBackend(torch.device("cuda"))


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="finds no CUDA device")


@pytest.fixture(
    params=[
        pytest.param(_cpu, id="cpu"),
        pytest.param(_cuda_on_the_cpu, id="cuda-calls"),
        pytest.param(_cuda, id="cuda", marks=NO_CUDA),
    ]
)
def backend(request: pytest.FixtureRequest) -> Any:
    make: Callable[[FakeCuda], DeviceBackend] = request.param
    # The real tensors' record_stream stays where CUDA is the real one.
    cuda = FakeCuda() if make is _cuda else request.getfixturevalue("fake_cuda")
    return make(cuda)


def landed(event: Any) -> bool:
    """Return True if an event completes within a number of queries, for a device that has nothing else to do."""
    return any(event.query() for _ in range(1_000_000))


@pytest.fixture
def ring() -> Ring:
    return Ring.create(1 << 16, 4)


def filled(ring: Ring, dtype: torch.dtype, shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """A tensor in the ring with bytes that are not all alike."""
    count = dtype.itemsize * int(torch.Size(shape).numel())
    memory = torch.from_numpy(wrap_buffer(ring.map))[start : start + count]
    memory.copy_(torch.arange(1, count + 1, dtype=torch.uint8) % (2 if dtype is torch.bool else 127))
    return memory.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> Any:
    """Dtype, shape and bytes."""
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("shape", [(3, 4), (), (3, 0, 2)], ids=str)
def test_every_dtype_arrives_to_the_bit(backend: DeviceBackend, ring: Ring, shape: Any) -> None:
    backend.lock(ring)
    for dtype in TORCH_NAMES:
        source = filled(ring, dtype, shape)
        expected = bits(source)
        (copy,), event = backend.copy([source])
        backend.order_after_copies([copy], event)
        assert landed(event)
        assert copy.device == backend.device
        assert bits(copy) == expected


def test_copies_have_memory_of_their_own(backend: DeviceBackend, ring: Ring) -> None:
    backend.lock(ring)
    sources = [filled(ring, torch.int32, (4,), start=start) for start in (0, 64, 128)]
    expected = [source.tolist() for source in sources]
    copies, event = backend.copy(sources)
    assert landed(event)
    for source in sources:
        source.zero_()  # the slot is another batch's now
    backend.order_after_copies(copies, event)
    assert [copy.tolist() for copy in copies] == expected
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 3
    assert all(copy.untyped_storage().nbytes() == copy.nbytes for copy in copies), "torch.save writes a leaf alone"


def test_later_work_sees_the_batch(backend: DeviceBackend, ring: Ring) -> None:
    backend.lock(ring)
    for number in range(50):
        source = filled(ring, torch.int64, (1024,)).fill_(number)
        copies, event = backend.copy([source])
        backend.order_after_copies(copies, event)
        if backend.device.type == "cpu":
            assert landed(event)  # a CPU does not wait for events
        total = copies[0].sum()
        assert int(total) == 1024 * number


# ---- how CUDA is asked


def test_copy_has_a_stream_the_loops_waits_for(fake_cuda: FakeCuda, ring: Ring) -> None:
    backend = CudaBackend(torch.device("cpu"), fake_cuda)
    assert fake_cuda.notes == [], "nothing of CUDA is touched before the first ring"
    backend.lock(ring)
    assert fake_cuda.notes == ["current device", "a stream", "on device", "off device"]
    fake_cuda.notes.clear()
    sources = [filled(ring, torch.uint8, (count,), start=64 * count) for count in (2, 3)]
    copies, event = backend.copy(sources)
    assert fake_cuda.notes == ["on side", "event 1 recorded on side", "off side"]
    fake_cuda.notes.clear()
    backend.order_after_copies(copies, event)
    assert fake_cuda.notes == ["loop waits for event 1", "loop uses 2 bytes", "loop uses 3 bytes"]


# ---- page-locking


def test_the_mapping_is_there_when_it_is_unlocked() -> None:
    ring = Ring.create(1 << 20, 4)
    address = ring.address

    class Looks(FakeRuntime):
        def cudaHostUnregister(self, address: int) -> int:
            seen.append(in_a_ring(address))
            return super().cudaHostUnregister(address)

    seen: list[bool] = []
    runtime = Looks()
    PageLocks(runtime, "cuda:0", pytest.fail).lock(ring)
    del ring
    gc.collect()
    assert seen == [True]
    assert not in_a_ring(address)


def test_a_fork_unlocks_nothing() -> None:
    runtime, ring = FakeRuntime(), Ring.create(1 << 16, 4)
    PageLocks(runtime, "cuda:0", pytest.fail).lock(ring)
    address, gone = ring.address, weakref.ref(ring)
    child = os.fork()
    if child == 0:
        del ring
        gc.collect()
        os._exit(0 if gone() is None and not runtime.unlocked else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del ring
    gc.collect()
    assert runtime.unlocked == [address]


def test_unlockable_ring_warns_once_with_a_remedy(ring: Ring) -> None:
    runtime, taken = FakeRuntime(), []
    runtime.error = 2
    locks = PageLocks(runtime, "cuda:1", lambda: taken.append(True))
    words = (
        r"262,144 bytes of shared memory could not be page-locked for cuda:1: error number 2 \(2\).*slower.*ulimit -l"
    )
    with pytest.warns(UserWarning, match=words):
        assert not locks.lock(ring)
    assert not locks.lock(Ring.create(4096, 4)), "warnings are errors here: this one says nothing"
    assert len(taken) == 2, "the runtime keeps each error for the loop's next kernel, unless it is taken"
    runtime.error = 0
    assert locks.lock(ring), "the next may fit"


def test_an_error_is_taken_by_a_kernel_of_ours(
    fake_cuda: FakeCuda, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CudaBackend(torch.device("cpu"), fake_cuda)
    fake_cuda.runtime.error = 2
    launched = []

    def fill(tensor: torch.Tensor, value: float) -> torch.Tensor:
        launched.append(value)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "fill_", fill)
    with pytest.warns(UserWarning, match="could not be page-locked for cpu"):
        backend.lock(ring)
    assert launched == [0]


@NO_CUDA
def test_a_failed_lock_leaves_no_error_behind(ring: Ring) -> None:
    backend = CudaBackend(torch.device("cuda"))
    backend.lock(ring)
    with pytest.warns(UserWarning, match="could not be page-locked"):
        backend.lock(ring)  # a second time, which is an error
    assert int(torch.ones(3, device="cuda").sum()) == 3


# ---- which devices are taken


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", r"device must be \"cpu\", \"cuda\" or \"cuda:N\", got 'nonsense'"),
        ("cpu:1", ", got 'cpu:1': leave it out"),
        ("xpu:0", ", got 'xpu:0'"),
        ("cuda:2", r"one of the 2 CUDA devices that this process sees, .* got 'cuda:2'"),
    ],
)
def test_devices_that_are_none(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidArgumentError, match=words):
        check_device(name)


def test_devices_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [check_device(name) for name in ("cuda", "cuda:0", "cuda:1", "cpu", "cpu:0")]
    assert found == ["cuda", "cuda:0", "cuda:1", "cpu", "cpu"]
