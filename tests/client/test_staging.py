"""The feed that copies ahead, over real rings and a device whose copies happen when the test says so.

Each copy reads the ring entry only when it happens, and fails if the ring is not locked then: so wrong bytes, or an
error, are what a slot or a ring that was let go of too early looks like.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from devices import FakeBackend, in_a_ring

from penstock.client.stream.device import CpuBackend
from penstock.proto.errors import DeadlineError

# ---- one batch ahead


def test_next_copy_starts_before_this_return(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 1, 2, 3)
    first = rig.reader.next()
    assert len(device.started) == 2, "that of the batch and of the one after it"
    assert len(device.migrated) == 1
    second = rig.reader.next()
    assert len(device.started) == 3
    assert device.migrated == device.started[:2]
    third = rig.reader.next()
    assert len(device.started) == 3
    assert [int(first), int(second), int(third)] == [0, 0, 0], "the host has waited for none of them"
    device.finish()
    assert [int(first), int(second), int(third)] == [1, 2, 3]
    assert rig.reader.stats.ahead == 2


def test_what_is_staged_is_not_delivered(rigs: Any, device: FakeBackend) -> None:
    plain, rig = rigs(2), rigs(2, backend=device)
    for each in (plain, rig):
        each.numbers(0, 0, 1)
        each.numbers(1, 10, 11)
    for step in range(1, 5):
        plain.reader.next()
        rig.reader.next()
        assert rig.reader.position == plain.reader.position
        assert rig.reader.position.step == step
        assert rig.reader.copy_position() == plain.reader.copy_position()
        assert rig.reader.position.chain == plain.reader.position.chain
        for slot in (0, 1):
            assert rig.acked(slot).delivered == plain.acked(slot).delivered == rig.reader.position.total[slot]
        device.finish()


def test_no_frame_is_waited_for(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 1)
    rig.reader.next()
    assert len(device.started) == 1
    assert rig.reader.wait_s == 0
    rig.numbers(0, 2)
    rig.reader.next()
    assert len(device.started) == 2
    assert rig.reader.stats.ahead == 0


# ---- what arrives


class Pair(NamedTuple):
    left: Any
    right: Any


def test_only_tensors_move_to_the_device(rigs: Any) -> None:
    rig = rigs(backend=CpuBackend())
    batch: dict[str, Any] = {
        "matrix": torch.arange(12.0).view(3, 4).t(),  # strided where it was made
        "flags": torch.tensor([True, False]),
        "half": torch.tensor([[1.5]], dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 5),
        "pair": Pair(torch.ones(2), np.arange(3)),
        "rows": [np.zeros((2, 0)), np.float32(2.5), np.arange(4, dtype=">i4")],
        "rest": (None, "text", b"bytes", 3, 2.5, True),
    }
    assert rig.runners[0].send(batch)
    assert rig.runners[0].send(batch)
    for got in (rig.reader.next(), rig.reader.next()):
        assert list(got) == list(batch)
        for name in ("matrix", "flags", "half", "complex", "scalar", "empty"):
            assert got[name].dtype is batch[name].dtype
            assert torch.equal(got[name], batch[name].resolve_conj())
        assert type(got["pair"]) is Pair
        assert got["pair"].left.tolist() == [1, 1]
        assert got["pair"].right.tolist() == [0, 1, 2]
        assert got["rows"][0].shape == (2, 0)
        assert (type(got["rows"][1]), got["rows"][1]) == (np.float32, 2.5)
        assert (got["rows"][2].dtype, got["rows"][2].tolist()) == (np.dtype(">i4"), [0, 1, 2, 3])
        assert got["rest"] == batch["rest"]


def test_nothing_is_a_view_of_the_ring(rigs: Any) -> None:
    plain, rig = rigs(), rigs(backend=CpuBackend())
    batch = {"tensor": torch.ones(3), "array": np.ones(3)}
    for each in (plain, rig):
        for _ in range(2):
            assert each.runners[0].send(batch)
        addresses = [(got["tensor"].data_ptr(), got["array"].ctypes.data) for got in (each.reader.next() for _ in "ab")]
        assert [in_a_ring(address) for pair in addresses for address in pair] == 4 * [each is plain]


@pytest.mark.parametrize("copied", ["when it is due", "ahead"])
def test_staged_in_inference_mode_is_ordinary(rigs: Any, copied: str) -> None:
    rig = rigs(backend=CpuBackend())
    rig.numbers(0, 1, 2)
    with torch.inference_mode():
        batch = rig.reader.next()
    if copied == "ahead":
        batch = rig.reader.next()
    assert rig.reader.stats.ahead == (copied == "ahead")
    assert not batch.is_inference()


def test_a_batch_is_not_kept_alive(rigs: Any) -> None:
    rig = rigs(backend=CpuBackend())
    rig.numbers(0, 1, 2, 3)
    for _ in range(3):
        gone = weakref.ref(rig.reader.next())
        assert gone() is None


def test_epoch_with_a_staged_batch_is_abandoned(rigs: Any) -> None:
    rig = rigs(backend=CpuBackend())
    rig.numbers(0, 1, 2)
    rig.reader.next()
    assert rig.reader._staged is not None
    assert not rig.reader.end_epoch()
    assert rig.runners[0].leave_epoch() == 0
    rig.numbers(0, 100)
    assert rig.take(1) == [100]
    rig.runners[0].end()
    assert rig.reader.end_epoch()


# ---- slots and credits


def test_a_slot_is_released_by_its_copy_s_event(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 1)
    batch = rig.reader.next()
    del batch
    gc.collect()
    assert rig.taken() == 1, "dropped by the loop, but still being read"
    device.finish()
    assert rig.taken() == 0


def test_acks_are_grouped_while_staging(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, *range(32))
    for _ in range(20):
        rig.reader.next()
        device.finish()
    producer = rig.runners[0].producer
    producer.take_acks()
    assert (producer.delivered, producer.free_entries) == (16, 16), "8 deliveries make a group in a ring of 32"


def test_a_staged_batch_was_not_waited_for(rig: Any) -> None:
    rig.numbers(0, 0, 1)
    rig.reader.next()
    rig.reader.wait_s = 3.0  # as if the first had been
    rig.reader.next()
    assert rig.reader.wait_s == 0


def test_staged_entry_is_held_until_delivery(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 1, 2)
    rig.reader.next()
    device.finish()
    assert rig.taken() == 1, "its copy is done, but a producer that is asked again must still have it"
    rig.reader.next()
    assert rig.taken() == 0
    assert rig.runners[0].producer.attached


def test_a_batch_without_tensors_needs_no_copy(rig: Any, device: FakeBackend) -> None:
    for number in range(3):
        assert rig.runners[0].send({"array": np.full(2, number), "number": number})
    kept = [rig.reader.next() for _ in range(3)]
    assert device.started == []
    assert [(batch["array"].tolist(), batch["number"]) for batch in kept] == [([n, n], n) for n in range(3)]
    assert rig.taken() == 0


@pytest.mark.parametrize("slots", [3, 32])
def test_copies_from_reused_entries_are_right(rigs: Any, slots: int) -> None:
    """400 batches, copies that lag behind by one to many."""
    for patience in (0, 1, 5, 40):
        rig = rigs(backend=FakeBackend(patience))
        rig.runners[0].producer.ring_bytes = slots * 64  # a batch takes 64
        kept = []
        for number in range(400):
            while not rig.runners[0].room():
                rig.reader.flush()
            rig.numbers(0, number)
            if number >= 2:
                kept.append(rig.reader.next())
        kept += [rig.reader.next(), rig.reader.next()]
        rig.reader._backend.finish()
        assert [int(batch) for batch in kept] == list(range(400))
        assert rig.runners[0].producer.ring_entries == slots
        assert rig.reader.copies == 0


def test_full_ring_drains_while_the_reader_waits(rigs: Any) -> None:
    """Large batches have four slots. The producer sends only when it hears of a free one, from a feed that waits."""
    device = FakeBackend()
    rig = rigs(backend=device, timeout_s=20)
    runner, size = rig.runners[0], (3 << 20) // 4
    for number in range(4):
        assert runner.send(torch.full((size,), number, dtype=torch.int32))
    kept = [rig.reader.next() for _ in range(4)]
    assert not runner.room()

    def produce() -> None:
        for number in range(4, 12):
            device.finish(1)  # as time goes by
            until = time.monotonic() + 10
            while not runner.room():
                assert time.monotonic() < until
            assert runner.send(torch.full((size,), number, dtype=torch.int32))

    thread = threading.Thread(target=produce)
    thread.start()
    kept += [rig.reader.next() for _ in range(8)]
    thread.join()
    device.finish()
    assert [batch.unique().tolist() for batch in kept] == [[number] for number in range(12)]


def test_a_device_that_hangs_is_named(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(backend=device, timeout_s=0.2)
    rig.numbers(0, 1)
    rig.reader.next()
    with pytest.raises(DeadlineError, match=r"box 0 waited \d+ s for device cpu to copy a batch, after step 1"):
        rig.reader.next()
    assert rig.reader.wait_s > 0
    device.finish()
    rig.numbers(0, 2)
    batch = rig.reader.next()
    device.finish()
    assert int(batch) == 2, "a wait that ran out can be repeated"


def test_hanging_worker_is_named_after_the_copies(rigs: Any) -> None:
    rig = rigs(backend=FakeBackend(patience=3), timeout_s=1)
    rig.numbers(0, 1)
    rig.reader.next()
    with pytest.raises(DeadlineError, match="for step 2 from worker slot 0 on worker w0"):
        rig.reader.next()


def test_a_long_step_is_no_hanging_device(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(backend=device)
    rig.numbers(0, 1)
    rig.reader.next()
    rig.reader._wait(rig.reader._lanes[0])  # the time that a copy may take begins
    device.finish()
    rig.numbers(0, 2)
    rig.reader._stuck_since -= 100  # seconds, which the step takes
    rig.reader.next()
    rig.reader._wait(rig.reader._lanes[0])  # and begins anew with another
    device.finish()
