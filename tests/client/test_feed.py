"""The feed against real producers over real sockets: order, views, acks, ends, errors and broken lanes.

`either`: also with a device, for which each batch is copied ahead (test_staging.py).
"""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from lane_frames import a_frame

from penstock.client.stream import ordered_reader
from penstock.client.stream.checkpoint_schedule import CheckpointSchedule
from penstock.client.stream.lane_reader import SlotLane
from penstock.client.stream.streams import EPOCH_ENDED
from penstock.proto.errors import (
    DeadlineError,
    EmptyInputError,
    InputFnError,
    NoWorkersError,
    ProtocolError,
    UnsupportedLeafError,
    WorkerLostError,
)
from penstock.proto.lane import ring
from penstock.proto.lane.frames import CLOSE
from penstock.proto.lane.ring import MAX_ENTRIES
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2


def test_slots_take_turns_whatever_came_first(either: Any) -> None:
    rig = either(3)
    rig.numbers(2, 200, 201)
    rig.numbers(1, 100, 101)
    rig.numbers(0, 0, 1)
    assert rig.take(6) == [0, 100, 200, 1, 101, 201]
    assert rig.reader.position.step == 6
    assert rig.reader.position.total == [2, 2, 2]


def test_unreachable_worker_is_for_all_slots(rigs: Any) -> None:
    """The loop waits for one at a time; the others' lanes are as silent."""
    rig = rigs(3)
    rig.reader.flush()
    run, lanes = rig.run, rig.reader._lanes
    for slot, worker in enumerate(("far", "near", "far")):
        run.views[slot].worker = worker
        run.views[slot].generation = lanes[slot].generation = 5
    assert run.progress.unreachable() == []
    lanes[0].unreachable = "timed out"
    assert run.progress.unreachable() == [(0, 5, "timed out"), (2, 5, "timed out")]
    run.views[2].generation = 6  # it has moved, and the feed does not know yet
    assert run.progress.unreachable() == [(0, 5, "timed out")]


def test_leaves_are_views_that_release_entries(rigs: Any) -> None:
    rig = rigs()
    rig.numbers(0, 7)
    batch = rig.reader.next()
    ring = rig.runners[0].producer
    batch[0] = 9  # the loop may write in place
    free = ring.free_entries
    rig.acked()
    assert ring.free_entries == free, "the batch is still seen"
    view = batch[:1]
    del batch
    rig.acked()
    assert ring.free_entries == free, "a view of it is still seen"
    assert view.tolist() == [9]
    del view
    rig.acked()
    assert ring.free_entries == free + 1


def test_keeping_all_batches_corrupts_nothing(rigs: Any) -> None:
    rig = rigs()
    kept = []
    for number in range(200):  # a ring has 32 slots
        rig.numbers(0, number)
        kept.append(rig.reader.next())
    assert [int(batch) for batch in kept] == list(range(200))
    assert rig.reader.copies >= 200 - 17
    kept.clear()
    gc.collect()
    for number in range(40):
        rig.numbers(0, number)
        assert int(rig.reader.next()) == number
    assert rig.reader.copies < 200, "views again once slots are free"


@pytest.mark.parametrize("timeout_s", [0.05, 1e-9])
def test_acks_come_in_groups_but_before_any_wait(rigs: Any, timeout_s: float) -> None:
    """Send acks before each wait, also before one whose time is over when it begins."""
    rig = rigs(2, timeout_s=timeout_s)
    rig.numbers(0, *range(3))
    rig.numbers(1, 10)
    assert rig.take(3) == [0, 10, 1]
    producers = [runner.producer for runner in rig.runners]
    for producer in producers:
        producer.take_acks()
    assert [producer.delivered for producer in producers] == [0, 0], "8 deliveries make a group in a ring of 32"
    with pytest.raises(DeadlineError):
        rig.reader.next()
    for producer in producers:
        producer.take_acks()
    assert [producer.delivered for producer in producers] == [2, 1]


