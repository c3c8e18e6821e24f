"""Contract of every lane, whatever lies between its two ends: the local lane, TCP, and TLS with compression."""

from __future__ import annotations

import os

import pytest
from lane_frames import shapes_of
from tests.lanes.conftest import Link, Runner, consume, count_rings, cut, finish, next_frame, payload, take
from tests.lanes.runner_child import content
from waiting import until

from penstock.proto.errors import LaneClosedError, LaneLostError
from penstock.proto.lane.frames import CLOSE, END, ERROR, dims_of
from penstock.proto.v1 import lane_pb2

# ---- batches


def test_sizes_may_change_and_be_zero(link: Link, runner: Runner) -> None:
    sizes = [0, 1, 16383, 0, 16384, 16385, 70_000, 3, 4095, 300_000, 299_999, 0, 1 << 20, 12, (1 << 20) - 1] * 3
    consumer = link.connect()
    runner.batches(1, sizes)
    for total, size in enumerate(sizes, 1):
        finish(consumer, total, take(consumer, total, size))
    state = runner.until(delivered=len(sizes), lent=0, kept=0, rings=1)
    assert state["free"] == state["slots"]


def test_larger_batch_starts_a_larger_ring(link: Link, runner: Runner) -> None:
    sizes = [1000, 5000, 5001, 30_000, 300_000, 2_000_000]
    consumer = link.connect()
    runner.batches(1, sizes)
    places, views = [], []
    for total, size in enumerate(sizes, 1):
        places.append(take(consumer, total, size))
        frame_view = consumer.rings[places[-1][0]].view
        entry_bytes = consumer.rings[places[-1][0]].entry_bytes
        assert entry_bytes % 4096 == 0
        views.append(frame_view[places[-1][1] * entry_bytes :][:size])
    assert len({ring for ring, _ in places}) == 5
    if link.kind == "local":
        assert runner.ask("state")["rings"] == 5
    assert list(consumer.rings) == [places[-1][0]], "the consumer keeps no mapping of its own of an older ring"
    for total, (view, size) in enumerate(zip(views, sizes, strict=True), 1):
        assert bytes(view) == content(total, size), "an old ring's memory stays as long as it is looked at"
    consumer.delivered(len(sizes))
    for place in places:
        consumer.release(place)
    consumer.flush()
    runner.until(rings=1, lent=0)
    before = count_rings("self")
    del view, frame_view
    views.clear()
    assert count_rings("self") == before - 4


def test_many_dims_ride_behind_the_batch(link: Link, runner: Runner) -> None:
    shapes = [7, (1 << 64) - 1, *range(3000)]
    consumer = link.connect()
    runner.batches(1, [10_000], shapes=shapes)
    runner.batches(2, [100], shapes=shapes[:2048])
    runner.batches(3, [30], shapes=shapes)
    for total, size, dims in ((1, 10_000, shapes), (2, 100, shapes[:2048]), (3, 30, shapes)):
        frame = next_frame(consumer)
        assert (frame.total, bool(frame.size)) == (total, len(dims) > 2048)
        assert shapes_of(dims_of(frame, consumer.rings[frame.ring])) == dims
        assert bytes(payload(consumer, frame)) == content(total, size)
        finish(consumer, total, (frame.ring, frame.entry))


def test_many_dims_do_not_overflow_the_socket(link: Link, runner: Runner) -> None:
    shapes = [(1 << 63) + index for index in range(2048)]  # 20 KiB a frame: a ring of them fills the socket
    consumer = link.connect()
    runner.batches(1, [16] * 80, shapes=shapes)
    consume(consumer, range(1, 81), 16)
    runner.until(delivered=80, lent=0)


# ---- ends


def test_end_of_epoch_follows_its_last_batch(link: Link, runner: Runner) -> None:
    consumer = link.connect()
    runner.batches(1, [100] * 2)
    runner.work({"kind": "end", "epoch": 0, "total": 2}, {"kind": "end", "epoch": 1, "total": 2})
    runner.batches(3, [100], epoch=2)
    consume(consumer, (1, 2), 100)
    for epoch in (0, 1):
        frame = next_frame(consumer)
        assert (frame.kind, frame.epoch, frame.total) == (END, epoch, 2)
    finish(consumer, 3, take(consumer, 3, 100, epoch=2))
    runner.until(delivered=3, kept=0, lent=0)


