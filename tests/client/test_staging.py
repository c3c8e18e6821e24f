"""The feed that copies ahead, over real rings and a device whose copies happen when the test says so.

Each copy reads the ring entry only when it happens, and fails if the ring is not locked then: so wrong bytes, or an
error, are what a slot or a ring that was let go of too early looks like.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from devices import FakeBackend, in_a_ring
from lane_frames import a_frame

from penstock.client.stream import device_reader
from penstock.client.stream.device import CpuBackend
from penstock.client.stream.streams import EPOCH_ENDED
from penstock.proto.errors import DeadlineError, InputFnError, ProtocolError
from penstock.proto.lane.frames import BATCH, framed

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


# ---- what arrives


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


# ---- other frames


def test_next_epoch_is_not_staged_early(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 0)
    rig.runners[0].end()
    rig.numbers(0, 1)
    rig.reader.next()
    assert len(device.started) == 1
    assert rig.reader.position.epoch == 0
    assert rig.reader.next() is EPOCH_ENDED
    rig.reader.next()
    assert len(device.started) == 2


def test_impossible_frame_fails_when_due(rig: Any) -> None:
    packet, words = framed(a_frame(kind=BATCH, total=3, ring=1).encode()), "are in no entry"
    rig.numbers(0, 0)
    rig.reader.next()
    rig.numbers(0, 1)
    rig.runners[0].producer._sock.send(packet)
    rig.reader.next()
    assert rig.reader.position.step == 2
    with pytest.raises(ProtocolError, match=words):
        rig.reader.next()


def test_unstaged_batch_is_retried_when_due(rig: Any, device: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
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
    batches = [rig.reader.next(), rig.reader.next()]
    assert len(tries) == 4, "the second batch twice, and the third was staged"
    assert len(rig.runners[0].hellos) == 1
    batches.append(rig.reader.next())
    device.finish()
    assert [int(batch) for batch in batches] == [0, 1, 2]


def test_interrupt_while_staging_loses_nothing(rig: Any, device: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.numbers(0, 0, 1, 2)
    copy = device.copy

    def interrupted(sources: Any) -> Any:
        if len(device.started) == 1:
            monkeypatch.setattr(device, "copy", copy)
            raise KeyboardInterrupt
        return copy(sources)

    monkeypatch.setattr(device, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.reader.next()
    assert rig.reader.position.step == 1
    device.finish()
    batches = [rig.reader.next(), rig.reader.next()]
    device.finish()
    assert [int(batch) for batch in batches] == [1, 2]
    assert len(rig.runners[0].hellos) == 2


# ---- lanes that break, runners that are replaced


def test_a_lane_that_breaks_behind_a_staged_batch(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, *range(4))
    runner = rig.runners[0]
    batches = [rig.reader.next()]
    runner.break_lane()
    batches += [rig.reader.next() for _ in range(3)]  # what was on its way is read first
    rig.numbers(0, 4, 5)
    device.finish(3)
    batches += [rig.reader.next()]
    assert len(runner.hellos) == 2
    assert runner.hellos[1].next_total == 5
    assert len(runner.hellos[1].held) == 1, "the fourth batch is still being copied"
    batches += [rig.reader.next()]
    device.finish()
    assert [int(batch) for batch in batches] == [0, 1, 2, 3, 4, 5]
    assert rig.taken() == 0


def test_dead_runners_ring_is_locked_while_copied(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(backend=device)
    rig.numbers(0, 0, 1)
    batch = rig.reader.next()
    old = rig.runners[0]
    new = type(old)(0, 2, total=1)
    assert new.send(torch.tensor([1]))
    rig.runners[0] = new
    rig.run.show(new)
    rig.reader.next()
    old.producer.close()
    del old
    gc.collect()
    for finished in (0, 1):
        device.finish(finished)
        rig.reader.flush()
        gc.collect()
        assert len(device.runtime.locked) == 2, "the batch that was staged is still being copied"
    device.finish(1)
    rig.reader.flush()
    gc.collect()
    assert len(device.runtime.locked) == 1
    assert int(batch) == 0


# ---- epochs that are left, and the end


def test_abandoned_epoch_drops_the_staged_batch(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeBackend(patience=3)
    rig = rigs(2, backend=device)
    rig.numbers(0, 0, 1, 2)
    rig.numbers(1, 10, 11)
    rig.reader.next()
    staged = device.started[1]
    abandoned = []
    for lane in rig.reader._lanes:
        tell = lane.consumer.abandon

        def told(epoch: int, total: int, tell: Any = tell) -> None:
            abandoned.append(staged.done)
            tell(epoch, total)

        lane.consumer.abandon = told
    rig.reader.abandon_epoch()
    assert abandoned == [True, True], "from here on the producer may fill the slot"
    assert rig.run.progress.abandoned == ((0, 1),)
    assert [runner.leave_epoch() for runner in rig.runners] == [0, 0]
    rig.numbers(0, 100)
    rig.numbers(1, 110)
    batches = [rig.reader.next(), rig.reader.next()]
    device.finish()
    assert [int(batch) for batch in batches] == [100, 110]
    assert rig.reader.position.total == [2, 1]
    assert staged not in device.migrated
    assert [rig.taken(slot) for slot in (0, 1)] == [0, 0], "no slot is lost, and none released twice"
    assert all(runner.producer.attached for runner in rig.runners)


def test_epoch_is_kept_while_the_device_hangs(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(backend=device, timeout_s=0.05)
    rig.numbers(0, 0, 1)
    rig.reader.next()
    with pytest.raises(DeadlineError, match="for device cpu to copy a batch"):
        rig.reader.abandon_epoch()
    assert rig.runners[0].producer.abandons == 0
    device.finish()
    assert int(rig.reader.next()) == 1


@pytest.mark.parametrize("further", [lambda runner: runner.end(), lambda runner: runner.send(torch.tensor([1]))])
def test_peeked_frame_of_an_old_epoch_is_dropped(rig: Any, device: FakeBackend, further: Any) -> None:
    rig.numbers(0, 0)
    rig.reader.next()
    further(rig.runners[0])
    assert rig.reader._lanes[0].consumer.look() is not None
    rig.reader.abandon_epoch()
    assert rig.runners[0].leave_epoch() == 0
    rig.numbers(0, 100)
    batch = rig.reader.next()
    device.finish()
    assert int(batch) == 100
    assert rig.reader.position.epoch == 1


def test_peeked_error_is_raised_in_the_next_epoch(rig: Any) -> None:
    rig.numbers(0, 0)
    rig.runners[0].fail("InputFnError", "ValueError: no such sample")
    rig.reader.next()
    rig.reader.abandon_epoch()
    with pytest.raises(InputFnError, match="no such sample"):
        rig.reader.next()


def test_batch_staged_after_a_break_settles_it(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(2, backend=device)
    rig.numbers(0, 0, 1)
    rig.numbers(1, 10)
    rig.reader.next()
    device.finish()
    rig.reader.abandon_epoch()
    assert [runner.leave_epoch() for runner in rig.runners] == [0, 0]
    rig.numbers(0, 100, 101)
    rig.numbers(1, 110)
    rig.reader.next()
    rig.reader.next()
    runner = rig.runners[1]
    runner.break_lane()
    rig.numbers(1, 111)
    batches = [rig.reader.next(), rig.reader.next()]
    assert len(runner.hellos) == 2
    assert runner.hellos[1].abandon_epoch == 0
    device.finish()
    assert [int(batch) for batch in batches] == [101, 111]


def test_closing_waits_for_the_copies(rigs: Any) -> None:
    device = FakeBackend(patience=4)
    rig = rigs(backend=device)
    rig.numbers(0, 0, 1, 2)
    rig.reader.next()
    rig.reader.next()
    rig.reader.close()
    assert [copy.done for copy in device.started] == [True, True, True]
    rig.reader.close()


def test_ring_of_a_hanging_device_is_never_freed(
    rigs: Any, device: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_reader, "CLOSE_S", 0.02)
    monkeypatch.setattr(device_reader, "_stranded", [])
    rig = rigs(backend=device)
    rig.numbers(0, 0, 1)
    rig.reader.next()
    rig.reader.close()
    del rig.reader._lanes[:]
    gc.collect()
    assert len(device.runtime.locked) == 1
    device.finish()
    device_reader._stranded.clear()
    gc.collect()
    assert device.runtime.locked == {}


def test_failed_device_stops_only_the_loop(rigs: Any, device: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_reader, "_stranded", [])
    rig = rigs(backend=device)
    rig.numbers(0, 0, 1)
    rig.reader.next()
    device.failure = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError, match="device-side assert"):
        rig.reader.next()
    assert rig.reader.flush(), "a state can still be asked for"
    assert rig.reader.position.step == 1
    rig.reader.close()
    assert len(device_reader._stranded) == 2
