"""The feed that copies ahead, over real rings and a device whose copies happen when the test says so.

Each copy reads the ring slot only when it happens, and fails if the ring is not locked then: so wrong bytes, or an
error, are what a slot or a ring that was let go of too early looks like.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from devices import FakeBackend

from penstock.client import staging
from penstock.client.device import CpuBackend
from penstock.client.feed import PASS_ENDED
from penstock.client.loads import DeviceLane
from penstock.proto.errors import DeadlineError, InputFnError, ProtocolError, UnsupportedLeafError
from penstock.proto.frames import framed
from penstock.proto.v1 import lane_pb2


@pytest.fixture
def device() -> Iterator[FakeBackend]:
    backend = FakeBackend()
    yield backend
    backend.failure = None
    backend.finish()  # or closing the rig would wait for it


@pytest.fixture
def rig(rigs: Any, device: FakeBackend) -> Any:
    """One slot, and copies that happen by `device.finish`."""
    return rigs(backend=device)


def acked(rig: Any, slot: int = 0) -> Any:
    """The producer, once it knows what the feed can tell it."""
    rig.feed.flush()
    producer = rig.runners[slot].producer
    producer.take_acks()
    return producer


def taken(rig: Any, slot: int = 0) -> int:
    """Ring slots that the producer cannot fill."""
    producer = acked(rig, slot)
    return int(producer.ring_slots - producer.free_slots)


# ---- one batch ahead


def test_the_next_batch_s_copy_is_started_before_this_one_is_returned(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 1, 2, 3)
    first = rig.feed.next()
    assert len(device.started) == 2, "that of the batch and of the one after it"
    assert len(device.handed_over) == 1
    second = rig.feed.next()
    assert len(device.started) == 3
    assert device.handed_over == device.started[:2]
    third = rig.feed.next()
    assert len(device.started) == 3
    assert [int(first), int(second), int(third)] == [0, 0, 0], "the host has waited for none of them"
    device.finish()
    assert [int(first), int(second), int(third)] == [1, 2, 3]
    assert rig.feed.stats.ahead == 2


def test_what_is_staged_is_not_delivered(rigs: Any, device: FakeBackend) -> None:
    plain, rig = rigs(2), rigs(2, backend=device)
    for each in (plain, rig):
        each.numbers(0, 0, 1)
        each.numbers(1, 10, 11)
    for step in range(1, 5):
        plain.feed.next()
        rig.feed.next()
        assert rig.feed.position == plain.feed.position
        assert rig.feed.position.step == step
        assert rig.feed.snapshot() == plain.feed.snapshot()
        assert rig.feed.position.chain == plain.feed.position.chain
        for slot in (0, 1):
            assert acked(rig, slot).delivered == acked(plain, slot).delivered == rig.feed.position.total[slot]
        device.finish()


def test_no_frame_is_waited_for(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 1)
    rig.feed.next()
    assert len(device.started) == 1
    assert rig.feed.wait_s == 0
    rig.numbers(0, 2)
    rig.feed.next()
    assert len(device.started) == 2
    assert rig.feed.stats.ahead == 0


def test_slots_take_turns(rigs: Any) -> None:
    rig = rigs(3, backend=FakeBackend(patience=3))
    rig.numbers(2, 200, 201)
    rig.numbers(1, 100, 101)
    rig.numbers(0, 0, 1)
    batches = [rig.feed.next() for _ in range(6)]
    rig.feed._backend.finish()
    assert [int(batch) for batch in batches] == [0, 100, 200, 1, 101, 201]
    assert rig.feed.position.total == [2, 2, 2]
    assert rig.feed.stats.ahead == 5


# ---- what arrives


class Pair(NamedTuple):
    left: Any
    right: Any


def test_tensors_arrive_and_the_rest_stays_on_the_host(rigs: Any) -> None:
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
    for got in (rig.feed.next(), rig.feed.next()):
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


def in_a_ring(address: int) -> bool:
    with open("/proc/self/maps") as file:
        for line in file:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return "penstock-ring" in line
    return False


def test_nothing_is_a_view_of_the_ring(rigs: Any) -> None:
    plain, rig = rigs(), rigs(backend=CpuBackend())
    batch = {"tensor": torch.ones(3), "array": np.ones(3)}
    for each in (plain, rig):
        for _ in range(2):
            assert each.runners[0].send(batch)
        addresses = [(got["tensor"].data_ptr(), got["array"].ctypes.data) for got in (each.feed.next() for _ in "ab")]
        assert [in_a_ring(address) for pair in addresses for address in pair] == 4 * [each is plain]


def test_leaves_can_be_kept_alone(rigs: Any) -> None:
    rig = rigs(backend=CpuBackend())
    assert rig.runners[0].send({"image": torch.zeros(1 << 20), "label": torch.tensor([3])})
    label = rig.feed.next()["label"]
    assert label.untyped_storage().nbytes() == 8


@pytest.mark.parametrize("copied", ["when it is due", "ahead"])
def test_a_batch_staged_in_inference_mode_is_an_ordinary_one(rigs: Any, copied: str) -> None:
    rig = rigs(backend=CpuBackend())
    rig.numbers(0, 1, 2)
    with torch.inference_mode():
        batch = rig.feed.next()
    if copied == "ahead":
        batch = rig.feed.next()
    assert rig.feed.stats.ahead == (copied == "ahead")
    assert not batch.is_inference()


def test_a_batch_is_not_kept_alive(rigs: Any) -> None:
    rig = rigs(backend=CpuBackend())
    rig.numbers(0, 1, 2, 3)
    for _ in range(3):
        gone = weakref.ref(rig.feed.next())
        assert gone() is None


# ---- slots and credits


def test_a_slot_is_released_by_its_copy_s_event(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 1)
    batch = rig.feed.next()
    del batch
    gc.collect()
    assert taken(rig) == 1, "dropped by the loop, but still being read"
    device.finish()
    assert taken(rig) == 0


def test_acks_go_in_groups_while_every_batch_is_staged(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, *range(32))
    for _ in range(20):
        rig.feed.next()
        device.finish()
    producer = rig.runners[0].producer
    producer.take_acks()
    assert (producer.delivered, producer.free_slots) == (16, 16), "8 deliveries make a group in a ring of 32"


def test_a_staged_batch_was_not_waited_for(rig: Any) -> None:
    rig.numbers(0, 0, 1)
    rig.feed.next()
    rig.feed.wait_s = 3.0  # as if the first had been
    rig.feed.next()
    assert rig.feed.wait_s == 0


def test_a_batch_that_is_kept_holds_no_slot(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 1)
    batch = rig.feed.next()
    device.finish()
    assert taken(rig) == 0
    rig.numbers(0, 2)
    assert int(batch) == 1


def test_the_slot_of_a_staged_batch_is_not_released_before_it_is_delivered(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 1, 2)
    rig.feed.next()
    device.finish()
    assert taken(rig) == 1, "its copy is done, but a producer that is asked again must still have it"
    rig.feed.next()
    assert taken(rig) == 0
    assert rig.runners[0].producer.attached


def test_a_batch_without_tensors_needs_no_copy(rig: Any, device: FakeBackend) -> None:
    for number in range(3):
        assert rig.runners[0].send({"array": np.full(2, number), "number": number})
    kept = [rig.feed.next() for _ in range(3)]
    assert device.started == []
    assert [(batch["array"].tolist(), batch["number"]) for batch in kept] == [([n, n], n) for n in range(3)]
    assert taken(rig) == 0


@pytest.mark.parametrize("slots", [3, 32])
def test_slots_are_used_again_and_again_and_every_copy_finds_its_own_bytes(rigs: Any, slots: int) -> None:
    """400 batches, copies that lag behind by one to many."""
    for patience in (0, 1, 5, 40):
        rig = rigs(backend=FakeBackend(patience))
        rig.runners[0].producer.ring_bytes = slots * 64  # a batch takes 64
        kept = []
        for number in range(400):
            while not rig.runners[0].room():
                rig.feed.flush()
            rig.numbers(0, number)
            if number >= 2:
                kept.append(rig.feed.next())
        kept += [rig.feed.next(), rig.feed.next()]
        rig.feed._backend.finish()
        assert [int(batch) for batch in kept] == list(range(400))
        assert rig.runners[0].producer.ring_slots == slots
        assert rig.feed.copies == 0


def test_a_ring_that_is_full_of_copies_empties_while_the_feed_waits(rigs: Any) -> None:
    """Large batches have four slots. The producer sends only when it hears of a free one, from a feed that waits."""
    device = FakeBackend()
    rig = rigs(backend=device, timeout_s=20)
    runner, size = rig.runners[0], (3 << 20) // 4
    for number in range(4):
        assert runner.send(torch.full((size,), number, dtype=torch.int32))
    kept = [rig.feed.next() for _ in range(4)]
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
    kept += [rig.feed.next() for _ in range(8)]
    thread.join()
    device.finish()
    assert [batch.unique().tolist() for batch in kept] == [[number] for number in range(12)]


def test_a_device_that_hangs_is_named(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(backend=device, timeout_s=0.05)
    rig.numbers(0, 1)
    rig.feed.next()
    with pytest.raises(
        DeadlineError, match=r"box 0 waited 0 s for device cpu to finish .* after step 1 was handed out"
    ):
        rig.feed.next()
    assert rig.feed.wait_s > 0.02
    device.finish()
    rig.numbers(0, 2)
    batch = rig.feed.next()
    device.finish()
    assert int(batch) == 2, "a wait that ran out can be repeated"


def test_a_worker_that_hangs_is_named_once_the_copies_are_done(rigs: Any) -> None:
    rig = rigs(backend=FakeBackend(patience=3), timeout_s=0.05)
    rig.numbers(0, 1)
    rig.feed.next()
    with pytest.raises(DeadlineError, match="for step 2 from slot 0 on worker w0"):
        rig.feed.next()


def test_a_long_step_is_no_hanging_device(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(backend=device)
    rig.numbers(0, 1)
    rig.feed.next()
    rig.feed._wait(rig.feed._lanes[0])  # the time that a copy may take begins
    device.finish()
    rig.numbers(0, 2)
    rig.feed._stuck_since -= 100  # seconds, which the step takes
    rig.feed.next()
    rig.feed._wait(rig.feed._lanes[0])  # and begins anew with another
    device.finish()


# ---- other frames


def test_the_end_of_a_slot_or_of_the_pass_waits_for_its_turn(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(2, backend=device)
    rig.numbers(0, 0)
    rig.runners[0].end()
    rig.numbers(1, 10, 11)
    rig.runners[1].end()
    for step in (1, 2):
        rig.feed.next()
        assert rig.feed.position.step == step
        assert rig.feed.position.live == [0, 1]
    rig.feed.next()
    assert rig.feed.position.live == [1]
    assert rig.feed.position.epoch == 0
    assert rig.feed.next() is PASS_ENDED
    assert (rig.feed.position.epoch, rig.feed.position.live) == (1, [0, 1])
    assert len(device.started) == 3
    rig.numbers(0, 1)
    rig.numbers(1, 12)
    batches = [rig.feed.next(), rig.feed.next()]
    device.finish()
    assert [int(batch) for batch in batches] == [1, 12]


def test_the_next_pass_is_not_staged_before_this_one_has_ended(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 0)
    rig.runners[0].end()
    rig.numbers(0, 1)
    rig.feed.next()
    assert len(device.started) == 1
    assert rig.feed.position.epoch == 0
    assert rig.feed.next() is PASS_ENDED
    rig.feed.next()
    assert len(device.started) == 2


def test_an_error_comes_when_its_step_is_due(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 0, 1)
    rig.runners[0].fail("InputFnError", "ValueError: no such sample")
    batches = [rig.feed.next(), rig.feed.next()]
    assert rig.run.error is None
    device.finish()
    assert [int(batch) for batch in batches] == [0, 1]
    with pytest.raises(InputFnError, match=r"no such sample \[worker w0, box 0, slot 0, step 3\]"):
        rig.feed.next()


@pytest.mark.parametrize(("total", "epoch"), [(3, 0), (2, 1)])
def test_a_batch_out_of_order_is_an_error_when_its_step_is_due(rig: Any, total: int, epoch: int) -> None:
    rig.numbers(0, 0)
    rig.runners[0].total, rig.runners[0].epoch = total - 1, epoch
    rig.numbers(0, 2)
    rig.feed.next()
    words = f"worker w0: sent batch {total} of pass {epoch}, where batch 2 of pass 0 was due"
    with pytest.raises(ProtocolError, match=words):
        rig.feed.next()


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (b"\xff" * 9, "worker w0: a frame of"),
        (framed(lane_pb2.Frame(kind=lane_pb2.BATCH, total=3, ring=1).SerializeToString()), "in no ring slot that was"),
    ],
)
def test_what_no_producer_sends_is_an_error_when_its_step_is_due(rig: Any, packet: bytes, words: str) -> None:
    rig.numbers(0, 0)
    rig.feed.next()
    rig.numbers(0, 1)
    rig.runners[0].producer._sock.send(packet)
    rig.feed.next()
    assert rig.feed.position.step == 2
    with pytest.raises(ProtocolError, match=words):
        rig.feed.next()


def test_a_batch_that_could_not_be_staged_is_tried_again_when_it_is_due(
    rig: Any, device: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.numbers(0, 0, 1, 2)
    copy = device.copy
    tries: list[int] = []

    def full(sources: Any) -> Any:
        tries.append(len(tries))
        if 1 <= len(tries) - 1 <= failures:
            raise RuntimeError("out of memory on the device")
        return copy(sources)

    failures = 1
    monkeypatch.setattr(device, "copy", full)
    batches = [rig.feed.next(), rig.feed.next()]
    assert len(tries) == 4, "the second batch twice, and the third was staged"
    assert len(rig.runners[0].hellos) == 1
    batches.append(rig.feed.next())
    device.finish()
    assert [int(batch) for batch in batches] == [0, 1, 2]


def test_a_batch_that_cannot_be_made_is_an_error_when_it_is_due_and_comes_again(
    rig: Any, device: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.numbers(0, 0)
    assert rig.runners[0].send({"x": torch.tensor([1])})
    compiled = DeviceLane._compile

    def refuse(lane: Any, structure: int) -> Any:
        if structure > 1:
            raise UnsupportedLeafError("a class that nobody imported")
        return compiled(lane, structure)

    monkeypatch.setattr(DeviceLane, "_compile", refuse)
    batch = rig.feed.next()
    for _ in range(2):
        with pytest.raises(UnsupportedLeafError, match="a class that nobody imported"):
            rig.feed.next()
        assert rig.feed.position.step == 1
        rig.feed._lanes[0].retry_at = 0.0
    monkeypatch.setattr(DeviceLane, "_compile", compiled)
    device.finish()
    second = rig.feed.next()
    device.finish()
    assert (int(batch), int(second["x"])) == (0, 1)


def test_an_interrupt_while_staging_loses_and_repeats_nothing(
    rig: Any, device: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.numbers(0, 0, 1, 2)
    copy = device.copy

    def interrupted(sources: Any) -> Any:
        if len(device.started) == 1:
            monkeypatch.setattr(device, "copy", copy)
            raise KeyboardInterrupt
        return copy(sources)

    monkeypatch.setattr(device, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.feed.next()
    assert rig.feed.position.step == 1
    device.finish()
    batches = [rig.feed.next(), rig.feed.next()]
    device.finish()
    assert [int(batch) for batch in batches] == [1, 2]
    assert len(rig.runners[0].hellos) == 2


# ---- lanes that break, runners that are replaced


def test_a_lane_that_breaks_behind_a_staged_batch(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, *range(4))
    runner = rig.runners[0]
    batches = [rig.feed.next()]
    runner.break_lane()
    batches += [rig.feed.next() for _ in range(3)]  # what was on its way is read first
    rig.numbers(0, 4, 5)
    device.finish(3)
    batches += [rig.feed.next()]
    assert len(runner.hellos) == 2
    assert runner.hellos[1].next_total == 5
    assert len(runner.hellos[1].held) == 1, "the fourth batch is still being copied"
    batches += [rig.feed.next()]
    device.finish()
    assert [int(batch) for batch in batches] == [0, 1, 2, 3, 4, 5]
    assert taken(rig) == 0


def test_a_runner_that_is_replaced_sends_the_staged_batch_again(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(backend=device)
    old = rig.runners[0]
    rig.numbers(0, 0, 1, 2)
    batches = [rig.feed.next()]
    staged = device.started[1]
    new = type(old)(0, 2, total=1)
    assert new.send(torch.tensor([1]))
    assert new.send(torch.tensor([2]))
    rig.runners[0] = new
    rig.run.show(new, restarts=1, note="worker w0 died")
    with pytest.warns(UserWarning, match="slot 0 of box 0 was recovered"):
        batches.append(rig.feed.next())
    assert staged not in device.handed_over
    assert new.hellos[0].next_total == 2
    batches.append(rig.feed.next())
    assert rig.feed.position.total == [3]
    old.producer.close()
    device.finish()
    assert [int(batch) for batch in batches] == [0, 1, 2]
    assert taken(rig) == 0
    assert new.producer.attached, "it was told of none of the other's slots"


def test_a_ring_of_a_dead_runner_stays_locked_until_its_last_copy(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(backend=device)
    rig.numbers(0, 0, 1)
    batch = rig.feed.next()
    old = rig.runners[0]
    new = type(old)(0, 2, total=1)
    assert new.send(torch.tensor([1]))
    rig.runners[0] = new
    rig.run.show(new)
    rig.feed.next()
    old.producer.close()
    del old
    gc.collect()
    for finished in (0, 1):
        device.finish(finished)
        rig.feed.flush()
        gc.collect()
        assert len(device.runtime.locked) == 2, "the batch that was staged is still being copied"
    device.finish(1)
    rig.feed.flush()
    gc.collect()
    assert len(device.runtime.locked) == 1
    assert int(batch) == 0


def test_an_outgrown_ring_stays_locked_until_its_last_copy(rig: Any, device: FakeBackend) -> None:
    runner, runtime = rig.runners[0], device.runtime
    for power in (4, 18, 20):
        assert runner.send(torch.full((1 << power,), power, dtype=torch.uint8))
    kept = [rig.feed.next() for _ in range(3)]
    gc.collect()
    assert len(runtime.locked) == 3
    device.finish()
    rig.feed.flush()
    gc.collect()
    assert len(runtime.locked) == 1
    assert [batch.unique().tolist() for batch in kept] == [[4], [18], [20]]


# ---- passes that are left, and the end


def test_a_pass_is_left_when_the_staged_batch_is_copied_and_the_batch_is_forgotten(
    rigs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeBackend(patience=3)
    rig = rigs(2, backend=device)
    rig.numbers(0, 0, 1, 2)
    rig.numbers(1, 10, 11)
    rig.feed.next()
    staged = device.started[1]
    abandoned = []
    for lane in rig.feed._lanes:
        tell = lane.consumer.abandon

        def told(epoch: int, tell: Any = tell) -> None:
            abandoned.append(staged.done)
            tell(epoch)

        lane.consumer.abandon = told
    rig.feed.cut()
    assert abandoned == [True, True], "from here on the producer may fill the slot"
    assert rig.run.progress.cuts == ((0, 1),)
    assert [runner.leave_pass() for runner in rig.runners] == [0, 0]
    rig.numbers(0, 100)
    rig.numbers(1, 110)
    batches = [rig.feed.next(), rig.feed.next()]
    device.finish()
    assert [int(batch) for batch in batches] == [100, 110]
    assert rig.feed.position.total == [2, 1]
    assert staged not in device.handed_over
    assert [taken(rig, slot) for slot in (0, 1)] == [0, 0], "no slot is lost, and none released twice"
    assert all(runner.producer.attached for runner in rig.runners)


def test_a_pass_is_not_left_while_the_device_hangs(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(backend=device, timeout_s=0.05)
    rig.numbers(0, 0, 1)
    rig.feed.next()
    with pytest.raises(DeadlineError, match="for device cpu to finish the copy of a batch"):
        rig.feed.cut()
    assert rig.runners[0].producer.cuts == 0
    device.finish()
    assert int(rig.feed.next()) == 1


def test_a_frame_that_was_seen_of_a_pass_that_is_left_is_forgotten(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 0)
    rig.runners[0].end()
    rig.feed.next()
    consumer = rig.feed._lanes[0].consumer
    assert consumer.look() is not None
    rig.feed.cut()
    assert rig.runners[0].leave_pass() == 0
    rig.numbers(0, 100)
    batch = rig.feed.next()
    device.finish()
    assert int(batch) == 100
    assert rig.feed.position.epoch == 1


def test_a_batch_that_could_not_be_staged_is_forgotten_with_its_pass(
    rig: Any, device: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.numbers(0, 0, 1)
    copy = device.copy

    def once(sources: Any) -> Any:
        monkeypatch.setattr(device, "copy", full)
        return copy(sources)

    def full(sources: Any) -> Any:
        raise RuntimeError("out of memory on the device")

    monkeypatch.setattr(device, "copy", once)
    rig.feed.next()
    monkeypatch.setattr(device, "copy", copy)
    rig.feed.cut()
    assert rig.runners[0].leave_pass() == 0
    rig.numbers(0, 100)
    batch = rig.feed.next()
    device.finish()
    assert int(batch) == 100


def test_a_lane_whose_first_batch_after_a_cut_was_staged_has_heard_of_it(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(2, backend=device)
    rig.numbers(0, 0, 1)
    rig.numbers(1, 10)
    rig.feed.next()
    device.finish()
    rig.feed.cut()
    assert [runner.leave_pass() for runner in rig.runners] == [0, 0]
    rig.numbers(0, 100, 101)
    rig.numbers(1, 110)
    rig.feed.next()
    rig.feed.next()
    runner = rig.runners[1]
    runner.break_lane()
    rig.numbers(1, 111)
    batches = [rig.feed.next(), rig.feed.next()]
    assert len(runner.hellos) == 2
    assert runner.hellos[1].ack.abandon_epoch == 0
    device.finish()
    assert [int(batch) for batch in batches] == [101, 111]


def test_an_error_that_was_seen_of_a_pass_that_is_left_is_met_in_the_next(rig: Any) -> None:
    rig.numbers(0, 0)
    rig.runners[0].fail("InputFnError", "ValueError: no such sample")
    rig.feed.next()
    rig.feed.cut()
    with pytest.raises(InputFnError, match="no such sample"):
        rig.feed.next()


def test_closing_waits_for_the_copies(rigs: Any) -> None:
    device = FakeBackend(patience=4)
    rig = rigs(backend=device)
    rig.numbers(0, 0, 1, 2)
    rig.feed.next()
    rig.feed.next()
    rig.feed.close()
    assert [copy.done for copy in device.started] == [True, True, True]
    rig.feed.close()


def test_a_ring_of_a_device_that_hangs_is_never_let_go(
    rigs: Any, device: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "CLOSE_S", 0.02)
    monkeypatch.setattr(staging, "_stranded", [])
    rig = rigs(backend=device)
    rig.numbers(0, 0, 1)
    rig.feed.next()
    rig.feed.close()
    del rig.feed._lanes[:]
    gc.collect()
    assert len(device.runtime.locked) == 1
    device.finish()
    staging._stranded.clear()
    gc.collect()
    assert device.runtime.locked == {}


def test_a_device_that_has_failed_stops_the_loop_and_nothing_else(
    rigs: Any, device: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_stranded", [])
    rig = rigs(backend=device)
    rig.numbers(0, 0, 1)
    rig.feed.next()
    device.failure = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError, match="device-side assert"):
        rig.feed.next()
    assert rig.feed.flush(), "a state can still be asked for"
    assert rig.feed.position.step == 1
    rig.feed.close()
    assert len(staging._stranded) == 2


def test_a_fork_of_the_training_process_unlocks_nothing(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 0)
    batch = rig.feed.next()
    device.finish()
    child = os.fork()
    if child == 0:
        del rig.feed._lanes[:]
        rig.feed._lent.clear()
        gc.collect()
        os._exit(len(device.runtime.unlocked))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert taken(rig) == 0
    assert int(batch) == 0