def test_error_follows_last_batch_truncated(link: Link, runner: Runner) -> None:
    letter = "€"
    consumer = link.connect()
    runner.batches(1, [100])
    # No more than a packet of the test's control socket holds.
    failure = {"message": letter * 9000, "traceback": "first " + letter * 9000 + " last"}
    runner.work({"kind": "fail", "epoch": 0, "total": 1, **failure})
    finish(consumer, 1, take(consumer, 1, 100))
    frame = next_frame(consumer)
    assert (frame.kind, frame.epoch, frame.total, frame.error.name) == (ERROR, 0, 1, "InputFnError")
    assert frame.error.message in letter * 9000
    assert len(frame.error.message.encode()) > 8000
    assert frame.error.remote_traceback.endswith(letter * 5000 + " last")
    # Whoever comes back for the next batch hears it again: nothing else will ever come.
    cut(consumer, runner)
    again = next_frame(link.connect(next_total=2))
    assert (again.kind, again.error.name) == (ERROR, "InputFnError")


def test_producers_close_differs_from_its_loss(link: Link, runner: Runner) -> None:
    consumer = link.connect()
    runner.batches(1, [50_000] * 3)
    runner.work({"kind": "close"})
    for total in (1, 2, 3):
        take(consumer, total, 50_000)
    assert next_frame(consumer).kind == CLOSE
    with pytest.raises(LaneLostError):
        next_frame(consumer)


def test_consumers_close_differs_from_its_loss(link: Link, runner: Runner) -> None:
    consumer = link.connect()
    runner.batches(1, [100])
    take(consumer, 1, 100)
    consumer.delivered(1)
    consumer.close()
    state = runner.until(attached=False)
    assert state["closed"]
    assert state["delivered"] == 1
    with pytest.raises(LaneClosedError):
        consumer.receive()
    again = link.connect(next_total=2)
    assert not runner.ask("state")["closed"]
    again.close(say_so=False)
    assert not runner.until(attached=False)["closed"]


# ---- credits


def test_unreleased_entry_is_never_refilled(link: Link, runner: Runner) -> None:
    size = 2 << 20
    consumer = link.connect()
    runner.batches(1, [size] * 12)
    first = [take(consumer, total, size) for total in range(1, 5)]
    state = runner.until(made=4, starved=True, free=0)
    assert state["slots"] == 4
    consumer.delivered(4)
    consumer.flush()
    if link.kind == "tcp":
        # The runner may go on, but the receiver has no slot to put it.
        runner.until(made=8, starved=True)
    else:
        runner.until(delivered=4, made=4, starved=True, lent=4, kept=0)
    assert consumer.receive() is None
    for total, (ring_id, slot) in enumerate(first, 1):
        ring = consumer.rings[ring_id]
        assert ring.view[slot * ring.entry_bytes :][:size] == content(total, size)
    consumer.release(first[2])
    consumer.flush()
    assert take(consumer, 5, size) == first[2], "the one slot that came back"
    consumer.release([*first[0], *first[1], *first[3]])
    finish(consumer, 5, first[2])
    consume(consumer, range(6, 13), size)
    runner.until(delivered=12, lent=0, free=4)


def test_a_slot_named_twice_comes_back_once(link: Link, runner: Runner) -> None:
    consumer = link.connect()
    runner.batches(1, [100] * 2)
    places = [take(consumer, total, 100) for total in (1, 2)]
    for _ in range(3):
        finish(consumer, 1, places[0])
        consumer.release([places[0][0] + 1, 0, places[0][0], 31, 99, 99])  # no ring, not lent, no ring
    finish(consumer, 2, places[1])
    state = runner.until(delivered=2, lent=0)
    assert state["free"] == state["slots"] == 32
    assert state["attached"]


def test_acks_flow_while_nobody_reads_them(link: Link, runner: Runner) -> None:
    consumer = link.connect()
    runner.batches(1, [100] * 3)
    places = [take(consumer, total, 100) for total in (1, 2, 3)]
    finish(consumer, 1, places[0])
    runner.until(delivered=1)
    runner.ask("deaf", deaf=True)
    consumer.delivered(2)
    blocked = 0
    for epoch in range(1, 5001):
        consumer.open_epochs(epoch)
        blocked += not consumer.flush()
    assert blocked or link.kind == "tcp"
    assert len(consumer._unsent) <= 1, "what waits is one message, however much there is to say"
    finish(consumer, 3, places[2])
    runner.ask("deaf", deaf=False)
    until(consumer.flush, what="the socket never had room again")
    runner.until(delivered=3, open_epochs=5000, lent=1 if link.kind == "local" else 0)


