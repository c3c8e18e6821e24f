"""State queries under way, kept results, and the range of steps that may be requested. A query collects the states of
all slots of a run at one step, for a rank that saves.

Ranks that request a step share one query or its kept result, so every rank saves the same bytes, and each worker sends
its states once. All answers in memory share the budget ANSWERS_MAX. From half of it on, a query drops states that were
sent to all of its callers, and takes no more callers. When it is full, kept results are dropped; then answers wait at
the worker. Answers of the box that callers wait for next are always taken: otherwise no query could complete.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from penstock.appliance.core.cluster import ClusterState
from penstock.appliance.core.entities import Attempt, known_run
from penstock.appliance.core.state_query import Aggregation, MixtureTrial, SlotStateRequest, StateQuery
from penstock.proto.errors import (
    DeadlineError,
    OverloadedError,
    StateUnavailableError,
    SupersededError,
    UnknownRunError,
)
from penstock.proto.v1 import coordinator_pb2 as pb

_Key = tuple[str, int, int, str]

ANSWERS_MAX = 256 << 20
"""Most bytes of answers in memory, to be sent or kept; above it, each query may still take those of one box."""
ASKED_AT_ONCE = 1024
"""Most slots that a query asks at a time, or one box: gRPC may buffer 64 KiB of each answer, and 10,000 answers at
once would delay heartbeats."""
QUERIES_MAX = 64
"""Open queries that every run may have, and two more for each box; each asks all workers of the run."""
ANSWERS_FREED = ("answers_freed",)
"""Topic announced when memory of answers was freed."""


class StateQueries:
    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._open: dict[int, StateQuery] = {}
        """Serial number -> the query, while it has callers."""
        self._joinable: dict[_Key, StateQuery] = {}
        self._finished: OrderedDict[_Key, StateQuery] = OrderedDict()
        self._by_request: dict[str, StateQuery] = {}
        """Request id -> query that made it."""
        self._closed: dict[str, StateQuery] = {}
        """Run that has ended -> its newest completed query."""

    def slot_requests(self, worker: str, now: float) -> Iterator[tuple[SlotStateRequest, float]]:
        """Yield each open request to the worker, with the seconds until its query's last caller gives up."""
        for query in self._open.values():
            for slot_request in query.by_worker.get(worker, {}).values():
                yield slot_request, max(0.0, query.deadline - now)

    def begin(self, request: pb.FetchStateRequest, caller: int | None, now: float) -> StateQuery:
        """Return a new query for the step, one under way, or a kept one. `caller`: box of the calling rank, if it is
        one. Raises StateUnavailableError, UnknownRunError, SupersededError, OverloadedError."""
        run = known_run(self._cluster.runs, request.run)
        attempt = self._cluster.attempt(run.name, request.attempt or run.attempt)
        boxes = list(attempt.boxes.values())
        in_epoch = [box for box in boxes if not box.epoch_ended]
        first = max([box.launch_step for box in boxes] + [box.step - box.retention for box in in_epoch])
        last = max(box.step for box in boxes) if caller is None else attempt.boxes[caller].step
        step = request.step
        if request.newest:
            step = min(box.step for box in in_epoch) if in_epoch else last
        # Without a report of the caller in the request, the coordinator does not know what was delivered since the
        # caller's last report.
        last_is_known = caller is not None or request.attempt == 0
        if step < first or (step > last and last_is_known):
            raise StateUnavailableError(
                f"step must be {first} to {last} for run {run.name}, got {step}: this launch {boxes[0].launched} and "
                f"keeps the states of the last retention_steps={boxes[0].retention} steps"
            )
        key = (run.name, attempt.number, step, "")
        self._forget(attempt, first)
        query = self._finished.get(key) or self._joinable.get(key)
        if query is None:
            query = StateQuery(*key[:3], self._cluster.next_version(), attempt.num_boxes)
            query.at_once = ASKED_AT_ONCE
        return self.ask(query, now + request.deadline_s)

    def begin_aggregation(self, request: pb.FetchStateRequest, box: int, now: float) -> StateQuery:
        """Start or join a query in which a worker of the box aggregates states that the caller uploaded as a blob."""
        attempt = self._cluster.attempt(request.run, request.attempt)
        serial = self._cluster.next_version()
        wanted = Aggregation(attempt.run, attempt.number, request.step, serial, box=box, blob=request.aggregate_blob)
        return self.ask(self._joinable.get(wanted.key) or wanted, now + request.deadline_s)

    def are_open(self, run: str) -> bool:
        """Return whether a state of the run is being fetched or aggregated."""
        return any(
            query.run == run and not query.done and not isinstance(query, MixtureTrial) for query in self._open.values()
        )

    def ask(self, query: StateQuery, deadline: float) -> StateQuery:
        """Add a caller to the query, which waits until `deadline`. Raises OverloadedError."""
        if query.serial not in self._open:
            self._check_limit(query)
        query.callers += 1
        query.deadline = max(query.deadline, deadline)
        self._open[query.serial] = query
        if not query.done and self._joinable.get(query.key) is not query:
            self._joinable[query.key] = query
            self._replan(query)  # `settle` plans the query again after later changes
        return query

    def late(self, query: StateQuery, deadline_s: float) -> DeadlineError:
        """Return the error of a query that is not complete in time: what it waits for, and what a runner is in."""
        text = f"the {query.title} was not complete after {deadline_s:.1f} s; waited for {query.waits_for()}"
        run = self._cluster.runs.get(query.run)
        boxes = run.current.boxes.values() if run is not None and run.current is not None else ()
        awaited = (slot for box in boxes if box.number not in query.boxes for slot in box.slots)
        slot = next((slot for slot in awaited if slot.doing), None)
        if slot is None:
            return DeadlineError(text)
        return DeadlineError(f"{text}. The runner of {slot} is {slot.doing}", remote_traceback=slot.stack)

    def _check_limit(self, query: StateQuery) -> None:
        under_way = sum(one.run == query.run for one in self._open.values())
        limit = QUERIES_MAX + 2 * self._cluster.runs[query.run].num_boxes
        if under_way >= limit:
            raise OverloadedError(f"at most {limit} states of run {query.run} can be fetched at once: retry later")

    def sent(self, query: StateQuery, box: int) -> None:
        query.sent[box] += 1
        if query.sent[box] >= query.callers and self.held > ANSWERS_MAX // 2:
            self._release(query)

    def end(self, query: StateQuery, sent: int = 0) -> None:
        """Remove a caller that got the first `sent` boxes; with the last one, open requests are withdrawn."""
        query.callers -= 1
        for box in range(sent):
            if box in query.sent:
                query.sent[box] -= 1
        if query.callers == 0 and self._open.pop(query.serial, None) is not None:
            if self._joinable.get(query.key) is query:
                del self._joinable[query.key]
            query.ask_no_more()
            self._announce(query)
            self._cluster.changed(ANSWERS_FREED)

    # -------------------------------------------------------------------------------------------------------- answers

    @property
    def held(self) -> int:
        kept = {query.serial: query.held for query in (*self._open.values(), *self._finished.values())}
        return sum(kept.values())

    def wanted(self, request: str) -> bool:
        return request in self._by_request

    def admit(self, request: str, size: int, now: float) -> float | None:
        """Return None if an answer can be taken or is not needed; else the seconds until its query's deadline."""
        query = self._by_request.get(request)
        if query is None or request in query.coming:
            return None
        if self.held + size > ANSWERS_MAX:
            self._free_memory(size)
            is_next = query.is_next(query.requests[request])
            if self.held + size > ANSWERS_MAX and not is_next:
                return max(0.0, query.deadline - now)
        query.coming[request] = size
        query.held += size
        return None

    def lost(self, request: str) -> None:
        query = self._by_request.get(request)
        if query is not None:
            query.held -= query.coming.pop(request, 0)
            self._cluster.changed(ANSWERS_FREED)

    def _free_memory(self, size: int) -> None:
        limit = ANSWERS_MAX
        while self._finished and self.held + size > limit:
            self._finished.popitem(last=False)
        for query in list(self._open.values()):
            if self.held + size > limit:
                self._release(query)

    def _release(self, query: StateQuery) -> None:
        for box in [box for box, callers in query.sent.items() if callers >= query.callers]:
            del query.sent[box]
            query.held -= query.boxes.pop(box).size
            query.released = True
        if query.released:
            for kept in (self._joinable, self._finished):
                if kept.get(query.key) is query:
                    del kept[query.key]
            self._cluster.changed(ANSWERS_FREED)

    def answer(self, answer: pb.StateAnswer, data: bytes) -> None:
        """Give a worker's answer to the query that asked. `data`: the saved state of the slot."""
        query = self._by_request.get(answer.request)
        if query is None:
            return
        slot_request = query.requests[answer.request]
        attempt = self._cluster.attempt(query.run, query.attempt)
        query.answered(attempt, answer, data)
        self._announce(query, answered=slot_request.id)
        if answer.ended:  # the other slots' positions follow from this end
            self._cluster.touch(attempt, attempt.boxes[slot_request.key.box])

    # ------------------------------------------------------------------------------------------------------- planning

    def settle(self) -> None:
        """Plan the open queries again for all boxes that changed since the last call."""
        touched, self._cluster.touched = self._cluster.touched, set()
        if not touched:
            return
        for run, attempt, box in sorted(touched):  # sorted, because the order of a set differs between processes
            for query in list(self._open.values()):
                if (query.run, query.attempt) == (run, attempt) and not query.done:
                    self._replan(query, box)
        over = {key[:2] for key in self._finished} & {place[:2] for place in touched}
        for key in [key for key in self._finished if key[:2] in over]:
            known = self._cluster.runs.get(key[0])
            if known is None or known.current is None or known.current.number != key[1]:
                query = self._finished.pop(key)
                before = self._closed.get(key[0], query)
                if known is not None and known.current is None and query.step >= before.step:
                    self._closed[key[0]] = query

    def take_closed(self) -> list[StateQuery]:
        """Return the newest completed query of each run that has ended since the last call."""
        closed, self._closed = self._closed, {}
        return list(closed.values())

    def _replan(self, query: StateQuery, box: int | None = None) -> None:
        try:
            query.refresh(self._cluster.attempt(query.run, query.attempt), box)
        except (SupersededError, UnknownRunError) as error:
            query.fail(error)
        self._announce(query)

    def _announce(self, query: StateQuery, answered: str = "") -> None:
        """Wake the workers whose requests have changed, and the callers of complete boxes. Request `answered` alone
        does not wake its worker, which would cost a call per worker and query, unless its last reply had no room
        for all requests."""
        changed, query.changed = query.changed, []
        completed, query.completed = query.completed, []
        withdrawn = False
        for slot_request in changed:
            if slot_request.id in query.requests:
                self._by_request[slot_request.id] = query
            else:
                self._by_request.pop(slot_request.id, None)
                withdrawn |= slot_request.id != answered  # the answer may be in transfer, or waiting for the budget
        others = {slot_request.worker for slot_request in changed if slot_request.id != answered}
        for name in sorted({slot_request.worker for slot_request in changed}):
            worker = self._cluster.workers.get(name)
            if worker is not None and (name in others or worker.more_requests):
                self._cluster.bump_worker(name)
        if query.done:
            asked = self._joinable.get(query.key) is query
            if asked:
                del self._joinable[query.key]
            if asked and query.failure is None and not isinstance(query, Aggregation):
                self._finished[query.key] = query
                self._free_memory(0)
        for box in range(query.num_boxes) if query.failure is not None else completed:
            self._cluster.changed(query.topic(box))
        if completed or withdrawn or query.failure is not None:
            self._cluster.changed(ANSWERS_FREED)

    def _forget(self, attempt: Attempt, first: int) -> None:
        """Drop kept results for steps before `first`. Also drop, and close to callers, a query with the final state of
        a box (`StateQuery.finals`) that has taken further steps since."""
        for kept in (self._finished, self._joinable):
            for key, query in list(kept.items()):
                if key[:2] != (attempt.run, attempt.number):
                    continue
                left_behind = any(attempt.boxes[box].step != step for box, step in query.finals.items())
                if left_behind or (key[2] < first and kept is self._finished):
                    del kept[key]