def test_giants_have_one_entry_and_come_as_copies(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them the loop keeps."""
    monkeypatch.setattr(ring, "GIANT_BYTES", 2 * ring.PAGE)
    rig = rigs()
    kept = []
    for number in range(4):
        assert rig.runners[0].send(torch.full((ring.PAGE + number,), number))
        assert rig.acked().ring_entries == 1
        kept.append(rig.reader.next())
        assert rig.taken() == 0
    assert [batch.unique().tolist() for batch in kept] == [[0], [1], [2], [3]]
    assert rig.reader.copies == 4


def test_uneven_slots_end_in_turn(either: Any) -> None:
    rig = either(2)
    rig.numbers(0, 0)
    rig.runners[0].end()
    rig.numbers(1, 10, 11, 12)
    rig.runners[1].end()
    assert rig.take(4) == [0, 10, 11, 12]
    assert rig.reader.position.live == [1]
    assert rig.reader.next() is EPOCH_ENDED
    assert (rig.reader.position.epoch, rig.reader.position.live) == (1, [0, 1])
    rig.numbers(0, 1)
    rig.numbers(1, 13)
    assert rig.take(2) == [1, 13]


def test_two_empty_passes_in_a_row_are_an_error(rigs: Any) -> None:
    rig = rigs()
    rig.runners[0].end()
    rig.runners[0].end()
    assert rig.reader.next() is EPOCH_ENDED
    with pytest.raises(EmptyInputError):
        rig.reader.next()


def test_error_comes_after_earlier_batches(either: Any) -> None:
    rig = either(2)
    rig.numbers(0, 0, 1)
    rig.runners[0].fail("InputFnError", "ValueError: no such sample", "Traceback: line 7 of user code")
    rig.numbers(1, 10, 11)
    rig.run.show(rig.runners[0], pb.FAILED)
    assert rig.take(4) == [0, 10, 1, 11]
    with pytest.raises(InputFnError, match=r"no such sample \[worker w0, box 0, slot 0, step 5\]") as caught:
        rig.reader.next()
    assert "line 7 of user code" in str(caught.value)
    assert rig.run.error is caught.value


def test_failed_slot_is_tried_once_for_batches(rigs: Any) -> None:
    rig = rigs(1, timeout_s=30)
    runner = rig.runners[0]
    rig.numbers(0, 0, 1)
    rig.run.show(runner, pb.FAILED, error=records_pb2.ErrorDetail(name="WorkerLostError", message="it died"))
    dialled = []
    dial = rig.run.dial

    def count(*args: Any) -> Any:
        dialled.append(args)
        return dial(*args)

    rig.run.dial = count
    assert rig.take(2) == [0, 1]
    runner.break_lane()
    with pytest.raises(WorkerLostError, match=r"it died \[worker w0, box 0, slot 0, step 3\]"):
        rig.reader.next()
    assert len(dialled) == 1


def test_failed_slot_with_a_silent_lane_is_its_error(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_reader, "FAILED_GRACE_S", 0.05)
    rig = rigs(1, timeout_s=20)
    rig.numbers(0, 0)
    assert rig.take(1) == [0]
    rig.run.show(rig.runners[0], pb.FAILED, error=records_pb2.ErrorDetail(name="WorkerLostError", message="it died"))
    with pytest.raises(WorkerLostError, match="it died"):
        rig.reader.next()


def test_unassembled_batch_comes_again(either: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = either()
    rig.numbers(0, 0, 1)
    compiled = SlotLane._compile
    monkeypatch.setattr(SlotLane, "_compile", refuse)
    with pytest.raises(UnsupportedLeafError, match="a class that nobody imported"):
        rig.reader.next()
    assert rig.reader.position.step == 0
    monkeypatch.setattr(SlotLane, "_compile", compiled)
    assert rig.take(2) == [0, 1]


def refuse(*args: Any) -> Any:
    raise UnsupportedLeafError("a class that nobody imported")


def test_deadlines_name_who_was_waited_for(rigs: Any) -> None:
    rig = rigs(2, timeout_s=0.2)
    rig.numbers(0, 0)
    rig.take(1)
    with pytest.raises(
        DeadlineError, match=r"make: box 0 waited .* for step 2 from worker slot 1 on worker w1"
    ) as caught:
        rig.reader.next()
    assert not isinstance(caught.value, NoWorkersError)
    assert rig.reader.stats.waited_by_worker["w1"] > 0
    assert rig.reader.wait_s > 0
    rig.numbers(1, 10)
    assert rig.take(1) == [10], "a wait that ran out can be repeated"


def test_wait_for_a_slot_without_a_worker_is_nobodys(rigs: Any) -> None:
    rig = rigs(1, timeout_s=0.2)
    rig.run.views = [pb.SlotView(slot=0, generation=rig.runners[0].generation, phase=pb.WAITING)]
    rig.run.version += 1
    with pytest.raises(NoWorkersError, match="1 of its 1 worker slots have no worker"):
        rig.reader.next()
    assert rig.reader.stats.waited_s > 0
    assert rig.reader.stats.waited_by_worker == {}


def test_queued_start_is_not_late_while_it_moves(rigs: Any) -> None:
    rig = rigs(1, timeout_s=0.5)
    places = [view(9), view(8), view(7)]

    def move() -> None:
        for place in places:
            time.sleep(0.3)
            rig.run.views = [place]
            rig.run.version += 1
            os.eventfd_write(rig.run.wake_fd, 1)

    rig.run.views = [view(10)]
    thread = threading.Thread(target=move)
    thread.start()
    with pytest.raises(DeadlineError, match=r"its runner is number 7 of 10 in the queue of runners to start"):
        rig.reader.next()
    thread.join()


def view(place: int) -> pb.SlotView:
    return pb.SlotView(slot=0, phase=pb.STARTING, worker="w", start_queue_position=place, start_queue_length=10)


# ---- broken lanes


def test_broken_lane_reopens_without_loss(rigs: Any) -> None:
    rig = rigs()
    runner = rig.runners[0]
    rig.numbers(0, *range(6))
    first = rig.reader.next()
    second = rig.reader.next()
    runner.break_lane()
    # What was on its way is read first; the rest is sent again.
    assert rig.take(4) == [2, 3, 4, 5]
    rig.numbers(0, 6, 7)
    assert rig.take(2) == [6, 7]
    hello = runner.hellos[-1]
    assert len(runner.hellos) == 2
    assert hello.next_total == 7
    assert hello.last_digest
    assert [int(first), int(second)] == [0, 1]
    assert len(hello.held) == 2, "views that live over the break keep their slots"
    free = runner.producer.free_entries
    del first, second
    rig.acked()
    assert runner.producer.free_entries >= free + 2


def test_moved_slot_drops_late_frames(either: Any) -> None:
    """And a batch that was copied ahead."""
    rig = either(2)
    old = rig.runners[0]
    rig.numbers(0, 0, 1, 2)
    rig.numbers(1, 10, 11, 12)
    held = rig.reader.next()
    assert rig.take(1) == [10]
    new = type(old)(0, 2, total=1)
    assert new.send(torch.tensor([1]))
    rig.runners[0] = new
    rig.run.show(new, restarts=1, note="worker w0 died")
    with pytest.warns(UserWarning, match="worker slot 0 of box 0 was recovered: worker w0 died"):
        assert rig.take(1) == [1]
    assert new.hellos[0].next_total == 2
    assert not new.hellos[0].held, "a ring of another generation is nothing to it"
    assert rig.take(1) == [11]
    assert rig.reader.stats.recoveries == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rig.numbers(0, 2)
        assert rig.take(1) == [2], "one warning for a recovery"
    assert rig.reader.position.total == [3, 2]
    assert int(held) == 0
    del held
    assert rig.taken() == 0
    assert new.producer.attached, "it was told of none of the other's slots"
    old.producer.close()
    whole = either()
    whole.numbers(0, 0, 1, 2)
    whole.take(3)
    assert rig.reader._lanes[0].chain == whole.reader._lanes[0].chain, "no batch is left out of the slot's chain"


@pytest.mark.parametrize(("total", "epoch"), [(3, 0), (2, 1)])
def test_a_batch_out_of_order_is_an_error(either: Any, total: int, epoch: int) -> None:
    """When it is due, also where it could have been copied ahead."""
    rig = either()
    rig.numbers(0, 0)
    rig.runners[0].total, rig.runners[0].epoch = total - 1, epoch
    rig.numbers(0, 2)
    assert rig.take(1) == [0]
    words = f"worker w0: the worker sent batch {total} of epoch {epoch}, but batch 2 of epoch 0 was due"
    with pytest.raises(ProtocolError, match=words):
        rig.reader.next()


def test_repeated_end_is_not_counted_twice(rigs: Any) -> None:
    rig = rigs(2)
    rig.numbers(0, 0)
    rig.runners[0].end()
    rig.numbers(1, 10, 11)
    rig.runners[1].end()
    assert rig.take(3) == [0, 10, 11]
    rig.runners[0].break_lane()
    rig.runners[1].break_lane()
    assert rig.reader.next() is EPOCH_ENDED
    rig.numbers(0, 1)
    rig.numbers(1, 12)
    assert rig.take(2) == [1, 12]


# ---- what workers are told, and what others see


def test_dense_checkpoint_steps_are_announced(rigs: Any) -> None:
    rig = rigs(2)
    rig.numbers(0, 0)
    rig.numbers(1, 10)
    rig.take(2)
    again = rig.reader.announce(CheckpointSchedule.of(1), None)
    rig.reader.flush()
    for runner, first in zip(rig.runners, ([3, 4], [4, 5]), strict=True):
        runner.producer.take_acks()
        wanted = runner.producer.wanted
        assert list(wanted) == list(range(2, max(wanted) + 1))
        assert wanted[2] == first
        # When more is announced, the worker may be a ring ahead of the loop, and has one in the making.
        assert max(wanted) - again // 2 > MAX_ENTRIES + 1


def test_half_moved_position_is_not_seen(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs()
    rig.numbers(0, 1)
    deliver = Position.deliver
    seen: list[Any] = []

    def slowly(position: Position, digest: int) -> None:
        position.step += 1
        thread = threading.Thread(target=lambda: seen.append(rig.reader.copy_position()))
        thread.start()
        thread.join(0.05)
        position.step -= 1
        deliver(position, digest)
        thread.join()

    monkeypatch.setattr(Position, "deliver", slowly)
    rig.take(1)
    assert seen[0] is None or seen[0].step == sum(slot.total for slot in seen[0].slots)


# ---- where a loop leaves an epoch before its end


def test_epoch_with_a_further_batch_is_abandoned(either: Any) -> None:
    """Where the loop wants no more of it. Without a further batch, it ends by itself."""
    rig = either(2)
    rig.numbers(0, 0, 1)
    rig.numbers(1, 10)
    assert rig.take(2) == [0, 10]
    assert not rig.reader.end_epoch()
    assert rig.run.progress.abandoned == ((0, 2),)
    assert rig.run.reports == 1
    assert [runner.leave_epoch() for runner in rig.runners] == [0, 0]
    rig.numbers(0, 100)
    rig.numbers(1, 110)
    assert rig.take(2) == [100, 110], "batches of the epoch that was left are never seen"
    assert rig.reader.position.total == [2, 2]
    for runner in rig.runners:
        runner.end()
    assert rig.reader.end_epoch()
    assert (rig.reader.position.epoch, rig.reader.position.step) == (2, 4)
    assert rig.run.progress.abandoned == ((0, 2),)
    producer = rig.acked()
    assert producer.free_entries >= producer.ring_entries - 1


def test_closed_loader_reports_its_last_position(rigs: Any) -> None:
    rig = rigs()
    rig.numbers(0, 1, 2, 3)
    rig.take(3)
    rig.reader.close()
    last = rig.run.progress.position()
    assert (last.step, last.slots[0].total) == (3, 3)


def test_abandoned_epoch_is_in_the_next_hello(rigs: Any) -> None:
    rig = rigs(2)
    rig.numbers(0, 0, 1, 2)
    rig.numbers(1, 10, 11)
    assert rig.take(3) == [0, 10, 1]
    rig.runners[1].break_lane()
    rig.reader.abandon_epoch()
    assert rig.runners[0].leave_epoch() == 0
    rig.numbers(0, 100)
    assert rig.take(1) == [100]
    # The next turn is slot 1's: it connects, hears of the cut, and counts on from what was delivered.
    rig.reader._timeout_s = 0.05
    with pytest.raises(DeadlineError):
        rig.reader.next()
    assert rig.runners[1].producer.abandons == 1
    assert rig.runners[1].leave_epoch() == 0
    rig.numbers(1, 110)
    assert rig.take(1) == [110]


def test_closing_lane_may_lack_abandoned_epochs(rigs: Any) -> None:
    rig = rigs(timeout_s=0.05)
    runner = rig.runners[0]
    rig.numbers(0, 0)
    assert rig.take(1) == [0]
    rig.reader.abandon_epoch()
    runner.producer.forward_end(a_frame(kind=CLOSE))
    runner.break_lane()
    with pytest.raises(DeadlineError):
        rig.reader.next()
    assert runner.hellos[1].abandon_epoch == 1
    assert runner.leave_epoch() == 0
    rig.numbers(0, 100)
    assert rig.take(1) == [100]


def test_nothing_is_cut_where_nothing_was_taken(either: Any) -> None:
    rig = either()
    rig.reader.abandon_epoch()
    assert rig.reader.position.epoch == 0
    assert rig.run.progress.abandoned == ()
