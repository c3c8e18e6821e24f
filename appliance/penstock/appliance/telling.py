"""What a coordinator's log tells of runs and workers: who came, who left, what was lost. From the edge, so that the
registry stays what it is: it writes the journal, and the log is for people."""

from __future__ import annotations

import logging

from penstock.proto.logs import about
from penstock.proto.v1 import coordinator_pb2 as pb

__all__ = ["Teller"]

_log = logging.getLogger("penstock.appliance")
REMEMBERED = 1024
"""Losses that are known to have been told: a worker reports each until it hears that the slot is no longer its own."""


class Teller:
    """Tells each thing once."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, int, int, int, int], None] = {}

    def opened(self, request: pb.OpenRunRequest, reply: pb.OpenRunReply) -> None:
        """A box has taken its place."""
        extra = about(run=reply.run, attempt=reply.attempt, box=request.box)
        where = f"of {request.num_boxes} x {request.num_workers_per_box} workers, from host {request.host_id or '?'}"
        _log.info("%s: box %d opened attempt %d %s", reply.run, request.box, reply.attempt, where, extra=extra)

    def closed(self, request: pb.CloseRunRequest) -> None:
        """A box has given it back."""
        extra = about(run=request.run, attempt=request.attempt, box=request.box)
        _log.info("%s: box %d closed attempt %d", request.run, request.box, request.attempt, extra=extra)

    def registered(self, request: pb.RegisterWorkerRequest) -> None:
        """A worker is there."""
        extra = about(worker=request.worker)
        _log.info("worker %s is there, with %d slots", request.worker, request.slots, extra=extra)

    def deregistered(self, request: pb.DeregisterWorkerRequest) -> None:
        """A worker leaves as it should."""
        _log.info("worker %s leaves", request.worker, extra=about(worker=request.worker))

    def reported(self, request: pb.HeartbeatRequest) -> None:
        """A worker says how its slots are."""
        for slot in request.slots:
            if not slot.HasField("error"):
                continue
            key = (slot.run, slot.attempt, slot.box, slot.slot, slot.generation)
            if key in self._lost:
                continue
            self._lost[key] = None
            if len(self._lost) > REMEMBERED:
                del self._lost[next(iter(self._lost))]
            extra = about(
                run=slot.run,
                attempt=slot.attempt,
                box=slot.box,
                slot=slot.slot,
                generation=slot.generation,
                worker=request.worker,
            )
            what = "was lost" if slot.lost else "has failed"
            where = f"{slot.run} box {slot.box} slot {slot.slot}"
            _log.warning("%s %s: %.1000s", where, what, slot.error.message, extra=extra)
