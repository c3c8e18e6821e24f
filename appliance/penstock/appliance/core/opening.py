"""What an OpenRun means: the same opening again, a place in the open attempt, or the next attempt.

The question behind all rules is whether the opener belongs to the launch that holds the run, or is its successor. A key
says it outright. Without one, a place that is free in an attempt whose members are all alive is a launch that is still
gathering; a member that is gone makes the attempt broken, for nobody can rejoin a launch whose slots have moved on, so
the opener must be a successor; and a place that a live client holds cannot be told apart from a mistake, so it is an
error, except for a single box: there the successor never waits for its dead predecessor.

Pure functions over the cluster state; nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.appliance.model.entities import Attempt, AttemptState, Box, BoxPresence, Run, client_of, topology
from penstock.appliance.model.limits import Limits
from penstock.appliance.storage.snapshot_index import SnapshotIndex
from penstock.proto.errors import (
    BoxOutOfRangeError,
    BoxTakenError,
    InvalidArgumentError,
    OverloadedError,
    StateMismatchError,
    SupersededError,
    TopologyError,
)
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb


@dataclass(frozen=True)
class RepeatedOpening:
    """A repeated call."""

    box: Box


@dataclass(frozen=True)
class JoinAttempt:
    attempt: Attempt


@dataclass(frozen=True)
class OpenAttempt:
    """Open the next attempt; an open one is superseded."""


def run_name(request: pb.OpenRunRequest) -> str:
    return f"{request.job}/{request.ordinal}"


def validate(request: pb.OpenRunRequest, limits: Limits) -> Position:
    """Checks all that can be checked without the cluster state; returns where the box starts."""
    if not request.job or not request.loader.input_fn:
        raise InvalidArgumentError("an opening needs a job and an input_fn")
    if request.num_boxes < 1 or request.num_workers_per_box < 1:
        raise InvalidArgumentError(
            f"num_boxes={request.num_boxes} and num_workers_per_box={request.num_workers_per_box}: both start at 1"
        )
    if request.num_boxes * request.num_workers_per_box > limits.slots_max:
        raise InvalidArgumentError(
            f"{topology(request.num_boxes, request.num_workers_per_box)} are more than {limits.slots_max} workers"
        )
    if request.box >= request.num_boxes:
        raise BoxOutOfRangeError(
            f"box {request.box} of run {run_name(request)}: with num_boxes={request.num_boxes} the boxes are "
            f"0 to {request.num_boxes - 1}"
        )
    told, count = len(request.start.slots), request.num_workers_per_box
    if told not in (0, count):
        raise InvalidArgumentError(f"the position to start from has {told} slots, the box has {count}")
    return start_of(request)


def start_of(request: pb.OpenRunRequest) -> Position:
    """Where the box starts: at the place of a saved state, or with all of its workers at a beginning."""
    start = request.start
    if start.slots:
        return Position.from_proto(start)
    return Position.start(request.num_workers_per_box, step=start.step, epoch=start.epoch)


def resumes(request: pb.OpenRunRequest) -> bool:
    return bool(request.resume.blob) or request.start.step > 0


def told(request: pb.OpenRunRequest) -> tuple[str, pb.OpenRunRequest]:
    """Who opens, and the opening without what proves it: that is kept nowhere."""
    if not request.client_id:
        raise InvalidArgumentError("an opening needs a client_id")
    kept = pb.OpenRunRequest()
    kept.CopyFrom(request)
    kept.ClearField("client_id")
    return client_of(request.client_id), kept


def check_room(
    request: pb.OpenRunRequest, run: Run | None, runs: int, snapshot_index: SnapshotIndex, limits: Limits
) -> None:
    """Refuse what there is no room for, and what would keep the coordinator from everybody else's calls. What the
    journal has is not asked: another release may have let it in. `runs`: how many it knows."""
    if run is None and runs >= limits.runs_max:
        raise OverloadedError(f"the journal knows {runs} runs, which is the limit: go on with another state directory")
    for what, blob in (("resume from", request.resume.blob), ("make the loader of", request.loader.arguments_blob)):
        if blob and not snapshot_index.has_blob(blob):
            raise InvalidArgumentError(f"the coordinator has no blob {blob} to {what}: send it with PutBlob first")
    if request.num_workers_per_box > limits.box_slots_max:
        raise InvalidArgumentError(
            f"num_workers_per_box must be at most {limits.box_slots_max}, got {request.num_workers_per_box}: spread "
            "the workers over more boxes"
        )
    size = request.ByteSize() - request.start.ByteSize()
    if size > limits.opening_max:
        raise InvalidArgumentError(
            f"an opening must have at most {limits.opening_max} bytes, got {size}: send large arguments with PutBlob"
        )


def decide(
    run: Run | None, request: pb.OpenRunRequest, client: str, now: float
) -> RepeatedOpening | JoinAttempt | OpenAttempt:
    """Raises BoxTakenError, SupersededError, TopologyError, StateMismatchError, InvalidArgumentError."""
    if run is None:
        return OpenAttempt()
    for past in run.past.values():
        if past.clients.get(request.box) == client:
            raise SupersededError(past.why)  # a delayed duplicate of an opening that has had its time
    current = run.current
    if current is None:
        return _next(run, request)
    held = current.boxes.get(request.box)
    if held is not None and held.client == client:
        if held.place is BoxPresence.CLOSED:
            raise SupersededError(
                f"box {held.number} of run {run.name} was closed by this client; open it as a new one"
            )
        return RepeatedOpening(held)

    live = held is not None and held.place is BoxPresence.LIVE
    key = request.attempt_key
    if key and key != current.key:
        earlier = [past for past in run.past.values() if past.key == key and past.state is AttemptState.SUPERSEDED]
        if earlier and current.any_live():
            raise SupersededError(f"{earlier[-1].why}; its attempt key {key!r} cannot come back: choose a new one")
        return _next(run, request)
    if key:
        if held is not None and live:
            raise _taken(current, held, now, "")
        return _join(current, request) if held is None else _next(run, request)
    if request.num_boxes == 1:
        return _next(run, request)
    if held is not None and live:
        remedy = (
            "; to replace that launch, give all boxes of the new one the same attempt key (attempt= or "
            f"PENSTOCK_ATTEMPT), or wait up to {held.lease_until - now:.0f} s if its process is dead"
        )
        raise _taken(current, held, now, remedy)
    if held is not None or not current.all_live():
        return _next(run, request)
    return _join(current, request)


def _taken(attempt: Attempt, held: Box, now: float, remedy: str) -> BoxTakenError:
    return BoxTakenError(
        f"box {held.number} of run {attempt.run} (attempt {attempt.number}) is held by {held.who()}, heard of "
        f"{max(0.0, now - held.reported_at):.1f} s ago{remedy}"
    )


def _join(attempt: Attempt, request: pb.OpenRunRequest) -> JoinAttempt:
    where = f"box {request.box} of run {attempt.run} (attempt {attempt.number})"
    asked = topology(request.num_boxes, request.num_workers_per_box)
    if asked != attempt.topology:
        raise TopologyError(
            f"{where} opens it as {asked}, the other boxes as {attempt.topology}: all boxes of a launch need the "
            "same numbers"
        )
    if request.has_seed and request.seed != attempt.seed:
        raise InvalidArgumentError(
            f"{where} comes with seed {request.seed}, the other boxes have {attempt.seed}: they must agree"
        )
    for other in list(attempt.boxes.values())[:1]:  # which agrees with all others
        theirs, ours = other.opening.loader.input_fn, request.loader.input_fn
        if theirs != ours:
            raise TopologyError(
                f"{where} runs {ours}, box {other.number} runs {theirs}: all boxes must make their loaders in one order"
            )
        if resumes(other.opening) != resumes(request):
            says = ["starts anew", "resumes from a state"]
            raise StateMismatchError(
                f"{where} {says[resumes(request)]}, box {other.number} {says[resumes(other.opening)]}: load the same "
                "state on all boxes"
            )
    return JoinAttempt(attempt)


def _next(run: Run, request: pb.OpenRunRequest) -> OpenAttempt:
    before, asked = topology(run.num_boxes, run.num_workers), topology(request.num_boxes, request.num_workers_per_box)
    if before != asked and not resumes(request):
        raise TopologyError(
            f"run {run.name} was opened as {before}, now as {asked} without a state: load a state to go on with "
            "another topology, or choose another job name to start anew"
        )
    return OpenAttempt()


def seed_of(run: Run | None, request: pb.OpenRunRequest, fresh: Callable[[], int]) -> int:
    """The seed of the next attempt."""
    if request.has_seed:
        if run is not None and request.seed != run.seed and not resumes(request):
            raise InvalidArgumentError(
                f"run {run.name} has the seed {run.seed}, and is re-opened with seed {request.seed} and no state to "
                "resume from: leave the seed out, or choose another job name"
            )
        return request.seed
    return run.seed if run is not None else fresh()
