"""Answers of a slot to state requests, where its runner or its loader knows less than the request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from coroutines import in_loop

from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import StateUnavailableError
from penstock.proto.state.assignment import assigned, current_assignment
from penstock.proto.state.codec import encode_state
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.logs import SubjectLogger
from penstock.worker.loader.restart_plan import Target
from penstock.worker.loader.restart_points import END, RestartPoint
from penstock.worker.loader.slot_loader import SlotLoader
from penstock.worker.loader.travel import catch_up, leave, travel
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.runner.replayer import state_at
from penstock.worker.slots.slot import Slot
from penstock.worker.slots.slot_record import SlotHost, SlotRecord
from penstock.worker.slots.slot_states import POLL_S, SlotStates
from penstock.worker.slots.snapshots import SlotSnapshots, StoredSnapshot

DEADLINE_S = 60.0
_log = logging.getLogger("penstock.worker")


@pytest.fixture
def progress_page() -> Iterator[ProgressPage]:
    made = ProgressPage.create()
    yield made
    made.close()


def states_of(progress_page: ProgressPage, **given: Any) -> SlotStates:
    helper = given.pop("helper", None)
    fields: dict[str, Any] = {
        "assignment": records_pb2.WorkerAssignment(),
        "attached": True,
        "phase": pb.READY,
        **given,
    }
    fields["assignment"].loader.options.replay_without_state = True
    slot = SlotRecord(name="box 0 slot 1", log=SubjectLogger(_log), progress_page=progress_page, **fields)
    return SlotStates(slot, cast(SlotHost, SimpleNamespace(name="w", slot_bytes=1 << 30)), helper)


def request(epoch: int, delivered: int, total: int) -> pb.StateRequest:
    return pb.StateRequest(epoch=epoch, position=records_pb2.SlotPosition(delivered=delivered, total=total))


@pytest.mark.parametrize(("begun", "ended"), [(0, True), (1, True)])
@in_loop
async def test_runner_ahead_may_not_know_the_break_yet(progress_page: ProgressPage, begun: int, ended: bool) -> None:
    """Answer with the loop's end of the epoch: the runner ran to batch 8, the loop abandoned it after the slot's batch
    2. That it has begun the next epoch shows nothing where the coordinator knows of the `break`."""
    progress_page.set_position(8, begun, 8)
    progress_page.here(begun, 0)
    if ended:
        progress_page.end(0, 8)
    answer, asked = pb.StateAnswer(), request(1, 0, 2)
    if begun:
        asked.abandoned.add(epoch=0, total=2)
    asking = asyncio.ensure_future(states_of(progress_page)._produced(asked, answer))
    await asyncio.wait([asking], timeout=20 * POLL_S)
    assert not asking.done(), f"it took the end that it had reached for the epoch's: {answer}"
    progress_page.cut(0, 2, 2)
    assert await asyncio.wait_for(asking, DEADLINE_S)
    assert not answer.ended


@in_loop
async def test_begun_epoch_decides_where_it_began(progress_page: ProgressPage) -> None:
    """Reject a request that assumes another end."""
    began, end = 8, 2
    progress_page.set_position(end, 1, end)
    progress_page.end(0, end)
    progress_page.here(1, 0)
    answer = pb.StateAnswer()
    asking = states_of(progress_page)._produced(request(1, 1, began + 1), answer)
    assert not await asyncio.wait_for(asking, DEADLINE_S)
    assert (answer.ended, answer.ended_epoch, answer.ended_total) == (True, 0, end)


def saying(source: SlotLoader, point: RestartPoint, **fields: Any) -> SimpleNamespace:
    fields = {"step": 0, "digests": {}, "left": {}, "abandoned_from": 0} | fields
    told, payload = state_at(source, point, fields, ReplayDigest())
    return SimpleNamespace(payload=payload, fields=told)


@pytest.mark.parametrize(
    ("loader", "place"),
    [
        ("stateful", (1, 2, 5)),
        ("shuffled", (3, 2, 11)),
    ],
)
def test_replay_follows_the_known_way_of_the_loop(loader: str, place: tuple[int, int, int]) -> None:
    """Pass 0 was left after 3 batches, pass 1 after 2 more, pass 2 came to its end. A new process, with nothing but the
    origin of epoch 0 and where epochs were left, saves what the first one goes on from."""
    epoch, delivered, total = place
    left = {"0": 3, "1": 5}

    def built() -> SlotLoader:
        assignment = records_pb2.WorkerAssignment(run="job/0", attempt=1, num_boxes=1, num_workers_per_box=1, seed=5)
        assignment.loader.input_fn = f"streams:{loader}"
        assignment.loader.arguments = encode_state({"args": (16,), "kwargs": {}})
        assignment.loader.allow.append("streams")
        source = SlotLoader(assignment)
        source.build()
        return source

    def goes_on(source: SlotLoader, batches: int = 4) -> list[str]:
        got: list[str] = []
        while len(got) < batches:
            if not source.is_open:
                source.open_epoch()
            if (batch := source.next()) is not END:
                got.append(str(batch))
        return got

    with assigned(current_assignment()):
        source = built()
        first = source.open_epoch()
        for at in (0, 1):
            source.seek(left[str(at)], at, lambda batch: None)
            leave(source, at, left[str(at)])
            if at + 1 == epoch:
                break
        source.seek(total, epoch, lambda batch: None)
        if source.position.epoch < epoch:
            source.reach_end()
        truth = goes_on(source)
        said = saying(built(), first, epoch=epoch, delivered=delivered, total=total, left=left)
        assert not said.fields["ended"]
        again, saved = built(), RestartPoint.decode(said.payload)
        again.restore(saved)
        target = Target(epoch, total, dict(saved.history.abandoned))
        travel(again, target, lambda leg: again.seek(leg.total, leg.epoch, lambda batch: None))
        catch_up(again, epoch)
        assert goes_on(again) == truth
        told = source.marked(first, whole_history=True)
        known = saying(built(), told, epoch=epoch, delivered=delivered, total=total)
        assert known.payload == said.payload, (
            "epochs that were left in former launches stand in what a launch starts from"
        )
        unknown = saying(built(), first, epoch=epoch, delivered=delivered, total=total, abandoned_from=1)
        assert unknown.fields == {"elsewhere": True}


@in_loop
async def test_state_behind_break_waits_for_next_epoch(progress_page: ProgressPage) -> None:
    came: list[bytes] = []

    async def elsewhere(points: list[bytes], *_: Any, **__: Any) -> Any:
        came.extend(points)
        if points == [b"third"]:
            store.add(StoredSnapshot(2, 0, 4, 0, True, 0, b"fourth"), 0)
            progress_page.here(2, 0)
        return SimpleNamespace(fields={"elsewhere": True}, payload=b"")

    store = SlotSnapshots()

    ready = asyncio.Event()
    ready.set()
    store.add(StoredSnapshot(0, 0, 0, 0, True, 0, b"first"), 0)
    capabilities = records_pb2.LoaderCapabilities(state_methods=4, exact_states=True)
    kept: dict[str, Any] = {
        "store": store,
        "capabilities": capabilities,
        "helper": elsewhere,
        "ready": ready,
    }
    states = states_of(progress_page, **kept)
    progress_page.cut(0, 3, 3)
    asking = asyncio.ensure_future(states._state(request(1, 0, 3), pb.StateAnswer(), 1e12))
    await asyncio.wait([asking], timeout=20 * POLL_S)
    assert not asking.done()
    store.add(StoredSnapshot(1, 0, 3, 0, True, 0, b"second"), 0)
    progress_page.here(1, 0)
    assert await asyncio.wait_for(asking, DEADLINE_S) == b"second"
    progress_page.set_position(4, 1, 4)
    with pytest.raises(StateUnavailableError, match="does not know yet where the training loop left"):
        await states._state(request(1, 1, 4), pb.StateAnswer(), 1e12)
    store.add(StoredSnapshot(1, 1, 4, 0, False, 0, b"third"), 0)
    progress_page.cut(1, 4, 4)
    # It begins the next epoch while a child comes elsewhere from what was kept before.
    assert await states._state(request(2, 0, 4), pb.StateAnswer(), 1e12) == b"fourth"
    assert came == [b"first", b"second", b"third"]


@pytest.mark.parametrize("at_end", [False, True])
@in_loop
async def test_state_at_the_end_of_a_loop_waits_for_the_slots_end(progress_page: ProgressPage, at_end: bool) -> None:
    progress_page.set_position(3, 0, 3)
    capabilities = records_pb2.LoaderCapabilities()
    states = states_of(progress_page, capabilities=capabilities)
    asked, answer = request(0, 3, 3), pb.StateAnswer()
    asked.at_end = at_end
    asking = asyncio.ensure_future(states._note_next(asked, answer, 1e12))
    await asyncio.wait([asking], timeout=10 * POLL_S)
    assert asking.done() is not at_end
    progress_page.end(0, 3)
    await asyncio.wait_for(asking, DEADLINE_S)
    assert answer.next_epoch is at_end


@in_loop
async def test_the_beginning_of_a_pure_epoch_needs_no_state(progress_page: ProgressPage) -> None:
    """Any restart point will do, because the epoch is made from its number. Within it, none of another one is used."""

    async def replayed(points: list[bytes], *_: Any, **fields: Any) -> Any:
        assert (points, fields["epoch"], fields["total"]) == ([], 1, 4)
        done = {"ended": False, "samples": 4, "digest": 9, "chain": 9, "following": 0, "replayed": [(1, 9, 4)]}
        return SimpleNamespace(fields=done, payload=b"made from the beginning of epoch 1")

    ready = asyncio.Event()
    ready.set()
    assignment = records_pb2.WorkerAssignment(recovery=True)
    assignment.loader.options.replay_without_state = True
    store = SlotSnapshots()
    store.add(StoredSnapshot(0, 0, 0, 0, True, 0, b"epoch_start", inherited=True), 0)
    kept: dict[str, Any] = {"store": store, "helper": replayed, "ready": ready}
    kept |= {"assignment": assignment, "attached": False, "capabilities": records_pb2.LoaderCapabilities()}
    states = states_of(progress_page, **kept)
    asked = request(1, 0, 3)
    asked.digests_after = 3
    assert await states._state(asked, pb.StateAnswer(), 1e12) == b"epoch_start"
    assert await states._state(request(1, 1, 4), pb.StateAnswer(), 1e12) == b"made from the beginning of epoch 1"


# ----------------------------------------------------------------------- runners that took over and wait for the loop


@pytest.mark.parametrize(("reported", "methods"), [(2, 2), (5, 0)])
def test_unseen_batches_are_replayed_for_digest(progress_page: ProgressPage, reported: int, methods: int) -> None:
    """The new runner waits for the training loop, so that its progress page is empty. The loop asks for batch 6; the
    box's last report was at another."""
    assignment = records_pb2.WorkerAssignment(run="job/0", num_boxes=1, num_workers_per_box=1, seed=5, recovery=True)
    assignment.loader.input_fn = "streams:fresh"
    assignment.loader.allow.append("streams")
    assignment.loader.options.replay_without_state = True
    store, digests = SlotSnapshots(), list[int]()

    def keep(point: RestartPoint, *, epoch_start: bool) -> None:
        total = point.position.total
        store.add(StoredSnapshot(0, total, total, 0, epoch_start, 0, point.encode(), inherited=True), 0)

    async def child(points: list[bytes], task: str, deadline_s: float, **fields: Any) -> Any:
        beside = SlotLoader(assignment)
        beside.build()
        beside.capabilities.state_methods = methods
        return saying(beside, RestartPoint.decode(points[0]), **fields)

    with assigned(current_assignment()):
        source, replay_digest = SlotLoader(assignment), ReplayDigest()
        source.build()
        epoch_start = source.open_epoch()
        keep(epoch_start if methods else replace(epoch_start, state=None), epoch_start=True)
        for count in range(1, 7):
            source.digest, _ = replay_digest.take(source.next())
            digests.append(source.digest)
            if methods and count in (2, 6):
                keep(source.snapshot(0), epoch_start=False)
        ready = asyncio.Event()
        ready.set()
        asked = request(0, 6, 6)
        asked.digests_after, asked.deadline_s = reported, 60
        known = {"ready": ready, "store": store, "capabilities": records_pb2.LoaderCapabilities(state_methods=methods)}
        states = states_of(progress_page, assignment=assignment, attached=False, helper=child, **known)
        answered = asyncio.run(states.answer(asked))
    assert answered is not None
    answer, data = answered
    assert not answer.HasField("error"), answer.error
    assert RestartPoint.decode(data).position.total == (2 if reported == 2 else 0), (
        "its epoch takes no time, so a snapshot is used only where the digests behind it are wanted"
    )
    assert list(answer.digests) == digests[reported:]


@in_loop
async def test_an_answer_that_waits_ends_with_its_slot() -> None:
    """Its batch is never made, for the slot moves to another worker."""
    host = cast(SlotHost, SimpleNamespace(name="w", slot_bytes=1 << 30))
    slot = Slot(host, records_pb2.WorkerAssignment())
    slot.record.capabilities.state_methods = 2
    slot.record.ready.set()
    wanted = request(0, 5, 5)
    wanted.deadline_s = 60
    asking = asyncio.ensure_future(slot.answer(wanted))
    await asyncio.wait([asking], timeout=20 * POLL_S)
    assert not asking.done()
    await slot.stop()
    assert await asyncio.wait_for(asking, DEADLINE_S) is None