def test_wishes_for_snapshots_and_passes_arrive(link: Link, runner: Runner) -> None:
    consumer = link.connect(open_epochs=2, wanted=[5, 50])
    runner.until(open_epochs=2, wanted=[[50, [5]]])
    wanted = [number for step in range(6, 3006) for number in (step, 10 * step)]
    consumer.want(wanted)  # far more than one packet holds
    consumer.want([6, 60, 7, 60])
    consumer.open_epochs(3)
    consumer.flush()
    state = runner.until(open_epochs=3)
    assert state["wanted"][:3] == [[50, [5]], [60, [6, 7]], [70, [7]]]
    assert len(state["wanted"]) == 3001


# ---- coming back


def test_it_may_break_at_every_step(link: Link, runner: Runner) -> None:
    runner.batches(1, [200, 90_000] * 6)
    for total in range(1, 13):
        consumer = link.connect(next_total=total)
        finish(consumer, total, take(consumer, total, 200 if total % 2 else 90_000))
        if total % 3 == 0:
            runner.until(delivered=total)
        cut(consumer, runner)
    link.connect(next_total=13)
    state = runner.until(delivered=12, lent=0)
    assert state["made"] == 12
    assert state["free"] == state["slots"]


def test_lent_entry_is_not_resent_or_refilled(link: Link, runner: Runner) -> None:
    size = 2 << 20
    consumer = link.connect()
    runner.batches(1, [size] * 8)
    places = [take(consumer, total, size) for total in (1, 2, 3)]
    consumer.delivered(2)
    consumer.flush()
    runner.until(delivered=2)
    kept = []
    for place in places[:2]:
        view = consumer.rings[place[0]].view[place[1] * size :][:size]
        view[:5] = b"mine!"  # the loop may write into what it was given
        kept.append(view)
    cut(consumer, runner)
    # The first is still looked at, the second has been dropped meanwhile.
    held = [lane_pb2.RingEntry(ring=places[0][0], entry=places[0][1])]
    consumer = link.connect(next_total=3, held=held)
    consume(consumer, range(3, 9), size)
    runner.until(made=8, delivered=8)
    assert bytes(kept[0][:5]) == b"mine!"
    assert bytes(kept[0][5:]) == content(1, size)[5:]
    if link.kind == "local":
        assert runner.ask("state")["lent"] == 1
        consumer.release(places[0])
        consumer.flush()
    runner.until(lent=0, free=4)


def test_request_for_delivered_batch_is_refused(link: Link, runner: Runner) -> None:
    consumer = link.connect()
    runner.batches(1, [100] * 3)
    consume(consumer, (1, 2), 100)
    runner.until(delivered=2)
    refused = link.connect(next_total=2)
    frame = next_frame(refused)
    assert (frame.kind, frame.error.name) == (ERROR, "ProtocolError")
    assert "batch 2" in frame.error.message
    with pytest.raises(LaneLostError):
        next_frame(refused)
    again = link.connect(next_total=3)
    take(again, 3, 100)


# ---- leaving an epoch


def test_a_pass_left_in_full_flow(link: Link, runner: Runner) -> None:
    size = 20_000
    consumer = link.connect()
    runner.batches(1, [size] * 200)
    places = [take(consumer, total, size) for total in (1, 2, 3)]
    consumer.delivered(2)
    consumer.release(places[0])
    runner.until(starved=True)
    consumer.abandon(0, 2)  # 3 was received and not handed out, 29 more are on their way, the rest is never made
    state = runner.until(abandoned=[0], abandons=1, delivered=2, kept=0, todo=0)
    assert state["made"] < 40
    runner.batches(3, [size] * 100, epoch=1)
    consume(consumer, range(3, 51), size, epoch=1)
    consumer.release(places[1])
    consume(consumer, range(51, 103), size, epoch=1)
    state = runner.until(delivered=102, lent=0, kept=0)
    assert state["free"] == state["slots"]


