"""What a slot answers when it is asked for a state, where its runner or its loader knows less than the asker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.proto.assignment import assigned, current_assignment
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.worker.control import Channel
from penstock.worker.ledger import Ledger
from penstock.worker.offprint import Offprint
from penstock.worker.scratch import _state
from penstock.worker.slot import Host, Slot
from penstock.worker.snapshots import Kept, SnapshotStore
from penstock.worker.source import END, Base, Source
from penstock.worker.states import POLL_S, States

DEADLINE_S = 10.0


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger.create()
    yield made
    made.close()


def states_of(ledger: Ledger, **fields: Any) -> States:
    fields = {"assignment": records_pb2.WorkerAssignment(), "attached": True, "phase": pb.READY} | fields
    return States(cast(Slot, SimpleNamespace(ledger=ledger, name="box 0 slot 1", drain=lambda: None, **fields)))


def request(epoch: int, delivered: int, total: int) -> pb.StateRequest:
    return pb.StateRequest(epoch=epoch, position=records_pb2.SlotPosition(delivered=delivered, total=total))


def test_a_runner_that_was_ahead_may_not_have_heard_of_the_break_yet(ledger: Ledger) -> None:
    """It ran to the end of the pass, batch 8; the loop left the pass after the slot's batch 2."""

    async def body() -> None:
        ledger.place(8, 0, 8)
        ledger.here(0, 0)
        ledger.end(0, 8)
        answer = pb.StateAnswer()
        asking = asyncio.ensure_future(states_of(ledger)._produced(request(1, 0, 2), answer))
        await asyncio.wait([asking], timeout=20 * POLL_S)
        assert not asking.done(), f"it took the end that it had reached for the pass's: {answer}"
        ledger.cut(0, 2)
        ledger.place(2, 0, 2)
        assert await asyncio.wait_for(asking, DEADLINE_S)
        assert not answer.ended

    asyncio.run(body())


@pytest.mark.parametrize(("began", "end"), [(8, 2), (2, 8)])
def test_where_a_pass_began_is_told_by_who_has_begun_it(ledger: Ledger, began: int, end: int) -> None:
    """Then an asker who thinks otherwise is wrong, in whichever way."""

    async def body() -> None:
        ledger.place(end, 1, end)
        ledger.end(0, end)
        ledger.here(1, 0)
        answer = pb.StateAnswer()
        asking = states_of(ledger)._produced(request(1, 1, began + 1), answer)
        assert not await asyncio.wait_for(asking, DEADLINE_S)
        assert (answer.ended, answer.ended_epoch, answer.ended_total) == (True, 0, end)

    asyncio.run(body())


# ------------------------------------------------------------------------------ loaders that begin their passes lazily


class Heard:
    """The channel of a scratch child; keeps what it said."""

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        self.said = SimpleNamespace(kind=kind, payload=payload, fields=fields)


@pytest.fixture
def lazy() -> Iterator[tuple[Source, list[Base]]]:
    """A loader in its third pass of 8 batches, after two of them; and how each pass was opened."""
    assignment = records_pb2.WorkerAssignment(run="job/0", attempt=1, num_boxes=1, num_workers_per_box=1, seed=5)
    assignment.loader.input_fn = "streams:fresh"
    assignment.loader.allow.append("streams")
    with assigned(current_assignment()):
        source = Source(assignment)
        source.build()
        origins = []
        for batches in (9, 9, 2):
            origins.append(source.open_pass())
            got = [source.next() for _ in range(batches)]
            assert (got[-1] is END) == (batches == 9)
        yield source, origins


def scratch(source: Source, base: Base, total: int, *, doubting: bool) -> Any:
    heard = Heard()
    fields = {"epoch": 2, "total": total, "step": 0, "from_origin": False, "digests": {}, "doubting": doubting}
    _state(source, base, fields, Offprint(), cast(Channel, heard))
    return heard.said.fields


def test_a_pass_that_ends_at_once_behind_its_origin_is_doubted(lazy: tuple[Source, list[Base]]) -> None:
    source, origins = lazy
    assert scratch(source, origins[1], 20, doubting=True) == {"at_once": True}
    assert scratch(source, origins[2], 20, doubting=True) == {"at_once": True}
    assert not scratch(source, origins[0], 20, doubting=True)["ended"]
    assert scratch(source, origins[1], 20, doubting=False)["ended"], "for its passes are counted one too early"


def test_a_base_of_the_pass_before_is_taken_then_and_without_one_the_pass_is_empty(ledger: Ledger) -> None:
    tried: list[tuple[bytes, bool]] = []

    async def child(bases: list[bytes], task: str, deadline_s: float, **fields: Any) -> Any:
        tried.append((bases[0], fields["doubting"]))
        if fields["doubting"]:
            return SimpleNamespace(fields={"at_once": True}, payload=b"")
        return SimpleNamespace(fields={"ended": False, "samples": 0, "digest": 0}, payload=b"state")

    async def body() -> None:
        store = SnapshotStore()
        for epoch, total in ((0, 0), (1, 8)):
            store.add(Kept(epoch, 0, total, 0, True, 0, b"%d" % epoch), 0)
        trust, traits = SimpleNamespace(exact=True), SimpleNamespace(own_workers=0)
        host = SimpleNamespace(trust=lambda assignment: trust)
        states = states_of(ledger, store=store, host=host, traits=traits, scratch=child, origins_only=lambda: False)
        assert await states._materialise(request(2, 4, 20), pb.StateAnswer(), 1e12) == b"state"
        assert tried == [(b"1", True), (b"0", True), (b"0", False)]

    asyncio.run(body())


def test_an_answer_that_waits_ends_with_its_slot() -> None:
    """Its batch is never made, for the slot moves to another worker."""

    async def body() -> None:
        slot = Slot(cast(Host, SimpleNamespace(name="w")), records_pb2.WorkerAssignment())
        slot.traits.state_methods = 2
        slot.ready.set()
        wanted = request(0, 5, 5)
        wanted.deadline_s = 60
        asking = asyncio.ensure_future(slot.answer(wanted))
        await asyncio.wait([asking], timeout=20 * POLL_S)
        assert not asking.done()
        await slot.stop()
        assert await asyncio.wait_for(asking, DEADLINE_S) is None

    asyncio.run(body())


def test_what_a_successor_needs() -> None:
    """The newest base; and one from which any loader goes on, where the newest is the origin of a later pass."""

    async def body() -> None:
        slot = Slot(cast(Host, SimpleNamespace(name="w")), records_pb2.WorkerAssignment())
        first, inside, last = (
            Kept(0, 0, 0, 0, True, 0, b""),
            Kept(0, 3, 3, 0, False, 0, b""),
            Kept(0, 5, 5, 0, False, 0, b""),
        )
        origin, later = Kept(1, 0, 5, 0, True, 0, b""), Kept(1, 2, 7, 0, False, 0, b"")
        for base in (first, inside, last, origin):
            slot.store.add(base, 0)
        assert slot._newest() == [last, origin]
        assert slot._newest(below=5) == [inside]
        slot.store.add(later, 0)
        assert slot._newest() == [later]
        assert slot._newest(below=1) == [first]
        await slot.stop()

    asyncio.run(body())
