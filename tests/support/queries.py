"""State queries as a box makes them, and answers as a worker gives them, in a world without processes."""

from __future__ import annotations

from typing import NamedTuple

from fake_cluster import FakeBox, FakeWorker

from penstock.appliance.core.state_query import StateQuery
from penstock.proto.errors import PenstockError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2


def ask(box: FakeBox, step: int, **fields: object) -> StateQuery:
    """Begin a state query as the box itself does, with its progress."""
    request = pb.FetchStateRequest(run=box.reply.run, attempt=box.reply.attempt, step=step, deadline_s=30)
    request.progress.CopyFrom(box.progress())
    request.MergeFrom(pb.FetchStateRequest(**fields))  # type: ignore[arg-type]
    return box.world.state_machine.begin_state(request)


def respond(
    worker: FakeWorker,
    *,
    starts: dict[tuple[int, int], int] | None = None,
    only: int | None = None,
    box: int | None = None,
    tells_all: bool = True,
) -> None:
    """Answers the worker's open requests, as a worker does that knows its own epochs and nothing else.

    `starts`: (slot, epoch) -> the slot's total when that epoch began, which is where the one before ended.
    """
    starts = starts or {}
    for request in worker.heartbeat().state_requests:
        if (only is not None and request.slot != only) or (box is not None and request.box != box):
            continue
        if request.request in worker.answered:
            continue
        worker.answered.add(request.request)
        answer = pb.StateAnswer(request=request.request, worker=worker.name, session=worker.session)
        epoch, total = request.epoch, request.position.total
        began = starts.get((request.slot, epoch))
        over = starts.get((request.slot, epoch + 1))
        data = b""
        if tells_all:
            ends = {epoch - 1: total for (slot, epoch), total in starts.items() if slot == request.slot and epoch}
            answer.ends.extend(records_pb2.EpochEnd(epoch=epoch, total=total) for epoch, total in ends.items())
        if began is not None and began != total - request.position.delivered:
            answer.ended, answer.ended_epoch, answer.ended_total = True, epoch - 1, began
        elif over is not None and over < total:
            answer.ended, answer.ended_epoch, answer.ended_total = True, epoch, over
        else:
            del answer.ends[:]
            answer.samples_streamed, answer.digest = total * 4, 99
            data = f"{request.box}.{request.slot}:{epoch}.{total}".encode()
        worker.world.state_machine.answer_state(answer, data)


class GatheredState(NamedTuple):
    records: list[tuple[pb.WorkerRecord, bytes]]
    positions: dict[int, records_pb2.BoxPosition]


def result(query: StateQuery) -> GatheredState | None:
    """States of all boxes; None while incomplete, and after states were dropped."""
    if query.failure is not None or len(query.boxes) < query.num_boxes:
        return None
    states = sorted(query.boxes.items())
    positions = {number: state.position for number, state in states if state.position is not None}
    return GatheredState([record for _, state in states for record in state.records], positions)


def values(gathering: StateQuery) -> list[str]:
    assert gathering.failure is None
    found = result(gathering)
    assert found is not None
    return [data.decode() for _, data in found.records]


def failure(gathering: StateQuery) -> PenstockError:
    assert gathering.failure is not None
    return gathering.failure
