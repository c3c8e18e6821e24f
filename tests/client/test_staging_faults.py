"""The feed that copies ahead, and whatever is no batch: ends, errors, lanes that break, epochs that are left, closing.

The device is that of test_staging.py: its copies happen when the test says so.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from devices import FakeBackend
from lane_frames import a_frame

from penstock.client.stream import device_reader
from penstock.client.stream.device_reader import DeviceLane
from penstock.client.stream.streams import EPOCH_ENDED
from penstock.proto.errors import DeadlineError, InputFnError, ProtocolError, UnsupportedLeafError
from penstock.proto.lane.frames import BATCH, framed

# ---- other frames


def test_end_of_slot_or_epoch_waits_for_its_turn(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(2, backend=device)
    rig.numbers(0, 0)
    rig.runners[0].end()
    rig.numbers(1, 10, 11)
    rig.runners[1].end()
    for step in (1, 2):
        rig.reader.next()
        assert rig.reader.position.step == step
        assert rig.reader.position.live == [0, 1]
    rig.reader.next()
    assert rig.reader.position.live == [1]
    assert rig.reader.position.epoch == 0
    assert rig.reader.next() is EPOCH_ENDED
    assert (rig.reader.position.epoch, rig.reader.position.live) == (1, [0, 1])
    assert len(device.started) == 3
    rig.numbers(0, 1)
    rig.numbers(1, 12)
    batches = [rig.reader.next(), rig.reader.next()]
    device.finish()
    assert [int(batch) for batch in batches] == [1, 12]


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


def test_an_error_comes_when_its_step_is_due(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 0, 1)
    rig.runners[0].fail("InputFnError", "ValueError: no such sample")
    batches = [rig.reader.next(), rig.reader.next()]
    assert rig.run.error is None
    device.finish()
    assert [int(batch) for batch in batches] == [0, 1]
    with pytest.raises(InputFnError, match=r"no such sample \[worker w0, box 0, slot 0, step 3\]"):
        rig.reader.next()


@pytest.mark.parametrize(("total", "epoch"), [(3, 0), (2, 1)])
def test_out_of_order_batch_fails_when_due(rig: Any, total: int, epoch: int) -> None:
    rig.numbers(0, 0)
    rig.runners[0].total, rig.runners[0].epoch = total - 1, epoch
    rig.numbers(0, 2)
    rig.reader.next()
    words = f"worker w0: the worker sent batch {total} of epoch {epoch}, but batch 2 of epoch 0 was due"
    with pytest.raises(ProtocolError, match=words):
        rig.reader.next()


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (b"\xff" * 9, "worker w0: a packet of 9 bytes must hold whole frames"),
        (framed(a_frame(kind=BATCH, total=3, ring=1).encode()), "are in no entry"),
    ],
)
def test_impossible_frame_fails_when_due(rig: Any, packet: bytes, words: str) -> None:
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


def test_unassembled_batch_fails_when_due(rig: Any, device: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.numbers(0, 0)
    assert rig.runners[0].send({"x": torch.tensor([1])})
    compiled = DeviceLane._compile

    def refuse(lane: Any, structure: int) -> Any:
        if structure > 1:
            raise UnsupportedLeafError("a class that nobody imported")
        return compiled(lane, structure)

    monkeypatch.setattr(DeviceLane, "_compile", refuse)
    batch = rig.reader.next()
    for _ in range(2):
        with pytest.raises(UnsupportedLeafError, match="a class that nobody imported"):
            rig.reader.next()
        assert rig.reader.position.step == 1
        rig.reader._lanes[0].retry_at = 0.0
    monkeypatch.setattr(DeviceLane, "_compile", compiled)
    device.finish()
    second = rig.reader.next()
    device.finish()
    assert (int(batch), int(second["x"])) == (0, 1)


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


def test_replaced_runner_resends_the_staged_batch(rigs: Any, device: FakeBackend) -> None:
    rig = rigs(backend=device)
    old = rig.runners[0]
    rig.numbers(0, 0, 1, 2)
    batches = [rig.reader.next()]
    staged = device.started[1]
    new = type(old)(0, 2, total=1)
    assert new.send(torch.tensor([1]))
    assert new.send(torch.tensor([2]))
    rig.runners[0] = new
    rig.run.show(new, restarts=1, note="worker w0 died")
    with pytest.warns(UserWarning, match="worker slot 0 of box 0 was recovered"):
        batches.append(rig.reader.next())
    assert staged not in device.migrated
    assert new.hellos[0].next_total == 2
    batches.append(rig.reader.next())
    assert rig.reader.position.total == [3]
    old.producer.close()
    device.finish()
    assert [int(batch) for batch in batches] == [0, 1, 2]
    assert rig.taken() == 0
    assert new.producer.attached, "it was told of none of the other's slots"


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


def test_outgrown_ring_is_locked_while_copied(rig: Any, device: FakeBackend) -> None:
    runner, runtime = rig.runners[0], device.runtime
    for power in (4, 18, 20):
        assert runner.send(torch.full((1 << power,), power, dtype=torch.uint8))
    kept = [rig.reader.next() for _ in range(3)]
    gc.collect()
    assert len(runtime.locked) == 3
    device.finish()
    rig.reader.flush()
    gc.collect()
    assert len(runtime.locked) == 1
    assert [batch.unique().tolist() for batch in kept] == [[4], [18], [20]]


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


def test_peeked_frame_of_an_old_epoch_is_dropped(rig: Any, device: FakeBackend) -> None:
    rig.numbers(0, 0)
    rig.runners[0].end()
    rig.reader.next()
    consumer = rig.reader._lanes[0].consumer
    assert consumer.look() is not None
    rig.reader.abandon_epoch()
    assert rig.runners[0].leave_epoch() == 0
    rig.numbers(0, 100)
    batch = rig.reader.next()
    device.finish()
    assert int(batch) == 100
    assert rig.reader.position.epoch == 1


def test_unstaged_batch_is_dropped_with_its_epoch(
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
    rig.reader.next()
    monkeypatch.setattr(device, "copy", copy)
    rig.reader.abandon_epoch()
    assert rig.runners[0].leave_epoch() == 0
    rig.numbers(0, 100)
    batch = rig.reader.next()
    device.finish()
    assert int(batch) == 100


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


def test_peeked_error_is_raised_in_the_next_epoch(rig: Any) -> None:
    rig.numbers(0, 0)
    rig.runners[0].fail("InputFnError", "ValueError: no such sample")
    rig.reader.next()
    rig.reader.abandon_epoch()
    with pytest.raises(InputFnError, match="no such sample"):
        rig.reader.next()


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