def test_a_pass_left_while_the_lane_was_broken(link: Link, runner: Runner) -> None:
    consumer = link.connect()
    runner.batches(1, [100] * 5)
    finish(consumer, 1, take(consumer, 1, 100))
    runner.until(delivered=1, made=5)
    cut(consumer, runner)
    hello = {"next_total": 2, "abandons": 1, "abandon_epoch": 1}
    consumer = link.connect(**hello)
    state = runner.until(abandoned=[0], abandons=1, kept=0, lent=0)
    assert state["free"] == state["slots"]
    runner.batches(2, [100] * 2, epoch=1)
    finish(consumer, 2, take(consumer, 2, 100, epoch=1))
    cut(consumer, runner)
    consumer = link.connect(**{**hello, "next_total": 3})  # it says so again: heard already
    finish(consumer, 3, take(consumer, 3, 100, epoch=1))
    assert runner.until(delivered=3, lent=0)["abandoned"] == [0]


def test_new_runner_and_abandoned_epochs(link: Link, runner: Runner) -> None:
    runner.batches(8, [100] * 3, epoch=2)  # it knows where it starts, and has worked ahead
    consumer = link.connect(next_total=8, abandons=2, abandon_epoch=2)
    consume(consumer, (8, 9, 10), 100, epoch=2)
    runner.until(delivered=10, abandons=2, lent=0)


def test_new_runner_started_in_abandoned_epoch(link: Link, runner: Runner) -> None:
    runner.batches(8, [100] * 3, epoch=1)
    consumer = link.connect(next_total=8, abandons=2, abandon_epoch=2)
    runner.until(abandoned=[1], kept=0, lent=0)
    runner.batches(8, [100], epoch=2)
    finish(consumer, 8, take(consumer, 8, 100, epoch=2))


def test_error_outlives_its_epoch(link: Link, runner: Runner) -> None:
    consumer = link.connect()
    runner.batches(1, [100] * 2)
    runner.work({"kind": "fail", "epoch": 0, "total": 2, "message": "it broke", "traceback": ""})
    finish(consumer, 1, take(consumer, 1, 100))
    consumer.abandon(0, 1)
    for _ in range(2):
        frame = next_frame(consumer)
        assert (frame.kind, frame.error.message) == (ERROR, "it broke")
        runner.until(abandoned=[0])
        cut(consumer, runner)
        consumer = link.connect(next_total=2, abandons=1)


# ---- loss


@pytest.mark.parametrize("link", ["local", "tcp"], indirect=True)
def test_killed_runners_frames_are_still_read(link: Link, runner: Runner) -> None:
    size = 200_000
    consumer = link.connect()
    runner.batches(1, [size] * 20)
    runner.until(made=20)
    finish(consumer, 1, take(consumer, 1, size))
    runner.until(delivered=1)
    runner.ask("deaf", deaf=True)
    finish(consumer, 2, take(consumer, 2, size))  # an ack that it will not have read: the kernel resets the connection
    runner.kill()
    consume(consumer, range(3, 21), size)
    with pytest.raises(LaneLostError, match=r"the (local|tcp) lane"):
        next_frame(consumer)
    with pytest.raises(LaneLostError):
        consumer.receive()
    consumer.delivered(20)
    assert consumer.flush()


def test_descriptors_and_memory_are_released(link: Link, runner: Runner) -> None:
    def used() -> dict[str, int]:
        receiver = link.receiver.pid if link.kind == "tcp" else None
        pids = [pid for pid in (os.getpid(), runner.process.pid, receiver) if pid is not None]
        found = {f"rings of {pid}": count_rings(pid) for pid in pids}
        return found | {f"descriptors of {pid}": len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}

    def lane(first: int) -> None:
        consumer = link.connect(next_total=first)
        runner.batches(first, [100, 70_000, 1 << 20, 50])
        for total, size in zip(range(first, first + 4), (100, 70_000, 1 << 20, 50), strict=True):
            finish(consumer, total, take(consumer, total, size))
        runner.until(delivered=first + 3, lent=0)
        consumer.close()
        runner.until(attached=False)
        for sender in link.senders:
            sender.join()

    lane(1)
    until(lambda: count_rings(link.receiver.pid or "self") == 0, what="the receiver kept a ring of a lane that is over")
    before = used()
    for first in (5, 9, 13):
        lane(first)
    # Some of what was counted before may still have been on its way out.
    until(lambda: all(count <= before[what] for what, count in used().items()), what=f"more than {before}")
