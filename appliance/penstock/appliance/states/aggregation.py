"""Aggregation of states on a worker, by the loader's aggregate_state_dict, for a training job that cannot build the
loader itself.

Usually the client aggregates the states with a loader of its own (client/states/local_loader.py). In the training
process input_fn may raise, for example because its data are only on the workers' machines. Then the client uploads the
workers' states as a blob and requests their aggregation. Any worker of the box can do this, because every worker
returns the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.appliance.model.entities import Attempt, Box, Slot
from penstock.appliance.states.state_query import BoxState, SlotStateRequest, StateQuery
from penstock.proto.errors import StateUnavailableError
from penstock.proto.rpc.channel import error_of
from penstock.proto.v1 import coordinator_pb2 as pb


@dataclass(frozen=True)
class AggregationTask(SlotStateRequest):
    """Request to one worker to aggregate the states in a blob (uploaded data)."""

    blob: str = ""

    @property
    def id(self) -> str:
        return f"{super().id}:{self.blob}"

    def request(self, deadline_s: float) -> pb.StateRequest:
        request = super().request(deadline_s)
        request.aggregate_blob = self.blob
        return request


@dataclass(eq=False)
class Aggregation(StateQuery):
    """State query for an aggregation. It sends one request, to the first ready slot of the box `box`. The result counts
    as the state of box 0 of a run with one box, so `StateQuery` needs no other code to wait for it and send it."""

    box: int = 0
    blob: str = ""

    @property
    def key(self) -> tuple[str, int, int, str]:
        return (self.run, self.attempt, self.step, self.blob)

    def task(self, *given: Any) -> AggregationTask:
        """Return the request to a worker. `given`: arguments for the constructor of the request's class."""
        return AggregationTask(*given)

    def able(self, box: Box) -> list[Slot]:
        """Return the slots whose workers may do the task. The first of these slots that is ready does it."""
        return box.slots

    def is_next(self, slot_request: SlotStateRequest) -> bool:
        return True

    def refresh(self, attempt: Attempt, box: int | None = None) -> None:
        super().refresh(attempt)  # the query has one box, number 0, whichever box its request is for

    def _refresh(self, attempt: Attempt, number: int) -> None:
        box = attempt.boxes.get(self.box)
        if box is None:
            raise StateUnavailableError(
                f"the states of run {self.run} cannot be aggregated yet, because box {self.box}, whose worker does "
                "this, has not opened the run: retry once the box has opened the run"
            )
        ready = next((slot for slot in self.able(box) if slot.phase == pb.READY), None)
        self._missing[number] = [] if ready is not None else [f"a worker of box {self.box}"]
        slot_requests: dict[str, SlotStateRequest] = {}
        if ready is not None:
            task = self.task(
                ready.key, ready.generation, ready.worker, self.step, 0, 0, 0, 0, 0, self.serial, self.blob
            )
            slot_requests[task.id] = task
        self._ask(number, slot_requests)

    def answered(self, attempt: Attempt, answer: pb.StateAnswer, data: bytes) -> None:
        slot_request = self.requests.get(answer.request)
        if slot_request is None or answer.worker != slot_request.worker:
            return
        if answer.HasField("error"):
            self.fail(self._of_slot(error_of(answer.error), slot_request.key, slot_request.worker))
            return
        self.held += len(data) - self.coming.pop(answer.request, 0)
        self._ask(0, {})
        record = pb.WorkerRecord(box=slot_request.key.box, local_worker_id=slot_request.key.slot, state_bytes=len(data))
        self._completed(0, BoxState([(record, data)]))
