"""A coordinator that knows the token and answers as a test says, and assignments of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.proto.rpc.credentials.tickets import lane_key
from penstock.proto.state.codec import encode_state
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorServicer

__all__ = ["SECRET", "Hostile", "assignment", "key_of"]

SECRET = "s" * 64
_LANES = b"l" * 32


def key_of(generation: int, slot: int = 0, run: str = "job/0", box: int = 0) -> bytes:
    """The key of a slot's lane."""
    return lane_key(_LANES, run, 1, box, slot, generation)


def assignment(number: int, slot: int = 0, run: str = "job/0") -> records_pb2.WorkerAssignment:
    loader = records_pb2.LoaderSpec(input_fn="streams:counter", arguments=encode_state({"args": (), "kwargs": {}}))
    loader.options.max_batch_bytes = 1 << 20
    start = records_pb2.BoxPosition(live=[0, 1], slots=[records_pb2.SlotPosition()] * 2)
    return records_pb2.WorkerAssignment(
        run=run,
        attempt=1,
        slot=slot,
        generation=number,
        num_boxes=1,
        num_workers_per_box=2,
        lane_key=key_of(number, slot, run),
        loader=loader,
        start=start,
    )


class Hostile(CoordinatorServicer):
    """Answers each heartbeat at once."""

    def __init__(self, reply: Callable[[int], pb.HeartbeatReply]) -> None:
        self.reply = reply
        self.heartbeats = 0
        self.ready: set[int] = set()
        """Slots that were reported ready."""
        self.worker = pb.RegisterWorkerRequest()
        """The last registration."""
        self.reports = 0
        """Most slots in one heartbeat."""

    async def RegisterWorker(self, request: Any, context: Any) -> pb.RegisterWorkerReply:
        self.worker = request
        return pb.RegisterWorkerReply()

    async def DeregisterWorker(self, request: Any, context: Any) -> pb.DeregisterWorkerReply:
        return pb.DeregisterWorkerReply()

    async def Heartbeat(self, request: Any, context: Any) -> pb.HeartbeatReply:
        self.heartbeats += 1
        self.reports = max(self.reports, len(request.slots))
        self.ready |= {report.slot for report in request.slots if report.phase == pb.READY}
        reply = self.reply(self.heartbeats)
        reply.version = self.heartbeats
        return reply

    async def PutSnapshot(self, parts: Any, context: Any) -> pb.PutSnapshotReply:
        return pb.PutSnapshotReply()

    async def PutState(self, parts: Any, context: Any) -> pb.PutStateReply:
        return pb.PutStateReply()
