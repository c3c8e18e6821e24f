"""What the books look like from outside: the messages that replies are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.appliance import demand
from penstock.appliance.books import Books
from penstock.appliance.model import Attempt, Box, Place, Slot, Worker
from penstock.appliance.pace import Pace
from penstock.appliance.states import Want
from penstock.proto.channel import VERSION
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

STEP = 64
"""Workers in a step of a status reply."""


def slot_view(books: Books, slot: Slot) -> pb.SlotView:
    view = pb.SlotView(
        slot=slot.key.slot,
        generation=slot.generation,
        phase=slot.phase,
        worker=slot.worker,
        traits=slot.traits,
        error=slot.error,
        restarts=slot.restarts,
        note=slot.note,
        doing=slot.doing,
        stack=slot.stack,
        skipped=sum(slot.skipped.values()),
        successor=slot.successor.worker if slot.successor is not None else "",
        batch_s=slot.batch_s,
        handed_over=slot.handed_over,
        waited_share=slot.waited_share,
    )
    worker = books.workers.get(slot.worker)
    if worker is not None and slot.phase in (pb.READY, pb.FAILED):
        # A failed slot keeps its lane as long as its worker: batches before the error come first.
        view.host_id, view.local_address, view.tcp_address = worker.host_id, worker.local_address, worker.tcp_address
        view.ticket = books.ticket(slot.key, slot.generation)
    return view


def watch_reply(
    books: Books, attempt: Attempt, box: Box, seen_version: int, pace: Pace, wall_s: float
) -> pb.WatchRunReply:
    others = [number for number in sorted(attempt.ended) if number != box.number]
    return pb.WatchRunReply(
        version=box.version,
        slots=[slot_view(books, slot) for slot in box.slots] if box.version != seen_version else (),
        missing_slots=sum(slot.phase == pb.WAITING for slot in box.slots),
        wall_s=wall_s,
        ended=[pb.BoxEnd(box=number, step=attempt.boxes[number].step) for number in others],
        beat_s=pace.beat_s,
        lease_s=pace.lease_s,
    )


def assignment(books: Books, attempt: Attempt, box: Box, slot: Slot, worker: Worker) -> records_pb2.WorkerAssignment:
    """What the worker is told of the slot: it has it, or is to get ready for it."""
    successor = slot.successor if slot.worker != worker.name else None
    generation = slot.generation if successor is None else successor.generation
    return records_pb2.WorkerAssignment(
        **slot.key._asdict(),
        generation=generation,
        num_boxes=attempt.num_boxes,
        num_workers_per_box=attempt.num_workers,
        seed=attempt.seed,
        loader=box.opening.loader,
        lane_key=books.lane_key(slot.key, generation),
        resume=box.opening.resume,
        base=box.base.to_proto(),
        recovery=slot.recovery or successor is not None,
        successor=successor is not None,
        hand_over=slot.successor is not None and successor is None and slot.successor.ready_at > 0,
        skips=[records_pb2.Skip(epoch=epoch, total=total, count=count) for (epoch, total), count in slot.skips.items()],
    )


def heartbeat_reply(
    books: Books,
    worker: Worker,
    seen_version: int,
    pace: Pace,
    wall_s: float,
    wants: Iterable[tuple[Want, float]],
    stuck: int,
) -> pb.HeartbeatReply:
    """`wants`: the worker's open state requests, with the seconds that their most patient asker still has. `stuck`: of
    a worker that drains, the slots for which there is no other place."""
    part = books.snapshot_share()
    reply = pb.HeartbeatReply(
        version=worker.version,
        wall_s=wall_s,
        beat_s=pace.beat_s,
        lease_s=pace.lease_s,
        snapshot_every_s=part.every_s,
        snapshot_bytes_per_s=part.bytes_per_s,
        draining=worker.draining,
        stuck=stuck,
    )
    if worker.version == seen_version:
        reply.unchanged = True
        return reply
    for key in sorted(worker.slots):
        slot = books.slot(key)
        assert slot is not None
        attempt, box = books.box_of(slot)
        reply.assignments.append(assignment(books, attempt, box, slot, worker))
    reply.state_requests.extend(want.request(left_s) for want, left_s in wants)
    return reply


def _box_status(books: Books, box: Box) -> pb.BoxStatus:
    waiting_for = ""
    if 0 < box.waiting_for <= len(box.slots):
        slot = box.slots[box.waiting_for - 1]
        waiting_for = f"worker {slot.worker} (slot {slot.key.slot})" if slot.worker else f"slot {slot.key.slot}"
    return pb.BoxStatus(
        box=box.number,
        live=box.place is Place.LIVE,
        step=box.step,
        epoch=box.delivered.epoch or box.base.epoch,
        steps_per_s=box.steps_per_s,
        waited_s=box.waited_s,
        waited_share=box.waited_share,
        waiting_for=waiting_for,
        slots=[slot_view(books, slot) for slot in box.slots],
        pass_ended=box.pass_ended,
    )


def fill_status(reply: pb.StatusReply, books: Books, now: float, uptime_s: float) -> Iterator[None]:
    """In steps of a box or STEP workers; the books may change between them."""
    reply.version, reply.uptime_s = VERSION, uptime_s
    for run in list(books.runs.values()):
        status = reply.runs.add(
            run=run.name,
            attempt=run.attempt,
            num_boxes=run.num_boxes,
            num_workers_per_box=run.num_workers,
            open=run.current is not None,
        )
        if run.current is not None:
            status.recommended_workers_per_box = demand.workers_per_box(run.current)
            for _, box in sorted(run.current.boxes.items()):
                status.input_fn = box.opening.loader.input_fn
                status.boxes.append(_box_status(books, box))
                for slot in status.boxes[-1].slots:
                    slot.ClearField("ticket")  # an operator may look, not open lanes
                yield
    reply.recommended_workers = demand.daemons(books)
    for number, worker in enumerate(list(books.workers.values())):
        slots = [books.slot(key) for key in worker.slots]
        reply.workers.add(
            worker=worker.name,
            host_id=worker.host_id,
            slots=worker.capacity,
            slots_used=len(worker.slots),
            live=worker.registered,
            seen_s_ago=max(0.0, now - worker.seen_at),
            tcp_address=worker.tcp_address,
            batches_per_s=sum(slot.batches_per_s for slot in slots if slot is not None and slot.worker == worker.name),
            draining=worker.draining,
            version=worker.release,
            allow=worker.allow,
        )
        if number % STEP == STEP - 1:
            yield
